"""Inspect a database for its operator: locks, queues and history. Take a lock from its holder.

The database decides and records. This module only asks: each call is one statement, on the connection that the caller
gives. A result is true of that statement's moment and may be out of date right after. Only force_release() and
record_grants() change anything, and force_release() acts on one exact grant.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from dblock._core.options import is_text, quoted
from dblock._core.schema_version import DEFAULT_SCHEMA, check_name
from dblock._runtime.error_mapping import translated
from dblock.admin.schema import status_of
from dblock.errors import AccessDenied, DatabaseError, DblockError, InvalidArgument, Unavailable

if TYPE_CHECKING:
    import psycopg

    from dblock._runtime.target import Target

FORCE_PATIENCE = "5s"
"""How long a forced release waits for another transaction that uses the lock."""


@dataclass(frozen=True)
class LockState:
    """A lock at the moment of the query."""

    name: str
    number: int
    """The token of the newest grant. A grant that is not durable has a random negative number instead."""
    holder: str | None
    meta: Any
    granted_at: datetime | None
    expires_at: datetime | None
    released_at: datetime | None
    forced_at: datetime | None
    """When the holder was told to release."""
    remaining: float
    """Seconds that the holder has left, by the database's clock. 0 for a free lock."""
    waiting: int
    kind: str | None = None
    """None for a plain lock. `read-write` or `semaphore`, or for a share of one `reader`, `writer` or `permit`."""
    head: str | None = None
    """Of a share: the name of its lock."""
    permits: int | None = None
    """Of a semaphore: how many permits it has."""
    held: int | None = None
    """Of a read-write lock or a semaphore: how many of its shares are held. None for every other lock."""

    @property
    def token(self) -> int | None:
        """The fencing token of the newest grant. None before the first grant, and for a grant that is not durable."""
        return self.number if self.number > 0 else None

    @property
    def state(self) -> str:
        """One of: held, forced (the holder was told to release), free."""
        if not self.remaining and not self.held:
            return "free"
        return "held" if self.forced_at is None else "forced"


@dataclass(frozen=True)
class Waiter:
    """A waiter and its position in the queue of a lock, from 1."""

    name: str
    position: int
    holder: str
    since: datetime
    seconds: float
    mode: str | None = None
    """What the waiter of a read-write lock waits for: read or write."""


@dataclass(frozen=True)
class Wait:
    """A wait of a client for the holder of a lock, or of a session for another session."""

    waiter: str
    lock: str | None
    """None for a wait between sessions."""
    holder: str | None
    token: int | None
    seconds: float | None
    """How long a client has waited for the lock."""
    session: int | None
    """The process number of the session that waits."""
    blocker: int | None
    cycle: int | None
    """The number of the deadlock that it is part of."""


@dataclass(frozen=True)
class Event:
    """An event in the history of a lock."""

    at: datetime
    name: str
    token: int | None
    event: str
    """One of: expired, died, forced, forced_now. If grants are recorded, also: granted, released."""
    holder: str | None
    actor: str | None
    """The operator who forced the release."""
    reason: str | None
    number: int


@dataclass(frozen=True)
class Migration:
    """A migration at the moment of the query."""

    name: str
    phase: str
    """One of: migrating, starting, interrupted, failed, done."""
    holder: str | None
    token: int | None
    since: datetime | None
    """When the holder was granted the lock; else when the last run ended, or began."""
    version: str | None
    revision: str | None
    error: str | None
    waiting: int
    sessions: list[dict[str, Any]]
    """What the sessions of the run are doing."""
    runs: list[dict[str, Any]]
    """The newest runs, newest first."""


@dataclass(frozen=True)
class ScheduleState:
    """A schedule at the moment of the query."""

    name: str
    kind: str
    """One of: every, cron, delay."""
    definition: str
    zone: str | None
    catch_up: str
    overlap: str
    delivery: str
    next_slot: datetime | None
    """The first undecided slot, which may have passed."""
    overdue_since: datetime | None
    """When the schedule became overdue. None if it is not."""
    paused_at: datetime | None
    paused_by: str | None
    pause_reason: str | None
    requested_at: datetime | None
    """When an operator asked for a run that has not started yet."""
    running: int
    missed: int
    skipped: int
    last_run: dict[str, Any] | None
    """The newest run: slot, holder, outcome (None while it runs), exit_code, seconds, token."""
    runs: list[dict[str, Any]]
    """The newest rows of the ledger, newest first."""

    @property
    def state(self) -> str:
        """One of: paused, overdue, running, waiting."""
        if self.paused_at is not None:
            return "paused"
        if self.overdue_since is not None:
            return "overdue"
        return "running" if self.running else "waiting"


@dataclass(frozen=True)
class ScheduleEvent:
    """A change of a schedule, with the actor and the reason."""

    at: datetime
    name: str
    event: str
    """One of: registered, changed, paused, resumed, run now, deleted."""
    actor: str | None
    reason: str | None


@dataclass(frozen=True)
class BarrierState:
    """A barrier or a latch."""

    kind: str
    """One of barrier and latch."""
    name: str
    size: int
    """The number of parties, or the count."""
    remaining: int
    """How many parties are missing now, or what remains to be counted down."""
    generation: int | None
    """How often a barrier has tripped."""
    waiters: list[dict[str, Any]]
    """The live waiters, in the order of arrival: `holder`, and `since` in seconds since 1970."""
    used_at: datetime


class Overview:
    """Inspects one schema on one connection."""

    def __init__(self, connection: psycopg.Connection[Any], schema: str = DEFAULT_SCHEMA) -> None:
        self._connection = connection
        self._schema = schema

    def locks(
        self, pattern: str = "*", *, name: str | None = None, include_free: bool = False, limit: int = 1000
    ) -> list[LockState]:
        """Return locks in the order of their names: those held or waited for, or with `include_free` every one.

        The pattern takes * and ?. The shares of a read-write lock or a semaphore follow their lock.
        """
        rows = self._call("list_locks(%s, %s, %s, %s)", [like(pattern), name, include_free, limit])
        return sorted((LockState(*row) for row in rows), key=_place)

    def waiters(self, name: str | None = None, *, limit: int = 1000) -> list[Waiter]:
        """Return the live waiters of one lock or of all, in queue order."""
        return [Waiter(*row) for row in self._call("list_waiters(%s, %s)", [name, limit])]

    def waits(self, *, limit: int = 1000) -> list[Wait]:
        """Return every wait for a lock, and every wait of a session that works under a token."""
        return [Wait(*row) for row in self._call("wait_graph(%s)", [limit])]

    def history(self, name: str | None = None, *, limit: int = 100) -> list[Event]:
        """Return the events of one lock or of all, newest first."""
        return [Event(*row) for row in self._call("list_history(%s, %s)", [name, limit])]

    def migrations(self, name: str | None = None, *, runs: int = 5) -> list[Migration]:
        """Return what the ledger has of one migration or of all, in the order of their names."""
        return [Migration(*row) for row in self._call("list_migrations(%s, %s)", [name, runs])]

    def invalid_indexes(self) -> list[tuple[str, str]]:
        """Return the indexes that a failed CONCURRENTLY has left, each with its table."""
        return [(index, table) for index, table in self._call("invalid_indexes()", [])]

    def guards(self) -> list[tuple[str, list[str], bool]]:
        """Return the guarded schemas, the migrations that may change each, and whether the guard is active."""
        return [(schema, names, active) for schema, names, active in self._call("list_guards()", [])]

    def migration_is_done(self, name: str, version: str) -> bool:
        """Return whether a run of a migration to this version has succeeded."""
        return bool(self._call("migration_state(%s, %s)", [name, version])[0][0])

    def schedules(self, name: str | None = None, *, runs: int = 5) -> list[ScheduleState]:
        """Return one schedule or all, in the order of their names."""
        return [ScheduleState(*row) for row in self._call("list_schedules(%s, %s)", [name, runs])]

    def schedule_events(self, name: str | None = None, *, limit: int = 100) -> list[ScheduleEvent]:
        """Return the changes of one schedule or of all, newest first."""
        return [ScheduleEvent(*row) for row in self._call("list_schedule_events(%s, %s)", [name, limit])]

    def change_schedule(self, action: str, name: str, *, actor: str, reason: str | None) -> bool:
        """Pause, resume, run or delete a schedule. False if there is nothing to change."""
        return bool(self._call(f"{action}_schedule(%s, %s, %s)", [name, actor, reason])[0][0])

    def barriers(self) -> list[BarrierState]:
        """Return all barriers and latches, in the order of their names."""
        return [BarrierState(*row) for row in self._call("list_barriers()", [])]

    def delete_barrier(self, kind: str, name: str) -> bool:
        """Delete a barrier or a latch. False if there is none."""
        return bool(self._call(f"delete_{kind}(%s)", [name])[0][0])

    @contextmanager
    def one_moment(self) -> Iterator[None]:
        """Answer all queries in the body from one snapshot of the database."""
        with translated(self._schema), self._connection.transaction():
            self._connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            yield

    def grants_are_recorded(self) -> bool:
        """Return whether the history has every grant and release, and not only unusual ends of grants."""
        return bool(self._call("grants_are_recorded()", [])[0][0])

    def record_grants(self, recorded: bool) -> None:
        """Start or stop recording every grant and release in the history. Only the schema's owner may call this.

        The change locks the table for a moment. Renewals queue behind this call while it waits for that lock, so it
        waits only briefly and retries.
        """
        self._patiently("200ms", 50, "record_grants(%s)", [recorded])

    def force_release(self, name: str, number: int, *, actor: str, reason: str, now: bool = False) -> bool:
        """Take a lock from the grant with this number (its token, if it has one). False if that grant does not hold it.

        The holder is told to release. No other client is granted the lock before the holder has released it or its
        deadline has passed. With `now` the lock is free at once, and only a fence stops a holder that still works.
        """
        rows = self._patiently(
            FORCE_PATIENCE, 1, "force_release(%s, %s, %s, %s, %s)", [name, number, actor, reason, now]
        )
        taken = bool(rows[0][0])
        if taken and now:
            with contextlib.suppress(DblockError):  # the release is done, and the first waiter also finds out by itself
                self._call("wake_queue(%s)", [name])
        return taken

    def delete_lock(self, name: str) -> bool:
        """Delete a lock that is not in use, so that its name can have another kind. False if it is in use or missing.

        With a read-write lock or a semaphore go its shares.
        """
        return bool(self._call("delete_lock(%s)", [name])[0][0])

    def _patiently(self, patience: str, times: int, call: str, arguments: list[Any]) -> list[tuple[Any, ...]]:
        """Make a call that may wait for another transaction, with a lock timeout and a number of tries."""
        from psycopg.errors import LockNotAvailable

        with translated(self._schema):
            self._connection.execute(f"SET lock_timeout = '{patience}'".encode())
        while True:
            times -= 1
            try:
                return self._call(call, arguments)
            except Unavailable as error:
                if not isinstance(error.__cause__, LockNotAvailable):
                    raise
                if not times:
                    raise DatabaseError(
                        "Another transaction is in the way and does not end. Nothing was done. Try again, or end that "
                        "transaction: dblock doctor finds transactions that have been open for long."
                    ) from error
                time.sleep(0.1)

    def _call(self, call: str, arguments: list[Any]) -> list[tuple[Any, ...]]:
        for argument in arguments:
            if isinstance(argument, str) and not is_text(argument):
                raise InvalidArgument(f"Postgres cannot store this text: {argument!a}.")
        statement = f"SELECT * FROM {quoted(self._schema).replace('%', '%%')}.{call}"
        try:
            with translated(self._schema):
                return self._connection.execute(statement.encode(), arguments).fetchall()
        except AccessDenied as error:
            privilege = "force-release" if call.startswith(("force", "wake", "delete_lock")) else "see"
            if "_schedule(" in call:
                privilege = "lock"
            allow = (
                "is only for the owner" if call.startswith("record") else f"needs: dblock grant ROLE --may {privilege}"
            )
            raise AccessDenied(f"This role may not run this in schema {self._schema!r}: it {allow}.") from error


@contextmanager
def overview(target: Target, schema: str = DEFAULT_SCHEMA) -> Iterator[Overview]:
    """Open a connection, check the schema's revision, and yield an Overview of it."""
    check_name(schema)
    with translated(schema):
        connection = target.connect()
    with connection:
        with translated(schema):
            status_of(connection, schema).check()
        yield Overview(connection, schema)


def _place(lock: LockState) -> tuple[str, str, int]:
    """Return what to sort a lock by: shares come right after their lock, in the order of their numbers."""
    if lock.head is None:
        return lock.name, "", 0
    number = lock.name.rpartition("-" if lock.kind == "reader" else "#")[2]
    return lock.head, lock.kind or "", int(number) if number.isdecimal() else 0


def like(pattern: str) -> str:
    """Convert a pattern with * and ? to a LIKE pattern."""
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return escaped.replace("*", "%").replace("?", "_")
