"""Interleave two sessions: hold one session at the decisive step, let the other pass it, then let the first continue.

A session runs its statements in a thread of its own, so that a test can start a statement and continue while the
statement is blocked. There are two ways to hold a session:

- A row lock or an uncommitted transaction of another session blocks it.
- It stops at a gate: a trigger, in the middle of a function, at which the sessions named `held` stop until the gate
opens.

No test depends on the length of a sleep: `wait_until_blocked` returns when Postgres reports that the session waits.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import psycopg

from tests.support.eventually import eventually

PATIENCE = 60.0

END_GRACE = "UPDATE dblock.lock_presence SET gone_since = gone_since - grace"
"""Ends the grace of every presence whose session was found to have ended."""


class Session:
    """Runs one database session in a thread of its own."""

    def __init__(self, dsn: str, name: str, observer: psycopg.Connection) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True, application_name=name)
        self.connection.execute("SET search_path TO dblock, public")
        self._observer = observer
        self._thread = ThreadPoolExecutor(1)

    def start(self, statement: str, *args: Any) -> Future[Any]:
        """Start a statement without waiting for its end. The future's result is the statement's first row, or None."""
        return self._thread.submit(self._run, statement, *args)

    def do(self, statement: str, *args: Any) -> Any:
        """Run a statement to its end, and return its first row, or None."""
        return self.start(statement, *args).result(PATIENCE)

    def _run(self, statement: str, *args: Any) -> Any:
        cursor = self.connection.execute(statement.encode(), args or None)
        return cursor.fetchone() if cursor.description else None

    def wait_until_blocked(self) -> None:
        """Return as soon as this session waits for a lock that another session holds, or sleeps between attempts."""
        eventually(self.is_blocked, "the session waits for another session")

    def is_blocked(self) -> bool:
        """Return whether this session waits for a lock that another session holds, or sleeps between attempts."""
        waits = (
            "SELECT FROM pg_stat_activity WHERE pid = %s AND (wait_event = 'PgSleep' OR pg_blocking_pids(pid) <> '{}')"
        )
        return self._observer.execute(waits.encode(), [self.connection.info.backend_pid]).fetchone() is not None

    def end(self) -> None:
        """Close this session, and return when the server has ended it and released its advisory locks."""
        pid = self.connection.info.backend_pid
        self.close()
        gone = "SELECT WHERE NOT EXISTS (SELECT FROM pg_stat_get_activity(%s))"
        eventually(lambda: self._observer.execute(gone.encode(), [pid]).fetchone() is not None, "the end of a session")

    def close(self) -> None:
        self.connection.cancel_safe()
        self._thread.shutdown()
        self.connection.close()


def hold_first_grant(keeper: psycopg.Connection, name: str) -> None:
    """Stop every session that grants a new lock of this name, until the keeper's transaction ends."""
    keeper.execute(
        f"""
        CREATE FUNCTION public.hold() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pg_advisory_xact_lock_shared({Gate.KEY});
            RETURN NEW;
        END $$;
        CREATE TRIGGER hold BEFORE INSERT ON dblock.distributed_locks FOR EACH ROW
            WHEN (NEW.name = '{name}') EXECUTE FUNCTION public.hold();
        """.encode()
    )
    keeper.commit()
    keeper.execute("SELECT pg_advisory_xact_lock(%s)", [Gate.KEY])


class Gate:
    """Stops the sessions named `held` at a trigger until the gate is opened."""

    KEY = 4_711

    def __init__(self, keeper: psycopg.Connection, table: str, event: str) -> None:
        self._keeper = keeper
        keeper.execute("SELECT pg_advisory_lock(%s)", [self.KEY])
        keeper.execute(
            f"""
            CREATE FUNCTION public.gate() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS $$
            BEGIN
                IF current_setting('application_name') = 'held' THEN
                    PERFORM pg_advisory_xact_lock_shared({self.KEY});
                END IF;
                RETURN coalesce(NEW, OLD);
            END $$;
            CREATE TRIGGER gate BEFORE {event} ON {table} FOR EACH ROW EXECUTE FUNCTION public.gate();
            """.encode()
        )

    def open(self) -> None:
        self._keeper.execute("SELECT pg_advisory_unlock(%s)", [self.KEY])


class Sessions:
    """Opens sessions on one database, and closes all of them."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._opened: list[Session] = []
        self._observer = psycopg.connect(dsn, autocommit=True)
        self._keeper = psycopg.connect(dsn, autocommit=True)

    def open(self, name: str = "free") -> Session:
        """Open a session. A session named `held` stops at gates."""
        session = Session(self._dsn, name, self._observer)
        self._opened.append(session)
        return session

    def gate(self, event: str, table: str = "dblock.distributed_locks") -> Gate:
        """Put a closed gate before every event of this kind (INSERT, UPDATE or DELETE) on a row of the table."""
        return Gate(self._keeper, table, event)

    def wait_until_a_session_waits(self) -> None:
        """Return as soon as any session of this database waits for a lock."""
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        eventually(lambda: self._observer.execute(waiting.encode()).fetchone(), "a session waits for a lock")

    def __enter__(self) -> Sessions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keeper.close()
        for session in self._opened:
            session.close()
        self._observer.close()
