"""Make a database only pretend: replace functions of its catalog by others of the same name.

Other databases of the server keep their functions. Built-in functions are found by their number, so each original is
renamed, and the pretender takes its name.
"""

from __future__ import annotations

import psycopg

ADVISORY = {
    f"{name}({kind})": f"RETURNS {result} LANGUAGE sql VOLATILE AS 'SELECT {reply}'"
    for kind in ("bigint", "integer, integer")
    for name, result, reply in (
        ("pg_advisory_lock", "void", "NULL::void"),
        ("pg_advisory_lock_shared", "void", "NULL::void"),
        ("pg_advisory_xact_lock", "void", "NULL::void"),
        ("pg_advisory_xact_lock_shared", "void", "NULL::void"),
        ("pg_try_advisory_lock", "boolean", "true"),
        ("pg_try_advisory_lock_shared", "boolean", "true"),
        ("pg_try_advisory_xact_lock", "boolean", "true"),
        ("pg_try_advisory_xact_lock_shared", "boolean", "true"),
        ("pg_advisory_unlock", "boolean", "true"),
        ("pg_advisory_unlock_shared", "boolean", "true"),
    )
}
"""A server that replies `true` to every advisory call."""

NO_TIMELINE = {
    "pg_current_wal_lsn()": "RETURNS pg_lsn LANGUAGE plpgsql VOLATILE AS $$ BEGIN RAISE EXCEPTION"
    " 'WAL control functions cannot be executed here.' USING ERRCODE = '55000'; END $$"
}
"""A server without WAL of its own, such as one whose storage is replicated below it."""


def pretend(dsn: str, functions: dict[str, str | None]) -> None:
    """Replace each function of the catalog, or remove it where there is no replacement. Needs a superuser."""
    with psycopg.connect(dsn) as connection:
        connection.execute("SET allow_system_table_mods TO on")
        for signature, replacement in functions.items():
            name = signature.partition("(")[0]
            connection.execute(f"ALTER FUNCTION pg_catalog.{signature} RENAME TO real_{name}".encode())
            if replacement is not None:
                connection.execute(f"CREATE FUNCTION pg_catalog.{signature} {replacement}".encode())
