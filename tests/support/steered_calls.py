"""Call the functions of dblock in one session, with a clock that the test moves, and see whom the calls notify.

The deadlines are exact. The functions of one session read the clock, so it costs no query to other sessions.
"""

from __future__ import annotations

import uuid
from typing import Any

import psycopg
from psycopg import sql

from tests.support.databases import LET_WAITERS_DIE

_CLOCK = """
    CREATE FUNCTION dblock.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
    AS $$ SELECT to_timestamp(current_setting('simulated.now')::float8) $$
"""


class SteeredCalls:
    """A session of one database, in which the time is what the test says."""

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.connection.execute(_CLOCK)
        self.connection.execute(LET_WAITERS_DIE.encode())
        found = self.connection.execute(
            "SELECT oid::regprocedure::text FROM pg_proc"
            " WHERE pronamespace = 'dblock'::regnamespace AND proconfig IS NOT NULL"
        ).fetchall()
        change = sql.SQL("ALTER FUNCTION {} SET search_path = dblock, pg_catalog, pg_temp")
        self.connection.execute(sql.SQL("; ").join(change.format(sql.SQL(function)) for (function,) in found))
        self.connection.add_notify_handler(lambda one: self.notified.add(uuid.UUID(one.payload)))
        self.notified: set[uuid.UUID] = set()
        self._numbers = 0

    def start(self) -> None:
        """Forget all locks, waiters and clients, and number the UUIDs from 1 again."""
        self._numbers = 0
        self.connection.execute(
            "UNLISTEN *; DELETE FROM dblock.lock_tickets; DELETE FROM dblock.lock_queues;"
            " DELETE FROM dblock.lock_clients; DELETE FROM dblock.distributed_locks"
        )

    def close(self) -> None:
        self.connection.close()

    def call(self, call: str, *args: Any) -> tuple[Any, ...]:
        """Call a function, and return its row."""
        return self.query(f"SELECT * FROM dblock.{call}", *args)

    def query(self, query: str, *args: Any) -> tuple[Any, ...]:
        """Return the row of a query."""
        row: tuple[Any, ...] | None = self.connection.execute(query.encode(), args).fetchone()
        assert row is not None
        return row

    def set_clock(self, now: float) -> None:
        self.connection.execute("SELECT set_config('simulated.now', %s, false)", [str(now)])

    def new_uuid(self) -> uuid.UUID:
        self._numbers += 1
        return uuid.UUID(int=self._numbers)

    def listen(self, client: uuid.UUID) -> None:
        """See the notifications for this client."""
        self.connection.execute(f"LISTEN dblock_{client.hex}".encode())
