"""Names, checked before anything is sent, and written into statements so that nothing in them is read as SQL."""

from __future__ import annotations

import datetime
import decimal
import enum
import hashlib
import ipaddress
import re
import uuid
from collections.abc import Sequence

from fenced_store.errors import InvalidArgument, shown

DEFAULT_SCHEMA = "fenced_store"
RESOURCE_BYTES = 1024
PATH_BYTES = 800

_SURROGATE = re.compile("[\ud800-\udfff]")


def check_resource(resource: str) -> str:
    """Return the name if a resource may have it."""
    return _check("resource's name", resource, RESOURCE_BYTES)


def check_schema(schema: str) -> str:
    """Return the schema's name if Postgres can have it whole."""
    _check("schema's name", schema, 63)
    if schema.startswith("pg_") or schema in ("public", "information_schema", "$user"):
        raise InvalidArgument(f"Schema {schema!r} is not ours to have. fenced_store wants one of its own.")
    return schema


def check_table(table: str) -> str:
    """Return the name of a table if Postgres can have read it whole; whether there is one, the database says."""
    return _check("table's name", table, 300)


def check_column(column: str) -> str:
    """Return the name of a column if Postgres can have it whole."""
    return _check("column's name", column, 63)


def check_key(key: str | Sequence[str] | None) -> list[str] | None:
    """Return the columns of a key as a list; None for those of the primary key."""
    if key is None:
        return None
    if not isinstance(key, (str, Sequence)) or not key:
        raise InvalidArgument(f"A key is the name of a column, or several; got {key!r:.80}.")
    return [check_column(one) for one in ([key] if isinstance(key, str) else key)]


def row(resource: str, *key: object) -> str:
    """Return the resource of one row of a protected table, to claim it: `row("public.orders", 42)`.

    Several columns are given in the order in which the table was protected by them. A value is of the Python type that
    the column's values have; text is taken as it is, so give no text for a number or a UUID, and no blanks at the end
    of char(n).
    """
    check_resource(resource)
    if not key:
        raise InvalidArgument("A row is named by its key; none was given.")
    joined = ",".join(_as_text(value).replace("\\", "\\\\").replace(",", "\\,") for value in key)
    if "\0" in joined or _SURROGATE.search(joined):
        raise InvalidArgument(f"The key {shown(joined)} is not text that Postgres can store.")
    if len(joined.encode()) > 512:
        joined = f"\\#{hashlib.sha256(joined.encode()).hexdigest()}"
    return check_resource(f"{resource}:{joined}")


def _as_text(value: object) -> str:
    """Return a value of a key as the trigger of a protected table writes it."""
    if isinstance(value, enum.Enum):
        return _as_text(value.value)
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, (int, uuid.UUID, ipaddress.IPv4Address, ipaddress.IPv6Address)):
        return str(value)
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


def _trimmed(moment: str) -> str:
    return moment.rstrip("0") if "." in moment else moment


def check_path(path: str) -> str:
    """Return the path of an object if every store can have it as it is."""
    _check("path", path, PATH_BYTES)
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise InvalidArgument(
            f"The path {shown(path)} has a part that is empty, '.' or '..'; write it like 'reports/2026/july.csv'."
        )
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        raise InvalidArgument(f"The path {shown(path)} holds a control character, which not every store can have.")
    return path


def quoted(identifier: str) -> str:
    """Quote an identifier for SQL."""
    return '"' + identifier.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Quote text for SQL, whatever the session's setting for backslashes."""
    escaped = text.replace("'", "''").replace("\\", "\\\\")
    return f"E'{escaped}'" if "\\" in text else f"'{escaped}'"


def _check(what: str, name: str, most: int) -> str:
    if not isinstance(name, str):
        raise InvalidArgument(f"A {what} is text; got {type(name).__name__}.")
    if "\0" in name:
        raise InvalidArgument(f"The {what} {shown(name)} contains a NUL, which Postgres cannot store.")
    if _SURROGATE.search(name):
        raise InvalidArgument(f"The {what} {shown(name)} holds half of a surrogate pair; it is not text.")
    if not 1 <= len(name.encode()) <= most:
        raise InvalidArgument(f"A {what} takes 1 to {most} bytes of UTF-8; {shown(name)} has {len(name.encode())}.")
    return name
