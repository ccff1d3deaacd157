"""The flows that acquire a lock: try it, wait for it in its queue, redeem the ticket, abandon the attempt.

The database decides which attempt is granted the lock, under which token and until when. This process only assumes the
trust window, counted on its monotonic clock from before the request was sent, so that a slow reply cannot stretch the
lease.

The flows touch neither a database nor a clock of their own, so a test can drive them by hand. If a call fails, its
error is raised in the flow. A waiter whose ticket may then be left in the queue defers the cleanup of that ticket.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections.abc import Callable
from typing import NamedTuple

from dblock._core import clock as clocks
from dblock._core.deadlocks import DeadlockWatch, Holds
from dblock._core.effects import Call, Flow, JoinQueue, Sleep, Wait
from dblock._core.grants import GrantFlows
from dblock._core.options import LockOptions
from dblock._core.presence import Presence
from dblock._core.replies import Grant, TicketStatus, array, log_fields, new_attempt
from dblock._core.statements import DEFAULT_FENCES, FENCED_STORES
from dblock._core.timings import Timings
from dblock._core.waiters import LocalWaiter
from dblock.errors import ClaimBusy, DatabaseError, DblockError, InvalidArgument

logger = logging.getLogger("dblock")

TRUST = 0.98
"""The part of a lease's time that its holder believes in. The rest covers clocks that run at unequal speeds."""

POLL_FIRST = 0.01
POLL_LONGEST = 0.2
"""Seconds before the next request for a lock that another transaction keeps locked. The pause doubles each time."""

MOST_CROWDS = 1000
"""How many locks with a queue a client remembers."""

TRIES_WHILE_BUSY = 3
"""How often `try_acquire` asks for a lock that is free but whose row another transaction has locked."""


class NotGranted(NamedTuple):
    """The reply to a request without a grant."""

    held_for: float = 0.0
    """Seconds for which another holder still has the lock."""
    others_wait: bool = False


class Crowds:
    """The locks for which the last attempt of this client had to queue: the next one queues without a try."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def expected(self, name: str) -> bool:
        """Return whether the next attempt is likely to queue."""
        return name in self._names

    def note(self, name: str, queued: bool) -> None:
        """Record whether an attempt had to queue."""
        if not queued:
            self._names.pop(name, None)
            return
        if len(self._names) >= MOST_CROWDS:
            # A crowd that is forgotten costs one try.
            self._names.clear()
        self._names[name] = None


class LockFlows(GrantFlows):
    """The flows of one client, in one schema, under one holder name."""

    def __init__(
        self,
        schema: str,
        holder: str | Callable[[], str],
        clock: Callable[[], float] = clocks.now,
        uniform: Callable[[float, float], float] = random.uniform,
        new_name: Callable[[], str] = new_attempt,
        fences: str | None = DEFAULT_FENCES,
        timings: Timings | None = None,
    ) -> None:
        """`holder` is the name that other clients see, or a function that returns it for each request.

        `fences` is the schema of fenced_store. With None it is the usual one, if the database has no other.
        """
        super().__init__(schema, clock, uniform, new_name, fences or DEFAULT_FENCES, timings)
        self._least_patience = self.timings.least_patience
        self._claim_within = self.timings.claim_within
        self._holder_check_interval = self.timings.holder_check_interval
        self._holder = holder
        self._knows_fences = fences is not None
        self.crowds = Crowds()

    def try_acquire(self, options: LockOptions, attempt: str, within: float = math.inf) -> Flow[Grant | None]:
        """Ask once. The result is None when another holder has the lock, or other waiters queue for it."""
        if options.claims and not self._knows_fences:
            yield from self._check_fences(options.name)
        for _ in range(TRIES_WHILE_BUSY):
            reply = yield from self._try(options, attempt, within)
            if isinstance(reply, Grant):
                return reply
            if reply.held_for > 0 or reply.others_wait:
                break
            # The lock is free, but an open transaction has locked its row: ask again.
            yield Sleep(self.uniform(POLL_FIRST / 2, POLL_FIRST))
        return None

    def acquire(
        self,
        options: LockOptions,
        timeout: float | None,
        attempt: str,
        crowded: bool = False,
        holds: Holds | None = None,
    ) -> Flow[Grant | None]:
        """Ask, and wait in the queue until granted or until the timeout has passed. The result is then None.

        Where a crowd is expected, or with `crowded`, queue at once without a try. With `holds`, look for deadlocks
        during the wait.
        """
        if options.claims and not self._knows_fences:
            yield from self._check_fences(options.name)
        if timeout == 0:
            return (yield from self.try_acquire(options, attempt, self._least_patience))
        give_up_at = math.inf if timeout is None else self.clock() + timeout
        if not (crowded or self.crowds.expected(options.name)):
            reply = yield from self._try(options, attempt, max(give_up_at - self.clock(), self._least_patience))
            if isinstance(reply, Grant):
                return reply
            if self.clock() >= give_up_at:
                return None
        waiter = yield JoinQueue(options.name, attempt)
        watch = DeadlockWatch(self, options.name, waiter, holds)
        try:
            return (yield from self._wait_in_queue(options, give_up_at, attempt, waiter, watch))
        except DatabaseError:
            # The database did not reply, but it may still know of this attempt.
            waiter.defer_cleanup()
            raise
        finally:
            watch.close()
            waiter.leave()
            self.crowds.note(options.name, waiter.had_ticket)

    def _check_fences(self, name: str) -> Flow[None]:
        """Refuse claims that could mean the resources of several stores: a claim in the wrong one protects nothing."""
        found = yield FENCED_STORES
        if found is not None:
            raise InvalidArgument(
                f"The claims of lock {name!a:.80} are names in one fenced_store, and this database has several: "
                f"{found[0]}. Choose one with fences= of the client, or pass store.claims(…)."
            )
        self._knows_fences = True

    def _wait_in_queue(
        self, options: LockOptions, give_up_at: float, attempt: str, waiter: LocalWaiter, watch: DeadlockWatch
    ) -> Flow[Grant | None]:
        number: int | None = None
        pause = POLL_FIRST
        while True:
            wait = math.inf
            if waiter.take_turn():
                within = max(give_up_at - self.clock(), self._least_patience)
                first_ask = pause == POLL_FIRST
                ticket = yield from self._enqueue(options, attempt, within, number is not None, first_ask)
                if isinstance(ticket, Grant):
                    return ticket
                if ticket is None:
                    # Another transaction has locked the lock's row or its queue, perhaps for long.
                    waiter.found_busy()
                    wait, pause = self._next_pause(pause)
                else:
                    if number is not None and ticket.fresh:
                        logger.warning(
                            "waiter: heartbeat came too late, ticket replaced by a new one (lock %r)",
                            options.name,
                            extra=log_fields(options.name, holder=self.holder_name()),
                        )
                    number = ticket.ticket
                    pause = POLL_FIRST
                    if logger.isEnabledFor(logging.DEBUG):
                        fields = log_fields(options.name, holder=self.holder_name())
                        logger.debug("lock %r: queued, ticket %d", options.name, number, extra=fields)
                    waiter.ticket_issued(ticket.first, ticket.next_check, ticket.fresh)
                    if ticket.fresh and watch.holds_others():
                        with contextlib.suppress(DatabaseError):
                            yield Call(self.statements.wake_set, (options.name,), within=self._give_up_within)
            left = give_up_at - self.clock()
            free = True
            while free and left > 0:
                look_in = watch.seconds_left() if number is not None else math.inf
                yield Wait(waiter, max(min(wait, left, look_in), 0.0))
                if number is not None and watch.due:
                    # A wake-up during the look stays until the ticket is redeemed.
                    yield from watch.look()
                    left = give_up_at - self.clock()
                    continue
                waiter.ticket_redeemed()
                left = give_up_at - self.clock()
                if number is None or left <= 0:
                    break
                # Usually it is this waiter's turn, and a try is the shortest way.
                reply = yield from self._try(options, attempt, max(left, self._least_patience), number)
                if isinstance(reply, Grant):
                    return reply
                # If the lock is free and no ticket is ahead, an open transaction has locked its row.
                free = reply.held_for <= 0 and not reply.others_wait
                wait, pause = self._next_pause(pause) if free else (math.inf, POLL_FIRST)
            if left <= 0:
                break
        return None if number is None else (yield from self._stop_waiting(options, attempt, waiter))

    def _stop_waiting(self, options: LockOptions, attempt: str, waiter: LocalWaiter) -> Flow[Grant | None]:
        """Give the ticket up when the timeout has passed: other waiters would wait behind it without end."""
        try:
            yield from self.abandon(options.name, attempt)
        except DatabaseError:
            waiter.defer_cleanup()
        return None

    def _next_pause(self, pause: float) -> tuple[float, float]:
        """Return how long to wait after this pause, and the pause after that."""
        return self.uniform(pause / 2, pause), min(pause * 2, POLL_LONGEST)

    def _try(
        self, options: LockOptions, attempt: str, within: float = math.inf, ticket: int | None = None
    ) -> Flow[Grant | NotGranted]:
        """Ask once, without queueing; redeem the ticket of this number, if there is one."""
        sent_at = self.clock()
        presence = self._valid_presence(sent_at)
        args = (
            options.name,
            options.interval,
            self.holder_name(),
            options.meta,
            attempt,
            "t" if options.durable else "f",
            presence.name if presence else None,
            "t" if options.fair else "f",
            None if ticket is None else str(ticket),
        )
        statements = self.statements
        try:
            row = yield self._call(options, statements.try_acquire, args, statements.try_acquire_again, within)
        except ClaimBusy:
            return NotGranted()
        granted, token, expires_at, remaining, waiting, *_ = row
        left = float(remaining)
        if granted != "t":
            return NotGranted(left, waiting == "t")
        grant = Grant(options.name, int(token), float(expires_at), sent_at + left * TRUST, sent_at, presence)
        if self.clock() < grant.trusted_until:  # _in_time(), without the cost of a generator
            return grant
        return (yield from self._in_time(grant)) or NotGranted(left)

    def _enqueue(
        self, options: LockOptions, attempt: str, within: float, had_ticket: bool, wait: bool = True
    ) -> Flow[Grant | TicketStatus | None]:
        """Ask, and take a ticket unless granted. An attempt that had a ticket passes over dead waiters ahead of it.

        The result is None when there is no ticket yet, because another transaction has locked the lock's row or its
        queue. With `wait` the call waits for that transaction, but only for a moment.
        """
        sent_at = self.clock()
        presence = self._valid_presence(sent_at)
        args = (
            options.name,
            options.interval,
            self.holder_name(),
            options.meta,
            attempt,
            self.client,
            "t" if options.durable else "f",
            "t" if options.fair else "f",
            presence.name if presence else None,
            "t" if had_ticket else "f",
            "t" if wait else "f",
        )
        try:
            row = yield self._call(options, self.statements.acquire, args, None, within)
        except ClaimBusy:
            return None
        granted, token, expires_at, remaining, ticket, first, watched, fresh, *_ = row
        left = float(remaining)
        if granted == "t":
            grant = Grant(options.name, int(token), float(expires_at), sent_at + left * TRUST, sent_at, presence)
            return (yield from self._in_time(grant))
        if ticket is None:
            return None
        next_check = min(left, self._holder_check_interval) if watched == "t" else left
        return TicketStatus(int(ticket), fresh == "t", first == "t", next_check)

    def _call(
        self, options: LockOptions, sql: bytes, args: tuple[str | None, ...], again: bytes | None, within: float
    ) -> Call:
        if not options.claims:
            return Call(sql, args, again, within)
        claiming = self.statements.claiming
        args = (*args, array(options.claims), f"{min(within, self._claim_within):.3f}")
        return Call(claiming[sql], args, claiming[again] if again else None, within)

    def _in_time(self, grant: Grant) -> Flow[Grant | None]:
        """Return the grant. If its reply took longer than the trust window, release the grant and return None."""
        if self.clock() < grant.trusted_until:
            return grant
        try:
            yield from self.release(grant.name, grant.token, grant.trusted_until)
        except DblockError as error:
            error.may_be_done = True
            raise
        return None

    def _valid_presence(self, now: float) -> Presence | None:
        """Return this client's presence, or None while it is in doubt: a new lease is safer without it then."""
        return self.presence if self.presence is not None and self.presence.stands(now) else None

    def holder_name(self) -> str:
        """Return the name that other clients see; asked each time, because after a fork the process is another."""
        holder = self._holder
        return holder if isinstance(holder, str) else holder()
