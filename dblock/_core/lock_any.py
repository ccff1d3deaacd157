"""The flow that acquires any one of several locks.

A ticket stands in the queue of each lock. The database grants one lock, and deletes the other tickets in the same
transaction. A retry after a lost reply finds that grant, and is not granted a second lock.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import NamedTuple

from dblock._core.acquire import POLL_FIRST, POLL_LONGEST, TRIES_WHILE_BUSY, LockFlows
from dblock._core.effects import Call, Flow, JoinQueue, Sleep, Wait
from dblock._core.options import LockOptions
from dblock._core.replies import Grant, TicketStatus, array, items
from dblock._core.several import LOOK_AGAIN, grant_of, ticket_status
from dblock._core.waiters import LocalWaiter
from dblock.errors import ClientClosed, DatabaseError


class LockAnyFlows:
    """The flows of one client that acquire one of several locks."""

    def __init__(self, flows: LockFlows) -> None:
        self._flows = flows
        self._timings = flows.timings

    def acquire(
        self, names: Sequence[str], options: LockOptions, timeout: float | None, attempt: str
    ) -> Flow[Grant | None]:
        """Acquire one of the locks: the first that is free, in this order, or else the first to become free.

        The result is None when the timeout has passed.
        """
        clock = self._flows.clock
        give_up_at = math.inf if timeout is None else clock() + timeout
        for _ in range(TRIES_WHILE_BUSY if timeout == 0 else 1):
            within = max(give_up_at - clock(), self._timings.least_patience)
            reply = yield from self._ask(names, options, attempt, within)
            if isinstance(reply, Grant):
                return reply
            if timeout != 0 or not reply.busy:
                break
            yield Sleep(self._flows.uniform(POLL_FIRST / 2, POLL_FIRST))
        if clock() >= give_up_at:
            return None
        waiter = yield JoinQueue(names[0], attempt)
        try:
            waiter.move(names[0], tuple(names[1:]))
            grant = yield from self._wait(names, options, give_up_at, attempt, waiter)
            if grant is None and waiter.had_ticket:
                yield from self._flows.abandon_all(names, attempt)
            return grant
        except DatabaseError:
            waiter.defer_cleanup_of(names)
            raise
        finally:
            waiter.leave()

    def _wait(
        self, names: Sequence[str], options: LockOptions, give_up_at: float, attempt: str, waiter: LocalWaiter
    ) -> Flow[Grant | None]:
        clock, uniform = self._flows.clock, self._flows.uniform
        had_tickets, pause = False, POLL_FIRST
        while True:
            within = max(give_up_at - clock(), self._timings.least_patience)
            reply = yield from self._ask(names, options, attempt, within, _Queue(had_tickets, pause))
            if isinstance(reply, Grant):
                return reply
            had_tickets = had_tickets or bool(reply.tickets)
            waiter.tickets_issued(reply.tickets)
            wait = LOOK_AGAIN
            if reply.busy:
                # Another transaction has locked some of the locks or queues, perhaps for long.
                wait, pause = uniform(pause / 2, pause), min(pause * 2, POLL_LONGEST)
            else:
                pause = POLL_FIRST
            left = give_up_at - clock()
            if left > 0:
                yield Wait(waiter, min(wait, left))
                waiter.ticket_redeemed()
            if clock() >= give_up_at:
                return None

    def _ask(
        self,
        names: Sequence[str],
        options: LockOptions,
        attempt: str,
        within: float,
        queue: _Queue | None = None,
    ) -> Flow[Grant | _Tickets]:
        """Ask for one of the locks; with `queue`, leave a ticket for each of them unless one is granted."""
        flows = self._flows
        sent_at = flows.clock()
        presence = flows._valid_presence(sent_at)
        args = (
            array(names),
            options.interval,
            flows.holder_name(),
            options.meta,
            attempt,
            flows.client if queue else None,
            presence.name if presence else None,
            "t" if queue and queue.had_tickets else "f",
            "t" if queue is None or queue.pause == POLL_FIRST else "f",
        )
        statements = flows.statements
        row = yield Call(statements.acquire_any, args, statements.acquire_any_again, within)
        name, token, deadline, remaining, left_queues, busy, *status = row
        if name is not None:
            if int(left_queues):
                # The grant's commit was durable and could notify no waiter. A waiter finds out by itself otherwise.
                with contextlib.suppress(DatabaseError, ClientClosed):
                    others = array(one for one in names if one != name)
                    yield Call(statements.abandon_tickets, (others, attempt), within=self._timings.give_up_within)
            grant = grant_of(name, token, deadline, remaining, sent_at, presence)
            return (yield from flows._in_time(grant)) or _Tickets({}, True)
        tickets = {
            one: ticket_status(ticket, fresh, first, watched, float(left), self._timings)
            for one, ticket, left, first, watched, fresh in zip(names, *map(items, status), strict=False)
            if ticket != "NULL"
        }
        return _Tickets(tickets, busy == "t" or (queue is None and float(remaining or 0.0) == 0))


class _Queue(NamedTuple):
    """How a caller of `lock_any` waits."""

    had_tickets: bool
    pause: float


class _Tickets(NamedTuple):
    """The reply to a request for any of several locks without a grant."""

    tickets: dict[str, TicketStatus]
    busy: bool
    """Whether another transaction has locked one of the locks or queues, so that the answer may be another soon."""
