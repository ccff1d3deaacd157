"""Make the first installs of a schema, which has no table to lock yet, wait for each other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dblock._core.options import literal, quoted
from dblock._runtime.error_mapping import translated

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy import Connection

    from dblock._runtime.target import Target

FIRST_INSTALL_PATIENCE = 30.0
"""Seconds that a first install waits for another one."""

FIRST_INSTALL_INTERVAL = 0.1


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


@contextlib.contextmanager
def one_first_install(target: Target, schema: str, is_installed: Callable[[], bool]) -> Iterator[None]:
    """Let one of many first installs run at a time, and the others wait until the schema is installed.

    An install tries the behaviour of the server with two sessions, and keeps one while it waits for the other. Behind a
    pooler, a few of them would take all sessions and wait for each other. A process that waits here keeps no session of
    the pool. The wait is bounded: any role may take the lock.
    """
    deadline = time.monotonic() + FIRST_INSTALL_PATIENCE
    with translated(schema):
        connection = target.connect()
    connection.prepare_threshold = None
    with contextlib.closing(connection):
        while not _try_lock(connection, schema) and not is_installed() and time.monotonic() < deadline:
            time.sleep(FIRST_INSTALL_INTERVAL)
        yield
        with translated(schema):
            connection.execute("ROLLBACK")


def _try_lock(connection: psycopg.Connection[Any], schema: str) -> bool:
    """Keep the lock in a transaction, because a session behind a pooler has no lock of its own."""
    with translated(schema):
        connection.execute("BEGIN")
        row = connection.execute(
            "SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))", [f"dblock first install {schema}"]
        ).fetchone()
        if row == (True,):
            return True
        connection.execute("ROLLBACK")
        return False


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
