"""Two sessions, and a few tables for them to share.

Guarantee: nothing stays behind. The tables are in a schema of their own, which is dropped at the end. What a probe
could not drop, because it was killed, the next one drops.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import errors as pg

from dblock._core.options import quoted
from dblock.admin.link import Link
from dblock.errors import DblockError

if TYPE_CHECKING:
    from dblock._runtime.target import Target

PREFIX = "dblock_probe_"
"""Begins the names of everything that a probe creates."""

LEFT_BEHIND = 3600
"""Seconds after which a schema of another probe was left behind by a process that is gone."""

SECOND_WITHIN = 3.0
"""Seconds after which a pooler has no second session."""

BEGIN = (
    "BEGIN ISOLATION LEVEL READ COMMITTED {access}; SET LOCAL search_path TO pg_catalog; "
    "SET LOCAL statement_timeout TO 5000; SET LOCAL lock_timeout TO 2000"
)


class Unknown(Exception):
    """A behaviour cannot be tried over this connection."""


class NoSecondSession(Exception):
    """There is no second session: the role or the pooler allows only one."""


class Session:
    """One session. Every statement runs in a transaction, because a pooler keeps the session only for that long."""

    def __init__(self, target: Target, access: str) -> None:
        self.link = Link(target)
        self._begin = BEGIN.format(access=access)
        self._inside = False

    def value(self, sql: str, *arguments: Any) -> Any:
        """Run a statement in the open transaction, and return the first value of its first row, or None."""
        if not self._inside:
            self._inside = True
            self.link.query(self._begin.encode())
        rows = self.link.query(sql.encode(), arguments)
        return rows[0][0] if rows else None

    def refusal(self, sql: str) -> str | None:
        """Run a statement that should fail, and return its SQLSTATE. None if it succeeds. Ends the transaction."""
        try:
            self.value(sql)
        except psycopg.Error as error:
            if self.link.connection.closed:
                raise
            return error.sqlstate
        finally:
            self.rollback()
        return None

    def outside(self, sql: str) -> Any:
        """Run a statement outside any transaction."""
        return self.link.query(sql.encode())

    def commit(self) -> None:
        """Commit the open transaction, if there is one."""
        self._end("COMMIT")

    def rollback(self) -> None:
        """Roll the open transaction back, if there is one."""
        self._end("ROLLBACK")

    def _end(self, how: str) -> None:
        if self._inside:
            self._inside = False
            self.link.query(how.encode())

    def close(self) -> None:
        """Close the session."""
        self.link.connection.close()


class _Opening:
    """The attempt to open a session, which may take longer than the wait for it."""

    def __init__(self, opens: Callable[[], Session]) -> None:
        self._opens = opens
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._given_up = False
        self._outcome: Session | Exception = TimeoutError("it did not reply")

    def run(self) -> None:
        """Open the session. If nothing waits for it any more, close it again."""
        outcome: Session | Exception
        try:
            outcome = self._opens()
            outcome.value("SELECT 1")
        except Exception as error:
            outcome = error
        with self._lock:
            if self._given_up and isinstance(outcome, Session):
                outcome.close()
            self._outcome = outcome
        self._done.set()

    def wait(self, seconds: float) -> Session | Exception:
        """Return the session, or why there is none."""
        self._done.wait(seconds)
        with self._lock:
            self._given_up = not self._done.is_set()
            return self._outcome


class SessionPair:
    """Two sessions, `one` and `other`; use it in a `with`."""

    def __init__(self, target: Target, schema: str, read_only: bool = False) -> None:
        self._target = target
        self._access = "READ ONLY" if read_only else "READ WRITE"
        self._install_schema = schema
        self.key = uuid.uuid4().int & (2**62 - 1)
        """An advisory key that no other session uses."""
        self.schema: str | None = None
        """The schema that holds the tables of the probe."""
        self._own_schema = False
        self._stem = PREFIX
        self.one = self.open()
        try:
            pid = self.one.value("SELECT pg_backend_pid()")
            self.pooled = bool(pid != self.one.link.connection.info.backend_pid)
            """Whether statements run in other sessions than the connection was opened to."""
            self._open_other()
            self.end_transactions()
            if not read_only:
                self._create()
        except BaseException:
            self.close()
            raise

    def open(self) -> Session:
        """Open another session."""
        return Session(self._target, self._access)

    def _open_other(self) -> None:
        """Open the second session, while the first is in a transaction.

        A pooler that has no second session accepts the connection and does not reply, so this happens in a thread.
        """
        opening = _Opening(self.open)
        threading.Thread(target=opening.run, daemon=True).start()
        outcome = opening.wait(SECOND_WITHIN)
        if isinstance(outcome, Exception):
            said = " ".join(str(outcome).split()).rstrip(".")
            raise NoSecondSession(f"there is no second session beside the first: {said}")
        self.other = outcome

    def table(self, name: str) -> str:
        """Return the qualified name of an object of the probe, for SQL."""
        return f"{quoted(self.schema or '')}.{self._stem}{name}"

    def ends(self) -> tuple[list[str | None], list[str]]:
        """Return the two ends of the first session's connection as the server sees them, and as this process does."""
        ((*seen,),) = self.one.outside(
            "SELECT host(inet_client_addr()), inet_client_port()::text, host(inet_server_addr()),"
            " inet_server_port()::text"
        )
        with socket.socket(fileno=os.dup(self.one.link.connection.fileno())) as ours:
            if ours.family not in (socket.AF_INET, socket.AF_INET6):
                return seen, []
            return seen, [str(part) for name in (ours.getsockname(), ours.getpeername()) for part in name[:2]]

    def end_transactions(self) -> None:
        """End the transactions of both sessions."""
        self.one.rollback()
        self.other.rollback()

    def _create(self) -> None:
        one = self.one
        may_create = one.value("SELECT has_database_privilege(current_database(), 'CREATE')")
        if may_create or not one.value("SELECT to_regnamespace($1) IS NOT NULL", quoted(self._install_schema)):
            self._remove_left_behind()
            self.schema, self._own_schema = _new_name(), True
            one.value(f"CREATE SCHEMA {self.schema}")
        else:
            # Other processes may install and probe there at the same time. An install ignores these names.
            self.schema, self._stem = self._install_schema, _new_name() + "_"
            for relation, kind in self._relations(one, PREFIX):
                if _is_left_behind(relation):
                    one.value(f"DROP {kind} {quoted(self.schema)}.{quoted(relation)}")
        one.value("SET LOCAL synchronous_commit TO off")
        one.value(f"CREATE TABLE {self.table('rows')} (id integer PRIMARY KEY, number integer NOT NULL)")
        one.value(f"INSERT INTO {self.table('rows')} VALUES (1, 0)")
        one.value(f"CREATE SEQUENCE {self.table('sequence')} CACHE 1 NO CYCLE")
        one.commit()

    def _remove_left_behind(self) -> None:
        """Drop what probes of this role left behind that were killed."""
        names = self.one.value(
            "SELECT array_agg(nspname::text) FROM pg_namespace"
            " WHERE starts_with(nspname::text, $1) AND pg_get_userbyid(nspowner) = current_user",
            PREFIX,
        )
        for name in names or []:
            if _is_left_behind(name):
                self.one.value(f"DROP SCHEMA {quoted(name)} CASCADE")

    def _relations(self, session: Session, prefix: str) -> list[tuple[str, str]]:
        """Return the tables, sequences and functions in the probe's schema whose names begin so, with their kinds."""
        found = session.value(
            "SELECT array_agg(ARRAY[name, kind]) FROM ("
            " SELECT relname::text, CASE relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END FROM pg_class"
            " WHERE relnamespace = $1::regnamespace AND relkind IN ('r', 'S')"
            " UNION ALL SELECT proname::text, 'FUNCTION' FROM pg_proc WHERE pronamespace = $1::regnamespace"
            ") AS there (name, kind) WHERE starts_with(name, $2)",
            quoted(self.schema or ""),
            prefix,
        )
        return [(name, kind) for name, kind in found or []]

    def _drop(self) -> None:
        """Drop what the probe created, over another connection if the first one is gone."""
        if self.schema is None:
            return
        session = self.one
        if session.link.connection.closed or session.link.connection.broken:
            session = self.open()
        try:
            with contextlib.suppress(psycopg.Error):
                session.rollback()
            session.value("SET LOCAL synchronous_commit TO off")
            if self._own_schema:
                with contextlib.suppress(pg.InvalidSchemaName):
                    session.value(f"DROP SCHEMA {self.schema} CASCADE")
            else:
                for relation, kind in self._relations(session, self._stem):
                    session.value(f"DROP {kind} {quoted(self.schema)}.{quoted(relation)}")
            session.commit()
        finally:
            if session is not self.one:
                session.close()

    def close(self) -> None:
        """Drop what was created, and close the sessions."""
        sessions = [getattr(self, name, None) for name in ("other", "one")]
        try:
            other = sessions[0]
            if other is not None:
                other.close()  # it may hold a lock on a table
            with contextlib.suppress(psycopg.OperationalError, DblockError):
                self._drop()
        finally:
            for session in sessions:
                if session is not None:
                    session.close()

    def __enter__(self) -> SessionPair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _new_name() -> str:
    """Return a name for what a probe creates. It says when, so that a later probe can remove what was left behind."""
    return f"{PREFIX}{int(time.time()):x}_{uuid.uuid4().hex[:8]}"


def _is_left_behind(name: str) -> bool:
    """Return whether the probe that created this was killed a while ago."""
    try:
        return int(name.removeprefix(PREFIX).partition("_")[0], 16) < time.time() - LEFT_BEHIND
    except ValueError:
        return False
