"""Make the first installs of a schema, which has no table to lock yet, wait for each other."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dblock._core.options import literal, quoted

if TYPE_CHECKING:
    from sqlalchemy import Connection

FIRST_INSTALL_PATIENCE = 30.0
"""Seconds that a first install waits for another one."""


def wait_for_other_first_installs(connection: Connection, schema: str) -> None:
    """Wait until no other first install of this schema runs, so that none of them fails and is retried.

    Any role may take this lock, so the wait is bounded. Without it an install is still atomic: those that come late
    collide with the first, and the server logs an error for each.
    """
    deadline = time.monotonic() + FIRST_INSTALL_PATIENCE
    ask = "SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))"
    while not connection.exec_driver_sql(ask, (f"dblock install {schema}",)).scalar():
        if time.monotonic() >= deadline:
            return
        time.sleep(0.02)


def lock_empty_schema(connection: Connection, schema: str) -> None:
    """Make other installs into a schema that a DBA has created wait, if this login owns the schema.

    Setting its comment again, which only an owner may do, locks the schema. CREATE SCHEMA would do so by itself.
    """
    found = connection.exec_driver_sql(
        "SELECT obj_description(oid, 'pg_namespace') FROM pg_namespace"
        " WHERE nspname = %s AND pg_has_role(nspowner, 'USAGE')",
        (schema,),
    ).fetchone()
    if found is not None:
        comment = "NULL" if found[0] is None else literal(found[0])
        run(connection, f"COMMENT ON SCHEMA {quoted(schema)} IS {comment}")


def run(connection: Connection, statement: str) -> None:
    """Run a statement whose names may contain what the driver takes for a placeholder."""
    connection.exec_driver_sql(statement.replace("%", "%%"))
