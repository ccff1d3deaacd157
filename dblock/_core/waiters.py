"""The waiters of one client: which attempts wait for which lock, and when to check their positions.

A waiter sleeps until it is woken; it does not poll. Usually the release wakes it, by a notification. The rest of this
module covers lost notifications. Once a second the client sends a heartbeat and asks for the positions of all its
tickets, in one call. It checks more often for waiters that are first in their queue, because the holder's lease may
expire, or the holder's process may die, without any notification. It also checks soon after a ticket was issued: the
holder or a waiter ahead may be dead already, and a release that came at the same moment may have seen no ticket.

While another transaction keeps a lock or its queue locked, only one waiter of this client asks for that lock. The
others wait here for their turn, in the order of their arrival. So a stuck lock does not occupy the connections that
other locks need.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

from dblock._core import clock
from dblock._core.effects import Flow
from dblock._core.grants import GrantFlows
from dblock._core.replies import TicketStatus
from dblock.errors import ClientClosed, DatabaseError

logger = logging.getLogger("dblock")

SHORTEST = 0.02
"""Seconds to the next check of a queue, at least."""

DEADLOCK = "deadlock"
"""The first word of a notification to the victim of a deadlock. Before the attempt there is otherwise nothing."""


class LocalWaiter:
    """One attempt of this process that waits for a lock. Subclasses block a thread or a task."""

    def __init__(self, waiters: LocalWaiters, name: str, attempt: str) -> None:
        self.name = name
        self.attempt = attempt
        self.has_ticket = False
        """Whether it has a ticket, as far as this process knows."""
        self.had_ticket = False
        """Whether it ever had a ticket."""
        self.must_look = False
        """Whether another waiter has found a deadlock of which this one is the victim."""
        self.others: tuple[str, ...] = ()
        """The names of further locks that it waits for at the same time."""
        self.more_tickets = 0
        """How many tickets it has for these."""
        self._waiters = waiters

    @property
    def company(self) -> int:
        """How many attempts of this client wait, with this one."""
        return self._waiters.count

    def take_turn(self) -> bool:
        """Return whether it may ask for the lock now. If not, it is woken when it may."""
        return self._waiters.take_turn(self)

    def found_busy(self) -> None:
        """Mark that another transaction keeps the lock locked: from here on, one waiter asks at a time."""
        self._waiters.found_busy(self)

    def ticket_issued(self, first: bool, next_check: float, fresh: bool = False) -> None:
        """Mark that it has a ticket, schedule the next check of its queue, and let the next waiter ask."""
        self._waiters.check_not_left()
        self.has_ticket = self.had_ticket = True
        self._waiters.pass_turn(self)
        self._waiters.plan(self.name, first, next_check, fresh)

    def tickets_issued(self, tickets: dict[str, TicketStatus]) -> None:
        """Mark that it has these tickets, and schedule the next checks of their queues."""
        self._waiters.check_not_left()
        self.has_ticket = bool(tickets)
        self.had_ticket = self.had_ticket or self.has_ticket
        self.more_tickets = max(len(tickets) - 1, 0)
        for name, ticket in tickets.items():
            self._waiters.plan(name, ticket.first, ticket.next_check, ticket.fresh)

    def move(self, name: str, others: tuple[str, ...] = ()) -> None:
        """Wait for another lock from now on, or for several."""
        if (name, others) != (self.name, self.others):
            self._waiters.move(self, name, others)

    def ticket_redeemed(self) -> None:
        """Mark that its ticket is about to be redeemed or given up, and forget earlier wake-ups."""
        raise NotImplementedError

    def wait(self, seconds: float) -> Any:
        """Block until woken, or for that many seconds. Returns an awaitable for a task."""
        raise NotImplementedError

    def wake(self) -> None:
        """Make it ask for the lock again."""
        raise NotImplementedError

    def defer_cleanup(self) -> None:
        """Make the client give up its ticket later, because that was not possible now."""
        self._waiters.defer_cleanup(self.name, self.attempt)

    def defer_cleanup_of(self, names: Sequence[str]) -> None:
        """Make the client give up later what the attempt has of these locks, grants and tickets."""
        self._waiters.defer_cleanup(names[0], self.attempt, tuple(names[1:]))

    def leave(self) -> None:
        """Stop waiting."""
        self.has_ticket = False
        self._waiters.remove(self)


class LocalWaiters:
    """All waiters of one client, and when to check their positions. It never blocks."""

    def __init__(
        self,
        flows: GrantFlows,
        wake_listener: Callable[[], object] = lambda: None,
        now: Callable[[], float] = clock.now,
        uniform: Callable[[float, float], float] = lambda low, high: random.uniform(low, high),
    ) -> None:
        self._flows = flows
        self._timings = flows.timings
        self._wake_listener = wake_listener
        self._now = now
        self._uniform = uniform
        self.can_take_turns: Callable[[], bool] = lambda: True
        """Whether the waiters could take their turn now. A blocked event loop could not."""
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Forget every waiter."""
        # Reentrant, because a waiter that is garbage-collected may leave in the middle of anything.
        self._lock = threading.RLock()
        self._waiters: dict[str, LocalWaiter] = {}
        """By their attempts."""
        self._waiting: dict[str, int] = {}
        """How many wait for each lock."""
        self._checks: dict[str, float] = {}
        """When to check each lock's queue."""
        self._intervals: dict[str, float] = {}
        """Seconds between two checks of queues in which this client has a new ticket."""
        self._turns: dict[str, list[LocalWaiter]] = {}
        """For each lock that was found locked, the waiters without a reply. Only the first of them asks."""
        self._deferred: dict[str, tuple[str, ...]] = {}
        """Attempts that could not be given up, and the names of their locks."""
        self._surplus = False
        """Whether the database knew of more tickets than this process, at the last heartbeat."""
        self._cleanup_at = -math.inf
        self._asleep_until = math.inf
        self.left = False
        """Whether the client was closed and gives up all its tickets."""
        self.notifications_work = False
        """Whether notifications are known to come through. Without them, checks are more frequent."""

    def add(self, waiter: LocalWaiter) -> None:
        """Register a waiter, before its ticket can exist."""
        with self._lock:
            first = not self._waiters
            self._waiters[waiter.attempt] = waiter
            self._waiting[waiter.name] = self._waiting.get(waiter.name, 0) + 1
        if first and not self.notifications_work:
            self._wake_listener()  # it is not listening yet

    def check_not_left(self) -> None:
        """Raise ClientClosed for a ticket that came after the client gave up its tickets: its waiter gives it up."""
        if self.left:
            raise ClientClosed(may_be_done=True)

    def take_turn(self, waiter: LocalWaiter) -> bool:
        """Return whether a waiter may ask for its lock: always, unless an earlier one has found it locked."""
        with self._lock:
            turns = self._turns.get(waiter.name)
            if not turns:
                return True
            if waiter not in turns:
                turns.append(waiter)
            return turns[0] is waiter

    def found_busy(self, waiter: LocalWaiter) -> None:
        """Let one waiter of this lock ask at a time, from here on."""
        with self._lock:
            turns = self._turns.setdefault(waiter.name, [])
            if waiter not in turns:
                turns.append(waiter)

    def pass_turn(self, waiter: LocalWaiter) -> None:
        """Let the next waiter ask, if it was this one's turn."""
        if not self._turns:
            return
        with self._lock:
            turns = self._turns.get(waiter.name, [])
            if waiter not in turns:
                return
            turns.remove(waiter)
            if not turns:
                del self._turns[waiter.name]
                return
            next_waiter = turns[0]
        next_waiter.wake()

    def remove(self, waiter: LocalWaiter) -> None:
        """Forget a waiter that has stopped waiting."""
        self.pass_turn(waiter)
        with self._lock:
            if self._waiters.pop(waiter.attempt, None) is None:
                return
            self._forget_names(waiter)

    def move(self, waiter: LocalWaiter, name: str, others: tuple[str, ...]) -> None:
        """Let a waiter wait for other locks. Its attempt stays the same."""
        self.pass_turn(waiter)
        with self._lock:
            if waiter.attempt in self._waiters:
                for one in (name, *others):
                    self._waiting[one] = self._waiting.get(one, 0) + 1
                self._forget_names(waiter)
            waiter.name, waiter.others = name, others

    def _forget_names(self, waiter: LocalWaiter) -> None:
        for name in (waiter.name, *waiter.others):
            self._waiting[name] -= 1
            if not self._waiting[name]:
                del self._waiting[name]
                self._checks.pop(name, None)
                self._intervals.pop(name, None)

    def plan(self, name: str, first: bool, next_check: float, fresh: bool = False) -> None:
        """Schedule the next check of a lock's queue, at most so many seconds from now if its waiter is first.

        A new ticket (`fresh`) is checked early.
        """
        now = self._now()
        timings = self._timings
        if self.notifications_work:
            most = timings.heartbeat_interval
        else:
            most = timings.poll_interval if first else timings.poll_interval_of_others
        at = now + (min(max(next_check, SHORTEST), most) if first else most * self._uniform(0.8, 1.0))
        if fresh:
            at = min(at, now + timings.early_check * self._uniform(0.8, 1.0))
        with self._lock:
            if fresh and name in self._waiting:
                self._intervals[name] = timings.early_check
            if name in self._waiting and at < self._checks.get(name, math.inf):
                self._checks[name] = at
            if at < self._asleep_until:
                self._asleep_until = at
                self._wake_listener()

    @property
    def count(self) -> int:
        """The number of waiters."""
        return len(self._waiters)

    @property
    def in_use(self) -> bool:
        """Whether there is a waiter, or an attempt to clean up."""
        return bool(self._waiters or self._deferred)

    def defer_cleanup(self, name: str, attempt: str, others: tuple[str, ...] = ()) -> None:
        """Give up the attempt's grants and tickets later, because that was not possible now."""
        with self._lock:
            self._deferred[attempt] = (name, *others)
        self._wake_listener()

    def due_at(self) -> float:
        """Return when the next check is due; never, if there is no waiter."""
        with self._lock:
            self._asleep_until = min(self._checks.values(), default=math.inf)
            return self._asleep_until

    def notified(self, payload: str) -> None:
        """Wake the waiter that a notification names: it may be its turn, or it is the victim of a deadlock."""
        event, _, attempt = payload.rpartition(" ")
        waiter = self._waiters.get(attempt.replace("-", ""))
        if waiter is not None:
            if event == DEADLOCK:
                waiter.must_look = True
            waiter.wake()

    def wake_all(self) -> None:
        """Make every waiter ask again, as after a reconnect."""
        for waiter in self._all():
            waiter.wake()

    def cleanup_due_at(self) -> float:
        """Return when to retry the deferred cleanup; never, if there is none."""
        return self._cleanup_at if self._deferred else math.inf

    def run_cleanup(self) -> Flow[None]:
        """Give up the deferred attempts. Not over the listener's connection, because it may take long.

        An attempt that fails goes behind the others, for a later run. A run ends when the next heartbeat is due.
        """
        self._cleanup_at = self._now() + self._timings.heartbeat_interval
        for attempt, names in list(self._deferred.items()):
            try:
                yield from self._flows.abandon_all(names, attempt)
                self._deferred.pop(attempt, None)
            except DatabaseError as error:
                logger.debug("lock %r: an attempt could not be given up, retrying later: %s", names[0], error)
                with self._lock:
                    self._deferred[attempt] = self._deferred.pop(attempt, names)
            if self._now() >= self._cleanup_at:
                break

    def check(self, within: float) -> Flow[bool]:
        """Send a heartbeat, ask for positions in the queues whose check is due, and wake waiters that should ask.

        The result is whether a heartbeat was sent. Without one, the database drops the tickets, and the waiters queue
        again later.
        """
        now, timings = self._now(), self._timings
        with self._lock:
            # With the checks that would be due soon, so that they come to go together.
            names = [name for name, at in self._checks.items() if at <= now + timings.holder_check_interval / 2]
            longest = timings.heartbeat_interval if self.notifications_work else timings.poll_interval_of_others
            for name in names:
                self._intervals[name] = min(self._intervals.get(name, longest) * 2, longest)
                self._checks[name] = now + self._intervals[name]
        if not self._waiters or not self.can_take_turns():
            return False
        has_ticket = self._count_tickets()
        positions = yield from self._flows.heartbeat(names, within)
        if positions.total < min(has_ticket, self._count_tickets()):
            self.wake_all()
        surplus = positions.total > sum(1 + len(waiter.others) for waiter in self._all())
        if surplus and self._surplus:
            # Tickets without a waiter, as an interrupt may leave them. The heartbeat would keep them alive.
            yield from self._flows.leave_all_but(list(self._waiters))
        self._surplus = surplus
        ghosts = []
        for attempt, next_check, watched in positions.firsts:
            waiter = self._waiters.get(attempt)
            if waiter is None:
                ghosts.append(attempt)
            elif next_check == 0:
                waiter.wake()
            else:
                for name in (waiter.name, *waiter.others):
                    self.plan(name, True, min(next_check, timings.holder_check_interval) if watched else next_check)
        for attempt in ghosts:
            # A ticket without a waiter, first in its queue: it would never be redeemed.
            for name in names:
                yield from self._flows.abandon_ticket(name, attempt)
        return True

    def _count_tickets(self) -> int:
        return sum(1 + waiter.more_tickets for waiter in self._all() if waiter.has_ticket)

    def _all(self) -> list[LocalWaiter]:
        with self._lock:
            return list(self._waiters.values())
