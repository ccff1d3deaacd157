"""Check names before anything is sent, and quote them so that no part of a name is read as SQL."""

from __future__ import annotations

import datetime
import decimal
import enum
import hashlib
import ipaddress
import re
import shlex
import uuid
from collections.abc import Sequence

from fenced_store.errors import InvalidArgument, abbreviated

DEFAULT_SCHEMA = "fenced_store"
MAX_RESOURCE_BYTES = 1024
MAX_PATH_BYTES = 800

_SURROGATE = re.compile("[\ud800-\udfff]")


def check_resource(resource: str) -> str:
    """Return the name of a resource if it is valid."""
    return _check_text("resource's name", resource, MAX_RESOURCE_BYTES)


def check_schema(schema: str) -> str:
    """Return the name of a schema if Postgres keeps it in full and fenced_store may own it."""
    _check_text("schema's name", schema, 63)
    if schema.startswith("pg_") or schema in ("public", "information_schema", "$user"):
        raise InvalidArgument(f"Schema {schema!r} is reserved. Give fenced_store a schema of its own.")
    return schema


def how_to_install(schema: str) -> str:
    """Return the advice for a database without fenced_store in this schema."""
    option = "" if schema == DEFAULT_SCHEMA else f" --fences {shlex.quote(schema)}"
    return f"As its owner run: dblock fence setup{option} (or fenced_store.install(...) from Python)."


def check_table(table: str) -> str:
    """Return the name of a table if it is valid; the database checks whether the table exists."""
    return _check_text("table's name", table, 300)


def check_column(column: str) -> str:
    """Return the name of a column if Postgres keeps it in full."""
    return _check_text("column's name", column, 63)


def check_key(key: str | Sequence[str] | None) -> list[str] | None:
    """Return the columns of a key as a list; None stands for the primary key."""
    if key is None:
        return None
    if not isinstance(key, (str, Sequence)) or not key:
        raise InvalidArgument(f"A key is the name of a column, or a list of names; got {key!r:.80}.")
    return [check_column(one) for one in ([key] if isinstance(key, str) else key)]


def row(resource: str, *key: object) -> str:
    """Return the resource of one row of a protected table, to claim it: `row("public.orders", 42)`.

    Give several columns in the order of the table's `key`. Give each value with the Python type of its column. Text is
    taken as it is, so do not give text for a number or a UUID, nor blanks at the end of a char(n).
    """
    check_resource(resource)
    if not key:
        raise InvalidArgument("A row is named by its key; give the value of each key column.")
    joined = ",".join(_as_text(value).replace("\\", "\\\\").replace(",", "\\,") for value in key)
    if "\0" in joined or _SURROGATE.search(joined):
        raise InvalidArgument(
            f"The key {abbreviated(joined)} holds a NUL or half of a surrogate pair; Postgres cannot store it."
        )
    if len(joined.encode()) > 512:
        joined = f"\\#{hashlib.sha256(joined.encode()).hexdigest()}"
    return check_resource(f"{resource}:{joined}")


def _as_text(value: object) -> str:
    """Return a key's value as text, exactly as the trigger of a protected table writes it."""
    if isinstance(value, enum.Enum):
        return _as_text(value.value)
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, (int, uuid.UUID)):
        return str(value)
    if isinstance(value, (ipaddress.IPv4Interface, ipaddress.IPv6Interface)):
        # Postgres leaves out the mask of a single host in a column of type inet, and keeps it in one of type cidr.
        size = value.network.prefixlen
        return _address_as_text(value.ip) + (f"/{size}" if size < value.max_prefixlen else "")
    if isinstance(value, (ipaddress.IPv4Network, ipaddress.IPv6Network)):
        return f"{_address_as_text(value.network_address)}/{value.prefixlen}"
    if isinstance(value, (ipaddress.IPv4Address, ipaddress.IPv6Address)):
        return _address_as_text(value)
    if isinstance(value, decimal.Decimal) and value.is_finite():
        text = format(value, "f")
        text = text.rstrip("0").rstrip(".") if "." in text else text
        return "0" if text in ("-0", "") else text
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    if isinstance(value, datetime.datetime):
        moment = value.astimezone(datetime.timezone.utc).replace(tzinfo=None) if value.tzinfo else value
        return _trimmed(moment.isoformat())
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, datetime.time) and value.tzinfo is None:
        return _trimmed(value.isoformat())
    raise InvalidArgument(f"A key of a protected row cannot be {type(value).__name__} {value!r:.80}.")


def _address_as_text(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """Return an address as Postgres writes it: with dots where it holds an IPv4 address."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            raise InvalidArgument(f"A key of a protected row cannot be {str(address)!r:.80}: Postgres stores no zone.")
        high, low = divmod(int(address), 2**32)
        if high == 0xFFFF:
            return f"::ffff:{ipaddress.IPv4Address(low)}"
        if high == 0 and low > 0xFFFF:
            return f"::{ipaddress.IPv4Address(low)}"
    return str(address)


def _trimmed(moment: str) -> str:
    return moment.rstrip("0") if "." in moment else moment


def check_path(path: str) -> str:
    """Return the path of an object if every store keeps it as it is."""
    _check_text("path", path, MAX_PATH_BYTES)
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise InvalidArgument(
            f"The path {abbreviated(path)} has an empty part, '.' or '..'. Write it like 'reports/2026/july.json'."
        )
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        raise InvalidArgument(f"The path {abbreviated(path)} holds a control character, which not every store accepts.")
    return path


def quoted(identifier: str) -> str:
    """Quote an identifier for SQL."""
    return '"' + identifier.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Quote text for SQL, so that it is read the same with every setting of standard_conforming_strings."""
    escaped = text.replace("'", "''").replace("\\", "\\\\")
    return f"E'{escaped}'" if "\\" in text else f"'{escaped}'"


def _check_text(what: str, name: str, max_bytes: int) -> str:
    if not isinstance(name, str):
        raise InvalidArgument(f"A {what} is text; got {type(name).__name__}.")
    if "\0" in name:
        raise InvalidArgument(f"The {what} {abbreviated(name)} contains a NUL, which Postgres cannot store.")
    if _SURROGATE.search(name):
        raise InvalidArgument(f"The {what} {abbreviated(name)} holds half of a surrogate pair; it is not text.")
    if not 1 <= len(name.encode()) <= max_bytes:
        raise InvalidArgument(
            f"A {what} takes 1 to {max_bytes} bytes of UTF-8; {abbreviated(name)} has {len(name.encode())}."
        )
    return name
