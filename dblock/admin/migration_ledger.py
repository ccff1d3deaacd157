"""The ledger of migrations, and the sessions that run them.

The database decides: whether a run may begin, which sessions are stale, and what is recorded of a run's end. Each call
here is one statement on the ledger's own connection. The connection is opened at first use, and again after it broke.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from dblock._core.options import quoted
from dblock._core.schema_version import DEFAULT_SCHEMA, check_name
from dblock._runtime.error_mapping import translated
from dblock.admin.link import Link
from dblock.errors import AccessDenied, DatabaseError, SessionsRemain, Unavailable

if TYPE_CHECKING:
    from dblock._runtime.target import Target

SWEEP_PATIENCE = 5.0
"""Seconds that a session has to end after it was terminated."""

SWEEP_INTERVAL = 0.05


@dataclass(frozen=True)
class MigrationState:
    """What the ledger knows about one version of a migration."""

    done: bool
    newer: str | None
    """A version that succeeded after this one: the database is ahead."""
    failures: int
    error: str | None
    """What the first of the failed runs reported."""
    asked_at: datetime


@dataclass(frozen=True)
class Begun:
    """The reply to a run that wants to begin."""

    decision: str
    """One of: run, done, failed, lost."""
    run: int | None
    mark: str | None
    """The application_name that the sessions of the run must carry."""
    error: str | None


@dataclass(frozen=True)
class MigrationSession:
    """A session of a migration."""

    pid: int
    token: int
    started_at: datetime | None
    mark: str
    role: str
    stale: bool
    """Whether the grant that the session was opened for does not hold the lock any more."""


class MigrationLedger:
    """The ledger of one schema. For one thread at a time; close it, or use it in a `with`."""

    def __init__(self, target: Target, schema: str = DEFAULT_SCHEMA) -> None:
        self._target = target
        self._schema = check_name(schema)
        self._link: Link | None = None

    def state(self, name: str, version: str | None) -> MigrationState:
        """Return what is known about a version, without a lock."""
        return MigrationState(*self._row("migration_state($1, $2)", (name, version)))

    def begin(
        self,
        name: str,
        token: int,
        version: str | None,
        *,
        migrator: str,
        attempts: int,
        since: datetime | None,
        revision: str | None = None,
        repeat: bool = False,
    ) -> Begun:
        """Record that the holder of the lock begins a run, or return why it must not."""
        arguments = (name, token, version, migrator, attempts, since, revision, repeat)
        return Begun(*self._row("begin_migration($1, $2, $3, $4, $5, $6, $7, $8)", arguments))

    def note_revision(self, run: int, token: int, revision: str) -> bool:
        """Record how far a run has come. False if the run has ended."""
        return bool(self._row("note_revision($1, $2, $3)", (run, token, revision))[0])

    def end(self, run: int, token: int, outcome: str, error: str | None = None, revision: str | None = None) -> str:
        """Record how a run ended, and return what was recorded: without the lock, success and failure are `lost`."""
        return str(self._row("end_migration($1, $2, $3, $4, $5)", (run, token, outcome, error, revision))[0])

    def retry(self, name: str, actor: str | None, reason: str | None) -> int:
        """Let versions that have failed run again; return how many failures were cleared."""
        return int(self._row("retry_migration($1, $2, $3)", (name, actor, reason))[0])

    def discard_restored_grant(self, name: str) -> bool:
        """Free the lock if its holder was migrating another database when a dump of that one was taken."""
        return bool(self._row("discard_restored_grant($1)", (name,))[0])

    def invalid_indexes(self) -> list[tuple[str, str]]:
        """Return the indexes that a failed CONCURRENTLY has left, each with its table."""
        return [(index, table) for index, table in self._rows("invalid_indexes()", ())]

    def installation(self) -> str:
        """Return the UUID of this installation."""
        return str(self._row("installation()", ())[0])

    def sessions(self, name: str) -> list[MigrationSession]:
        """Return the sessions of a migration, also those of other roles that the ledger's role may end."""
        return [MigrationSession(*row) for row in self._rows("migration_sessions($1, true)", (name,))]

    def terminate(self, sessions: Sequence[MigrationSession]) -> None:
        """Ask the server to end these sessions, each only if it still carries its mark, which names one grant."""
        for session in sessions:
            # A role that may not end a session is reported by `end_sessions`, which finds it still there.
            with contextlib.suppress(AccessDenied):
                self._query(
                    "SELECT pg_catalog.pg_terminate_backend(a.pid) FROM pg_catalog.pg_stat_activity AS a"
                    " WHERE a.pid = $1 AND a.application_name = $2 AND a.usename = $3",
                    (session.pid, session.mark, session.role),
                )

    def unreachable_roles(self, mark: str) -> list[str]:
        """Return the roles of sessions with this mark that the ledger's role may not end."""
        rows = self._query(
            "SELECT DISTINCT a.usename::text FROM pg_catalog.pg_stat_activity AS a"
            " WHERE a.application_name = $1 AND a.datname = pg_catalog.current_database()"
            " AND NOT pg_catalog.pg_has_role(a.usesysid, 'USAGE') ORDER BY 1",
            (mark,),
        )
        return [role for (role,) in rows]

    def end_sessions(
        self,
        name: str,
        *,
        token: int | None = None,
        patience: float = SWEEP_PATIENCE,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> int:
        """End the stale sessions of a migration, and with `token` those of that grant; return how many there were.

        Raise SessionsRemain if they have not ended in time. A statement that was sent over one of them takes no effect
        after this returns. `meanwhile` is called again and again during the wait.
        """
        deadline = time.monotonic() + patience
        seen: set[int] = set()
        while True:
            found = [session for session in self.sessions(name) if session.stale or session.token == token]
            if not found:
                return len(seen)
            if time.monotonic() >= deadline:
                raise SessionsRemain(name, [session.pid for session in found])
            self.terminate([session for session in found if session.pid not in seen])
            seen.update(session.pid for session in found)
            meanwhile()
            time.sleep(SWEEP_INTERVAL)

    def close(self) -> None:
        """Close the connection. A later call opens it again."""
        link, self._link = self._link, None
        if link is not None:
            link.connection.close()

    def __enter__(self) -> MigrationLedger:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _row(self, call: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._rows(call, arguments)[0]

    def _rows(self, call: str, arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        return self._query(f"SELECT * FROM {quoted(self._schema)}.{call}", arguments)

    def _query(self, statement: str, arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        try:
            with translated(self._schema):
                if self._link is None:
                    self._link = Link(self._target)
                return self._link.query(statement.encode(), arguments)
        except DatabaseError as error:
            if isinstance(error, Unavailable):
                self.close()
            raise
