"""A database in memory, with the clients that use it.

Guarantee: a call is executed at one instant of the clock, as the SQL function of the same name would be. A waiter is
woken when its lock is freed, and at the moment at which the holder's lease expires: where a client of Postgres checks
from time to time, this database knows the moment.

A client counts as alive until it is closed. There is no presence, because no process can die here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dblock._core import effects
from dblock._core.effects import Call
from dblock._core.options import LockOptions, brief
from dblock.errors import DblockError, InvalidArgument
from dblock.testing.clock import Clock
from dblock.testing.database.columns import UnknownStatement, seconds
from dblock.testing.database.fence import Fence
from dblock.testing.database.null_observer import NullObserver
from dblock.testing.database.recipes import RecipeStore
from dblock.testing.database.statements import performer
from dblock.testing.database.tables import HEADS, Row

if TYPE_CHECKING:
    from dblock._core.waiters import LocalWaiters


class NotInMemory(DblockError):
    """The memory clients do not have this. Test it with a client of a real database."""

    def __init__(self, what: str) -> None:
        super().__init__(f"The memory clients have no {what}. Test this with a client of Postgres.")


class _Store(RecipeStore):
    """The tables. A client is alive while it is open, with or without heartbeats."""

    def touch_client(self, client: str) -> None:
        self.tables.clients[client] = math.inf


class MemoryDatabase:
    """One database in memory. Clients that share it compete for the same locks."""

    def __init__(self, clock: Clock | None = None) -> None:
        if clock is not None and not isinstance(clock, Clock):
            raise InvalidArgument(f"The clock of a memory client is a dblock.testing.Clock; got {brief(clock)}.")
        self.clock = Clock() if clock is None else clock
        self.step = 0.0
        """Seconds by which the clock of the database is ahead of that of its clients."""
        self.store = _Store(self.now, random.Random(0), NullObserver(), self._notify)
        self.fence = Fence()
        """The fences that grants with `claims` have raised."""
        self.intercept: Callable[[Call], None] | None = None
        """Called before each call; what it raises is raised to the caller. For tests that make calls fail."""
        self.attempts = 0
        """How many requests were numbered."""
        self._waiters: dict[str, LocalWaiters] = {}
        self._watched: set[str] = set()

    def now(self) -> float:
        """Return the time of the database, in seconds since 1970."""
        clock = self.clock
        return clock._start + clock._now + self.step

    def connect(self, client: str, waiters: LocalWaiters) -> None:
        """Send the notifications of a client to its waiters."""
        self._waiters[client] = waiters

    def disconnect(self, client: str) -> None:
        """Forget a client that was closed."""
        self._waiters.pop(client, None)

    def call(self, call: Call) -> effects.Row | None:
        """Execute a call."""
        self.clock.activity += 1
        if self.intercept is not None:
            self.intercept(call)
        self.store.durable = False
        try:
            return performer(call.sql)(self.store, self.fence, call.args)
        except UnknownStatement as unknown:
            raise NotInMemory(str(unknown)) from None

    # What a client does at once, without a call.

    def acquire_free(self, options: LockOptions, attempt: str, holder: str) -> Row | None:
        """Grant a plain lock that was released and has no waiters, and return its row. Return None for any other."""
        clock, store = self.clock, self.store
        row = store.tables.rows.get(options.name)
        if row is None or row.expires_at > -math.inf or row.waiting or row.kind is not None:
            return None
        if self.intercept is not None or clock.is_busy:
            return None
        clock.activity += 1
        store.durable = False
        store.grant(row, seconds(options.interval), attempt, options.durable, None, options.fair, None, self.now())
        row.holder, row.meta = holder, options.meta
        return row

    def release_unwanted(self, name: str, token: int) -> bool:
        """Release a lock that has no waiters. Return False if it has waiters or is not held under this token."""
        clock, store = self.clock, self.store
        row = store.tables.rows.get(name)
        if row is None or row.waiting or self.intercept is not None or clock.is_busy:
            return False
        clock.activity += 1
        store.durable = False
        return store.release(name, token)

    def watch(self, name: str) -> None:
        """Wake a waiter of this lock at the moment at which a lease of it expires."""
        if name not in self._watched:
            self._watched.add(name)
            self._watch_again(name)

    def wake(self, name: str) -> None:
        """Wake the waiters of a lock that can have it now."""
        self.store.durable = False
        self.store.wake_if_free(name)

    def wake_all(self) -> None:
        """Wake the waiters of all locks that can have theirs now."""
        for name in [name for name, line in self.store.tables.tickets.items() if line]:
            self.wake(name)

    def _watch_again(self, name: str) -> None:
        until = min(self._deadlines(name), default=math.inf)
        if until < math.inf:
            self.clock.call_later(max(until - self.now(), 1e-6), self._look, name)
        else:
            self._watched.discard(name)

    def _look(self, name: str) -> None:
        if not self.store.tables.tickets.get(name):
            self._watched.discard(name)
            return
        self.wake(name)
        self._watch_again(name)

    def _deadlines(self, name: str) -> Iterator[float]:
        """Yield when the grants of a lock expire that have not expired yet."""
        row, now = self.store.tables.rows.get(name), self.now()
        if row is not None:
            grants = self.store.shares(name) if row.kind in HEADS else [row]
            yield from (grant.expires_at for grant in grants if grant.expires_at > now)

    def _notify(self, client: str, payload: str) -> None:
        waiters = self._waiters.get(client)
        if waiters is not None:
            waiters.notified(payload)

    def __repr__(self) -> str:
        return f"<MemoryDatabase {self.clock.now().isoformat(timespec='milliseconds')}>"
