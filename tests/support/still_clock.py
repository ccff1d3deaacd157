"""A clock of the database that stands still until a test moves it.

Every function of dblock reads this clock, in all sessions of the database, so that a test names the moments at which
something is due. A transaction with an older snapshot reads the same time as all others.
"""

from __future__ import annotations

from datetime import datetime, time, timedelta, timezone

import psycopg
from psycopg import sql


class StillClock:
    """The clock of one database."""

    def __init__(self, dsn: str, now: datetime) -> None:
        self._connection = psycopg.connect(dsn, autocommit=True)
        # A sequence belongs to no transaction.
        self._connection.execute("CREATE SEQUENCE public.still_clock")
        self._connection.execute(
            "CREATE FUNCTION dblock.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE SECURITY DEFINER"
            " AS $$ SELECT timestamptz 'epoch' + last_value * interval '1 microsecond' FROM public.still_clock $$"
        )
        self.set(now)
        self.govern()

    def govern(self) -> None:
        """Let every function of dblock read this clock, also those that were replaced since."""
        found = self._connection.execute(
            "SELECT oid::regprocedure::text FROM pg_proc"
            " WHERE pronamespace = 'dblock'::regnamespace AND proconfig IS NOT NULL"
        ).fetchall()
        for (function,) in found:
            change = sql.SQL("ALTER FUNCTION {} SET search_path = dblock, pg_catalog, pg_temp")
            self._connection.execute(change.format(sql.SQL(function)))

    def set(self, now: datetime) -> None:
        """Set the clock."""
        self.now = now
        microseconds = (now - EPOCH) // timedelta(microseconds=1)
        self._connection.execute("SELECT setval('public.still_clock', %s)", [microseconds])

    def at(self, text: str) -> None:
        """Set the clock to a time of the day of NOON, in UTC: `12:00` or `12:00:00.5`."""
        self.set(datetime.combine(NOON.date(), time.fromisoformat(text), timezone.utc))

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self.set(self.now + timedelta(seconds=seconds))

    def close(self) -> None:
        self._connection.close()


EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
NOON = datetime(2026, 11, 16, 12, 0, tzinfo=timezone.utc)
