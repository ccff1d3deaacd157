"""Names, checked before anything is sent, and written into statements so that nothing in them is read as SQL."""

from __future__ import annotations

import hashlib
import re

from fenced_store.errors import InvalidArgument, shown

DEFAULT_SCHEMA = "fenced_store"
RESOURCE_BYTES = 1024

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


def row(resource: str, *key: object) -> str:
    """Return the resource of one row of a protected table, to claim it: `row("public.orders", 42)`.

    The key is given as Postgres prints it. Several columns are given in the order in which the table was protected by
    them.
    """
    check_resource(resource)
    if not key:
        raise InvalidArgument("A row is named by its key; none was given.")
    parts = ["\\N" if value is None else str(value).replace("\\", "\\\\").replace(",", "\\,") for value in key]
    joined = _check("key", ",".join(parts), 1_000_000)
    if len(joined.encode()) > 512:
        joined = f"\\#{hashlib.sha256(joined.encode()).hexdigest()}"
    return check_resource(f"{resource}:{joined}")


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
