"""A clock of the database that stands still until a test moves it.

Every function of dblock reads this clock, in all sessions of the database, so that a test names the moments at which
something is due.
"""

from __future__ import annotations

from datetime import datetime, time, timedelta, timezone

import psycopg
from psycopg import sql


class StillClock:
    """The clock of one database."""

    def __init__(self, dsn: str, now: datetime) -> None:
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._connection.execute("CREATE TABLE public.still_clock (now timestamptz NOT NULL)")
        self._connection.execute("INSERT INTO public.still_clock VALUES (%s)", [now])
        self._connection.execute(
            "CREATE FUNCTION dblock.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE SECURITY DEFINER"
            " AS $$ SELECT now FROM public.still_clock $$"
        )
        found = self._connection.execute(
            "SELECT oid::regprocedure::text FROM pg_proc"
            " WHERE pronamespace = 'dblock'::regnamespace AND proconfig IS NOT NULL"
        ).fetchall()
        for (function,) in found:
            change = sql.SQL("ALTER FUNCTION {} SET search_path = dblock, pg_catalog, pg_temp")
            self._connection.execute(change.format(sql.SQL(function)))
        self.now = now

    def set(self, now: datetime) -> None:
        """Set the clock."""
        self.now = now
        self._connection.execute("UPDATE public.still_clock SET now = %s", [now])

    def at(self, text: str) -> None:
        """Set the clock to a time of the day of NOON, in UTC: `12:00` or `12:00:00.5`."""
        self.set(datetime.combine(NOON.date(), time.fromisoformat(text), timezone.utc))

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self.set(self.now + timedelta(seconds=seconds))

    def close(self) -> None:
        self._connection.close()


NOON = datetime(2026, 11, 16, 12, 0, tzinfo=timezone.utc)
