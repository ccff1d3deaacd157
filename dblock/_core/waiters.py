"""The waiters of one client: who waits for which lock, and when to look in for them.

A waiter sleeps until it is woken; it does not poll. Usually the release itself wakes it, by a notification. What
follows covers all that can keep a notification from coming: once a second the client lets itself be heard and asks how
its places stand, in one call for all of them; and for those who are first in line it looks in more often, because a
holder's lease may run out, or its process be gone, and nobody would say so.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable

from dblock._core import clock
from dblock._core.acquire import HOLDER_CHECK_INTERVAL, LockFlows
from dblock._core.effects import Flow

HEARTBEAT_INTERVAL = 1.0
"""Seconds between two signs of life. The database gives up the places of a client after three seconds without."""

POLL = 0.1
"""Seconds between two looks for the first in line where no notification can come."""

POLL_INTERVAL_OF_OTHERS = 0.3
"""The same for those who are not first, as far as they know."""

SHORTEST = 0.02


class LocalWaiter:
    """One place in line, in this process."""

    def __init__(self, line: LocalWaiters, name: str, attempt: str) -> None:
        self.name = name
        self.attempt = attempt
        self.has_ticket = False
        """Whether it has a ticket, as far as is known."""
        self.had_ticket = False
        """Whether it ever had one."""
        self._line = line

    def ticket_issued(self, first: bool, look_in: float) -> None:
        """Take note that it has a ticket, and of when to look in for it."""
        self.has_ticket = self.had_ticket = True
        self._line.plan(self.name, first, look_in)

    def wake(self) -> None:
        """Have its waiter ask again."""
        raise NotImplementedError

    def defer_cleanup(self) -> None:
        """Take note that its ticket could not be given up, and must be."""
        self._line.defer_cleanup(self.name, self.attempt)

    def leave(self) -> None:
        """Be no longer in line."""
        self.has_ticket = False
        self._line.forget(self)


class LocalWaiters:
    """All places of one client, and when to look in for them. Waits for nothing."""

    def __init__(
        self,
        service: LockFlows,
        hurry: Callable[[], object] = lambda: None,
        now: Callable[[], float] = clock.now,
        uniform: Callable[[float, float], float] = lambda low, high: random.uniform(low, high),
    ) -> None:
        self._flows = service
        self._hurry = hurry
        self._now = now
        self._uniform = uniform
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Forget everybody."""
        # Reentrant, because a waiter that goes out of use may be forgotten in the middle of anything.
        self._lock = threading.RLock()
        self._places: dict[str, LocalWaiter] = {}
        self._waiters: dict[str, int] = {}
        """How many wait for each lock."""
        self._looks: dict[str, float] = {}
        self._deferred: dict[str, str] = {}
        """Attempts that could not be given up, and of which locks."""
        self._surplus = False
        """Whether the database knew of more tickets than we do, the last time."""
        self._cleanup_at = -math.inf
        self._asleep_until = math.inf
        self.notifications_work = False
        """Whether notifications are known to come; without them one must look more often."""

    def add(self, place: LocalWaiter) -> None:
        """Take note of a waiter, from before its ticket can exist."""
        with self._lock:
            first = not self._places
            self._places[place.attempt] = place
            self._waiters[place.name] = self._waiters.get(place.name, 0) + 1
        if first and not self.notifications_work:
            self._hurry()  # to begin to listen

    def forget(self, place: LocalWaiter) -> None:
        """Take note that nobody waits there any more."""
        with self._lock:
            if self._places.pop(place.attempt, None) is None:
                return
            self._waiters[place.name] -= 1
            if not self._waiters[place.name]:
                del self._waiters[place.name]
                self._looks.pop(place.name, None)

    def plan(self, name: str, first: bool, look_in: float) -> None:
        """Plan the next look at a lock's line."""
        now = self._now()
        most = HEARTBEAT_INTERVAL if self.notifications_work else POLL if first else POLL_INTERVAL_OF_OTHERS
        at = now + (min(max(look_in, SHORTEST), most) if first else most * self._uniform(0.8, 1.0))
        with self._lock:
            if name in self._waiters and at < self._looks.get(name, math.inf):
                self._looks[name] = at
            if at < self._asleep_until:
                self._asleep_until = at
                self._hurry()

    @property
    def anybody(self) -> bool:
        """Whether anybody waits, or anything is left to give up."""
        return bool(self._places or self._deferred)

    def defer_cleanup(self, name: str, attempt: str) -> None:
        """Have whatever this attempt has been granted or given a place given up later, since it could not be now."""
        with self._lock:
            self._deferred[attempt] = name
        self._hurry()

    def due_at(self) -> float:
        """Return when the next look is due; never, if nobody waits."""
        with self._lock:
            self._asleep_until = min(self._looks.values(), default=math.inf)
            return self._asleep_until

    def notified(self, attempt: str) -> None:
        """Wake the one that a notification names."""
        place = self._places.get(attempt.replace("-", ""))
        if place is not None:
            place.wake()

    def wake_all(self) -> None:
        """Have everybody ask again, as after the database was away."""
        for place in self._all():
            place.wake()

    def cleanup_due_at(self) -> float:
        """Return when to try again to give up what is owed; never, if nothing is."""
        return self._cleanup_at if self._deferred else math.inf

    def run_cleanup(self) -> Flow[None]:
        """Give up what could not be given up before. Not over the listener's connection: it may take its time."""
        self._cleanup_at = self._now() + HEARTBEAT_INTERVAL
        for attempt, name in list(self._deferred.items()):
            yield from self._flows.abandon(name, attempt)
            self._deferred.pop(attempt, None)

    def look(self, within: float) -> Flow[None]:
        """Let ourselves be heard, ask how our places stand where it is time to, and wake those who should ask again."""
        now = self._now()
        with self._lock:
            # With those that would be due soon, so that they come to go together.
            names = [name for name, at in self._looks.items() if at <= now + HOLDER_CHECK_INTERVAL / 2]
            for name in names:
                self._looks[name] = now + (HEARTBEAT_INTERVAL if self.notifications_work else POLL_INTERVAL_OF_OTHERS)
        if not self.anybody:
            return
        if not self._places:
            return
        has_ticket = self._count_tickets()
        answer = yield from self._flows.heartbeat(self._flows.client, names, within)
        if answer.total < min(has_ticket, self._count_tickets()):
            self.wake_all()
        surplus = answer.total > len(self._places)
        if surplus and self._surplus:
            # Tickets that nobody waits at, as an interrupt may leave them. We would keep them alive with the others.
            yield from self._flows.leave_all_but(list(self._places))
        self._surplus = surplus
        ghosts = []
        for attempt, look_in, watched in answer.firsts:
            place = self._places.get(attempt)
            if place is None:
                ghosts.append(attempt)
            elif look_in == 0:
                place.wake()
            else:
                self.plan(place.name, True, min(look_in, HOLDER_CHECK_INTERVAL) if watched else look_in)
        for attempt in ghosts:
            # A ticket whose waiter is gone, first in line: nobody would ever redeem it.
            for name in names:
                yield from self._flows.leave_place(name, attempt)

    def _count_tickets(self) -> int:
        return sum(place.has_ticket for place in self._all())

    def _all(self) -> list[LocalWaiter]:
        with self._lock:
            return list(self._places.values())
