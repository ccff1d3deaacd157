"""The database in memory: the meaning of the SQL functions of barriers and latches.

Written after dblock/sql/barriers, function by function and under the same names. Left out is what operators call, what
the functions check of their arguments, and how long passes are kept: no run here has a hundred generations that matter.
The simulation has no barriers, so their tables are here and survive no crash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dblock.errors import CountsDiffer, InvalidArgument
from dblock.testing.database.queue import LEFT_AFTER
from dblock.testing.database.store import Store

ASK_AGAIN = 0.05
"""Seconds after which to ask again if the presence of a party has ended just now."""


@dataclass(slots=True)
class Barrier:
    """A barrier, and how many parties have arrived at it."""

    parties: int
    arrivals: int = 0
    generation: int = 0


@dataclass(slots=True)
class Latch:
    """A latch, with the attempts that have counted it down. They are forgotten when it opens."""

    count: int
    remaining: int
    counted: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Waiter:
    """An attempt that waits at a barrier or a latch."""

    attempt: str
    kind: str
    name: str
    number: int
    client: str
    presence: str | None
    since: float
    over: bool = False


class Pass(NamedTuple):
    """A party of a generation that has tripped."""

    name: str
    generation: int
    number: int


class Arrived(NamedTuple):
    """The reply of arrive_barrier."""

    tripped: bool
    number: int | None
    wake: bool
    fresh: bool
    next_check: float | None


def check_same_size(kind: str, name: str, size: int, asked: int) -> None:
    """Refuse a client that gives another number than the first one gave."""
    if size != asked:
        raise CountsDiffer(kind, name, size, asked)


class Barriers:
    """The barriers and latches in one database."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.barriers: dict[str, Barrier] = {}
        self.passes: dict[str, Pass] = {}
        self.latches: dict[str, Latch] = {}
        self.waiters: dict[str, Waiter] = {}
        """By their attempts, in the order in which they were registered."""

    def at(self, kind: str, name: str) -> list[Waiter]:
        """Return the attempts that wait at a barrier or a latch, in the order of arrival."""
        found = [one for one in self.waiters.values() if (one.kind, one.name) == (kind, name)]
        return sorted(found, key=lambda one: one.number)

    def is_over(self, waiter: Waiter) -> bool:
        """Return whether the wait of an attempt is over."""
        latch = self.latches.get(waiter.name) if waiter.kind == "latch" else None
        return waiter.over or (latch is not None and latch.remaining == 0)

    def register_waiter(
        self, kind: str, name: str, number: int, attempt: str, client: str, presence: str | None
    ) -> bool:
        own = self.waiters.get(attempt)
        if own is None:
            self.waiters[attempt] = Waiter(attempt, kind, name, number, client, presence, self._store.now())
        elif (own.kind, own.name) != (kind, name):
            raise InvalidArgument(
                f"Attempt {attempt} waits at another barrier or latch. Use a new UUID for each wait at {kind} {name!r}."
            )
        else:
            own.presence = presence or own.presence
        self._store.touch_client(client)
        return own is None

    def trip_barrier(self, name: str, parties: int) -> tuple[bool, float | None]:
        """Trip a barrier as often as enough live parties wait at it. Return whether, and the seconds to ask again."""
        waiting = [one for one in self.at("barrier", name) if not one.over]
        if len(waiting) < parties:
            return False, None
        store, dead, next_check = self._store, 0, None
        present: list[Waiter] = []
        graces: dict[str | None, float | None] = {None: None}
        for one in waiting:
            heard = store.tables.clients.get(one.client, float("-inf")) > store.now()
            if heard and one.presence is not None and one.presence not in graces:
                graces[one.presence] = store.remaining_grace(one.presence)
            grace = graces.get(one.presence)
            if not heard or (grace is not None and grace <= 0):
                del self.waiters[one.attempt]
                dead += 1
            elif grace is None:
                present.append(one)
            else:
                next_check = min(grace, next_check or grace)
        if len(waiting) - dead < parties:
            return False, None
        if len(present) < parties:
            return False, next_check or ASK_AGAIN
        barrier = self.barriers[name]
        while len(present) >= parties:
            barrier.generation += 1
            for number, one in enumerate(present[:parties]):
                self.passes[one.attempt] = Pass(name, barrier.generation, number)
                one.over = True
            present = present[parties:]
        return True, None

    def leave(self, attempts: Iterable[str]) -> bool:
        """Take attempts out of everything that they wait at. Return whether there was one."""
        return sum(self.waiters.pop(attempt, None) is not None for attempt in attempts) > 0

    def leave_queue(self, client: str, keep: frozenset[str]) -> None:
        """Take the attempts of a client out, except for those that it names and those that are new."""
        before = self._store.now() - LEFT_AFTER
        self.leave(
            one.attempt
            for one in list(self.waiters.values())
            if one.client == client and one.attempt not in keep and (not keep or one.since < before)
        )

    def heartbeat(self, client: str) -> Iterator[tuple[str, bool]]:
        """Yield the attempts of a client, each with whether its wait is over."""
        for one in self.waiters.values():
            if one.client == client:
                yield one.attempt, self.is_over(one)

    # What a client calls.

    def arrive_barrier(self, name: str, parties: int, attempt: str, client: str, presence: str | None) -> Arrived:
        barrier = self.barriers.setdefault(name, Barrier(parties))
        check_same_size("barrier", name, barrier.parties, parties)
        passed = self.passes.get(attempt)
        wake, fresh, next_check = False, False, None
        if passed is not None and passed.name != name:
            raise InvalidArgument(
                f"Attempt {attempt} has passed another barrier. Use a new UUID for each wait at barrier {name!r}."
            )
        if passed is None:
            fresh = self.register_waiter("barrier", name, barrier.arrivals + 1, attempt, client, presence)
            barrier.arrivals += fresh
            tripped, next_check = self.trip_barrier(name, parties)
            if tripped:
                self._store.durable = True
                wake = parties > 1
                passed = self.passes.get(attempt)
        if passed is None:
            return Arrived(False, None, wake, fresh, next_check)
        self.leave([attempt])
        return Arrived(True, passed.number, wake, fresh, next_check)

    def leave_barrier(self, name: str, attempt: str) -> int | None:
        passed, waiter = self.passes.get(attempt), self.waiters.get(attempt)
        if waiter is not None and (waiter.kind, waiter.name) == ("barrier", name):
            self.leave([attempt])
        return passed.number if passed is not None and passed.name == name else None

    def wake_waiters(self, kind: str, name: str) -> int:
        woken = [one for one in self.at(kind, name) if self.is_over(one)]
        for one in woken:
            self._store.notify(one.client, one.attempt)
        return len(woken)

    def count_down(self, name: str, count: int, by: int, attempt: str) -> tuple[int, bool]:
        """Return what remains, and whether this call has opened the latch."""
        latch = self.latches.setdefault(name, Latch(count, count))
        check_same_size("latch", name, latch.count, count)
        self._store.durable = True
        if latch.remaining == 0 or attempt in latch.counted:
            return latch.remaining, False
        latch.counted.add(attempt)
        latch.remaining = max(latch.remaining - by, 0)
        if latch.remaining == 0:
            latch.counted.clear()
        return latch.remaining, latch.remaining == 0

    def await_latch(self, name: str, count: int, attempt: str, client: str, presence: str | None) -> tuple[int, bool]:
        """Return what remains, and whether the attempt was not registered before."""
        latch = self.latches.setdefault(name, Latch(count, count))
        check_same_size("latch", name, latch.count, count)
        if latch.remaining > 0:
            return latch.remaining, self.register_waiter("latch", name, 0, attempt, client, presence)
        waiter = self.waiters.get(attempt)
        if waiter is not None and waiter.kind == "latch":
            self.leave([attempt])
        return 0, False

    def latch_remaining(self, name: str, count: int) -> int:
        latch = self.latches.get(name)
        if latch is None:
            return count
        check_same_size("latch", name, latch.count, count)
        return latch.remaining
