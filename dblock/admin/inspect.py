"""What goes on in the database, for those who look after it: locks, lines, history; and taking a lock from its holder.

The database decides and remembers; this asks. Each call is one statement over a connection of its own, or over one that
the caller keeps. What is shown is as of that statement, and may be otherwise a moment later; only force_release() acts,
and it acts on one exact grant.
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


@dataclass(frozen=True)
class LockState:
    """A lock, as of one moment."""

    name: str
    number: int
    """Of the newest grant: its token, or for one without durability a negative number of no order."""
    holder: str | None
    meta: Any
    granted_at: datetime | None
    expires_at: datetime | None
    released_at: datetime | None
    forced_at: datetime | None
    """When its holder was told to let go."""
    remaining: float
    """Seconds left to its holder, by the database's clock; 0 for one that is free."""
    waiting: int

    @property
    def token(self) -> int | None:
        """The fencing token of the newest grant; None before the first, and for one without durability."""
        return self.number if self.number > 0 else None

    @property
    def state(self) -> str:
        """One of: held, forced (its holder was told to let go), free."""
        if not self.remaining:
            return "free"
        return "held" if self.forced_at is None else "forced"


@dataclass(frozen=True)
class Waiter:
    """A place in line."""

    name: str
    position: int
    holder: str
    since: datetime
    seconds: float


@dataclass(frozen=True)
class Event:
    """Something that befell a grant."""

    at: datetime
    name: str
    token: int | None
    event: str
    """One of: expired, died, forced, forced_now; and where grants are recorded: granted, released."""
    holder: str | None
    actor: str | None
    """Who did it, if somebody did."""
    reason: str | None
    number: int


class Overview:
    """Looks, and now and then acts, over one connection."""

    def __init__(self, connection: psycopg.Connection[Any], schema: str = DEFAULT_SCHEMA) -> None:
        self._connection = connection
        self._schema = schema

    def locks(
        self, pattern: str = "*", *, name: str | None = None, include_free: bool = False, limit: int = 1000
    ) -> list[LockState]:
        """Return locks in the order of their names: those held or waited for, or with `include_free` every one.

        The pattern takes * and ?.
        """
        rows = self._call("list_locks(%s, %s, %s, %s)", [like(pattern), name, include_free, limit])
        return [LockState(*row) for row in rows]

    def waiters(self, name: str | None = None, *, limit: int = 1000) -> list[Waiter]:
        """Return who waits, for one lock or for all, in order."""
        return [Waiter(*row) for row in self._call("list_waiters(%s, %s)", [name, limit])]

    def history(self, name: str | None = None, *, limit: int = 100) -> list[Event]:
        """Return what befell the grants of one lock or of all, the newest first."""
        return [Event(*row) for row in self._call("list_history(%s, %s)", [name, limit])]

    @contextmanager
    def one_moment(self) -> Iterator[None]:
        """Have whatever is asked inside be as of one and the same moment, though it takes several statements."""
        with translated(self._schema), self._connection.transaction():
            self._connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            yield

    def grants_are_recorded(self) -> bool:
        """Tell whether the history has every grant and release, and not only what went wrong."""
        return bool(self._call("grants_are_recorded()", [])[0][0])

    def record_grants(self, recorded: bool) -> None:
        """Have every grant and release noted in the history, or no more; for the schema's owner.

        That takes the table for a moment. Whoever wants to renew a lease waits behind us while we wait for it, so we
        wait only briefly, and try again.
        """
        self._patiently("200ms", 50, "record_grants(%s)", [recorded])

    def force_release(self, name: str, number: int, *, actor: str, reason: str, now: bool = False) -> bool:
        """Take a lock from the grant of this number, its token if it has one; False when that does not hold it.

        Its holder is told to let go, and nobody has the lock before it has, or before its deadline; with `now` the
        lock is free at once, and a holder that is still at work is a matter for the fence.
        """
        rows = self._patiently("5s", 1, "force_release(%s, %s, %s, %s, %s)", [name, number, actor, reason, now])
        taken = bool(rows[0][0])
        if taken and now:
            with contextlib.suppress(DblockError):  # it is done; and the first in line finds out by itself, too
                self._call("wake_queue(%s)", [name])
        return taken

    def _patiently(self, patience: str, times: int, call: str, arguments: list[Any]) -> list[tuple[Any, ...]]:
        """Do what may have to wait for another transaction, but not for long."""
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
                        "Another transaction is in the way and does not end; nothing was done. Try again, or end that "
                        "transaction: dblock doctor finds those that are old."
                    ) from error
                time.sleep(0.1)

    def _call(self, call: str, arguments: list[Any]) -> list[tuple[Any, ...]]:
        for argument in arguments:
            if isinstance(argument, str) and not is_text(argument):
                raise InvalidArgument(f"Postgres cannot take this as text: {argument!a}.")
        statement = f"SELECT * FROM {quoted(self._schema).replace('%', '%%')}.{call}"
        try:
            with translated(self._schema):
                return self._connection.execute(statement.encode(), arguments).fetchall()
        except AccessDenied as error:
            right = "force-release" if call.startswith(("force", "wake")) else "see"
            allow = "is the owner's to do" if call.startswith("record") else f"takes: dblock grant ROLE --may {right}"
            raise AccessDenied(f"This login may not do that in schema {self._schema!r}; it {allow}.") from error


@contextmanager
def overview(target: Target, schema: str = DEFAULT_SCHEMA) -> Iterator[Overview]:
    """Open a connection to look over, after a look at whether the schema is one that can be looked at."""
    check_name(schema)
    with translated(schema):
        connection = target.connect()
    with connection:
        with translated(schema):
            status_of(connection, schema).check()
        yield Overview(connection, schema)


def like(pattern: str) -> str:
    """Return a pattern with * and ? as LIKE takes it."""
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return escaped.replace("*", "%").replace("?", "_")
