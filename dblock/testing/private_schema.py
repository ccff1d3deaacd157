"""The schema of one process of a test run, in a database that the user names.

Guarantee: the process drops its schema at its end. What a killed run could not drop, the next run drops. No run drops
the schema of a process that is alive.

A process holds an advisory lock for its schema from before the schema exists. The server releases that lock when the
session of the process ends, however the process ends. Behind a pooler a session may end while its process is alive. So
a schema that was made there has another name, and stays if the run is killed.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dblock._core.options import quoted
from dblock._runtime.target import resolve
from dblock.testing.private_database import PATIENCE, PrivateDatabase

if TYPE_CHECKING:
    import psycopg

PREFIX = "dblock_test_"
POOLED_PREFIX = "dblock_test_pooled_"

MARK = "SELECT pg_advisory_lock(hashtextextended(%s, 0))"
"""Shows all sessions of this database that the process of a schema is alive."""

IS_LEFT = "SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))"

MARKED = (
    "SELECT nspname FROM pg_namespace WHERE pg_get_userbyid(nspowner) = current_user"
    f" AND nspname ~ '^{PREFIX}[0-9a-f]{{12}}$' AND nspname <> %s"
)
"""The schemas of this role, except one, whose process holds the advisory lock if it is alive."""


@contextmanager
def private_schema(dsn: str) -> Iterator[PrivateDatabase]:
    """Install dblock into a new schema of an existing database, and drop the schema at the end."""
    import psycopg

    from dblock.admin.schema import install

    # Without the driver that SQLAlchemy's spelling names.
    dsn = re.sub(r"^(postgres(?:ql)?)\+\w+://", r"\1://", dsn)
    resolve(dsn)  # names what is wrong with a DSN
    with psycopg.connect(dsn, autocommit=True) as connection:
        schema = _mark(connection)
        try:
            install(dsn, schema)
            _drop_left_behind(connection, schema)
            yield PrivateDatabase(dsn, schema, None, exclusive=False, connection=connection)
        finally:
            # Over another connection, because the advisory lock has to outlast the schema.
            with psycopg.connect(dsn, autocommit=True) as last:
                last.execute(_drop(schema))


def _mark(connection: psycopg.Connection[Any]) -> str:
    """Return the name of a new schema, after taking its advisory lock."""
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    unique = uuid.uuid4().hex[:12]
    if row != (connection.info.backend_pid,):
        return POOLED_PREFIX + unique
    connection.execute(MARK, [PREFIX + unique])
    return PREFIX + unique


def _drop_left_behind(connection: psycopg.Connection[Any], own: str) -> None:
    """Drop the schemas of processes that are gone, except one that another session uses."""
    from psycopg.errors import LockNotAvailable

    for (schema,) in connection.execute(MARKED.encode(), [own]).fetchall():
        with contextlib.suppress(LockNotAvailable), connection.transaction():
            if connection.execute(IS_LEFT, [schema]).fetchone() == (True,):
                connection.execute(f"SET LOCAL lock_timeout = '{PATIENCE}'".encode())
                connection.execute(_drop(schema))


def _drop(schema: str) -> bytes:
    return f"DROP SCHEMA IF EXISTS {quoted(schema)} CASCADE".encode()
