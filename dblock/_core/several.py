"""The flows that acquire all of several locks, and release them.

Every caller takes the locks in the order of their names, so callers of `acquire_all` cannot wait for each other in
a cycle. A caller that waits holds the locks that come before, and the keep-alive renews them.

A program may also take single locks in the opposite order by hand. It then holds a later lock and waits for an earlier
one, which a caller here holds. The database sees such a cycle, because the attempts of one thread or task have the same
first half. It reports the cycle to the caller that the program waits for, when that caller begins to wait or looks
again. The caller gives up that lock and all later ones, and queues for them again, behind the program.

A waiter of another kind, for example one that uses SQL, may have other attempts. If one stands in the queue of a lock
that the caller holds, the caller gives that lock up too, but only after `keep_several_for`, and each time later.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dblock._core.acquire import POLL_FIRST, POLL_LONGEST, TRIES_WHILE_BUSY, TRUST, LockFlows
from dblock._core.deadlocks import DeadlockWatch, Holds
from dblock._core.effects import Call, Flow, JoinQueue, Sleep, Wait
from dblock._core.lease_state import LeaseState, Reason
from dblock._core.options import LockOptions
from dblock._core.presence import Presence
from dblock._core.replies import Grant, TicketStatus, array, items
from dblock._core.timings import Timings
from dblock._core.waiters import LocalWaiter
from dblock.errors import DatabaseError

logger = logging.getLogger("dblock")

KEEP_LONGEST = 60.0
"""The longest that a caller keeps locks that another waiter wants. The seconds double each time, so that a caller in
long queues is granted its locks."""

LOOK_AGAIN = 2.0
"""Seconds after which a waiter that holds nothing asks again without being woken."""


class GrantedLocks(NamedTuple):
    """The reply to a request for all of several locks."""

    grants: list[Grant]
    refused: str | None
    """The lock that was not granted; None if all were."""
    held_for: float
    """Seconds for which another holder still has it, or more than 0 if its queue comes first."""
    ticket: TicketStatus | None
    cycle: tuple[int, str] | None
    """The index of the lock held, before or by this reply, that closes a cycle of waiters, and the attempt that waits
    for it."""
    wanted: int | None
    """The index of the first lock held that another waiter may need to go on."""


class SeveralFlows:
    """The flows of one client that acquire or release several locks."""

    def __init__(self, flows: LockFlows) -> None:
        self._flows = flows
        self._timings = flows.timings

    def acquire_all(
        self,
        names: Sequence[str],
        options: LockOptions,
        timeout: float | None,
        attempt: str,
        hold: Callable[[Grant], LeaseState],
        drop: Callable[[LeaseState], object],
        is_ordered: Callable[[], bool],
        holds: Holds = tuple,
    ) -> Flow[str | None]:
        """Acquire all the locks, or return the name of the lock that it waited for when the timeout passed.

        `hold` makes a lease of a grant and keeps it alive, `drop` ends that. If the flow fails, the caller gives back
        what it was granted. `is_ordered` returns whether the caller holds no lock that comes after the first of these.
        `holds` returns the tokens of its other locks, which it does not give up: the flow looks for their deadlocks.
        """
        clock = self._flows.clock
        give_up_at = math.inf if timeout is None else clock() + timeout
        for _ in range(TRIES_WHILE_BUSY):
            within = max(give_up_at - clock(), self._timings.least_patience)
            reply = yield from self._ask(names, options, attempt, within)
            if timeout != 0 or reply.refused is None or reply.held_for > 0:
                break
            # The lock is free, but an open transaction has locked its row: ask again.
            yield Sleep(self._flows.uniform(POLL_FIRST / 2, POLL_FIRST))
        if reply.refused is None:
            at_once = [hold(grant) for grant in reply.grants]
            if _first_lost(at_once) is None:
                return None
            yield from self._give_up(at_once, 0, (), attempt, drop)
        elif clock() >= give_up_at:
            return reply.refused
        waiter = yield JoinQueue(reply.refused or names[0], attempt)
        watch = DeadlockWatch(self._flows, names[0], waiter, holds if holds() else None)
        held: list[LeaseState] = []
        try:
            waiting = self._wait(names, options, give_up_at, attempt, hold, drop, is_ordered(), waiter, watch, held)
            if (yield from waiting):
                return None
            waited_for = names[len(held)]
            yield from self._give_up(held, 0, (waited_for,), attempt, drop)
            return waited_for
        except DatabaseError:
            # The database did not reply, but it may still know of this attempt.
            waiter.defer_cleanup_of(names)
            raise
        finally:
            watch.close()
            waiter.leave()

    def _wait(
        self,
        names: Sequence[str],
        options: LockOptions,
        give_up_at: float,
        attempt: str,
        hold: Callable[[Grant], LeaseState],
        drop: Callable[[LeaseState], object],
        ordered: bool,
        waiter: LocalWaiter,
        watch: DeadlockWatch,
        held: list[LeaseState],
    ) -> Flow[bool]:
        """Add all the locks to those held; the result is False when the timeout has passed first."""
        clock, uniform = self._flows.clock, self._flows.uniform
        number: int | None = None
        places: dict[str, int] = {}
        keep, pause = self._timings.keep_several_for * uniform(0.8, 1.2), POLL_FIRST
        since = clock()
        while True:
            wait = math.inf
            if waiter.take_turn():
                within = max(give_up_at - clock(), self._timings.least_patience)
                reply = yield from self._ask(
                    names[len(held) :],
                    options,
                    attempt,
                    within,
                    queue=_Queue(number, [state.name for state in held], ordered, places, pause == POLL_FIRST),
                )
                held += map(hold, reply.grants)
                if reply.grants:
                    number, since = None, clock()
                lost = _first_lost(held)
                if reply.refused is None and lost is None:
                    return True
                if reply.refused is not None and lost is None and reply.cycle is not None:
                    first, other = reply.cycle
                    if reply.ticket is not None:
                        places[reply.refused] = reply.ticket.ticket
                    logger.debug("lock %r: given up for another waiter, queueing behind it", held[first].name)
                    number = yield from self._give_way(held, first, reply.refused, attempt, drop, other, ordered)
                    waiter.move(held[first].name)
                    del held[first:]
                    since = clock()
                    if number is None:
                        continue
                    # The waiter in front has yet to take the lock, and to release it.
                    ticket = TicketStatus(number, True, False, self._timings.cycle_look_interval)
                    reply = GrantedLocks([], None, 0.0, ticket, None, None)
                elif lost is not None or (reply.wanted is not None and clock() - since >= keep):
                    first = reply.wanted or 0 if lost is None else lost
                    keep = keep if lost is not None else min(keep * 2, KEEP_LONGEST)
                    waits_for = () if reply.refused is None else (reply.refused,)
                    logger.debug("lock %r: given up, queueing again", held[first].name)
                    yield from self._give_up(held, first, waits_for, attempt, drop)
                    del held[first:]
                    number, since = None, clock()
                    if clock() < give_up_at:
                        continue
                    return False
                waiter.move(names[len(held)])
                if reply.ticket is None:
                    # Another transaction has locked the lock's row or its queue, perhaps for long.
                    waiter.found_busy()
                    wait, pause = uniform(pause / 2, pause), min(pause * 2, POLL_LONGEST)
                else:
                    number, pause = reply.ticket.ticket, POLL_FIRST
                    waiter.ticket_issued(reply.ticket.first, reply.ticket.next_check, reply.ticket.fresh)
            now = clock()
            if now >= give_up_at:
                return False
            look_in = self._timings.cycle_look_interval * uniform(0.8, 1.2) if held else LOOK_AGAIN
            if number is not None:
                look_in = min(look_in, max(watch.seconds_left(), 0.0))
            yield Wait(waiter, min(wait, give_up_at - now, look_in))
            if number is not None and watch.due:
                watch.name = names[len(held)]
                yield from watch.look()
            waiter.ticket_redeemed()

    def _give_up(
        self,
        held: Sequence[LeaseState],
        first: int,
        waits_for: tuple[str, ...],
        attempt: str,
        drop: Callable[[LeaseState], object],
    ) -> Flow[None]:
        """Release the locks from this position on, and with them the ticket for the next one, in one call."""
        for state in held[first:]:
            drop(state)
        names = [*(state.name for state in held[first:]), *waits_for]
        yield from self._flows.abandon_all(names, attempt)
        for state in held[first:]:
            state.release_confirmed()

    def _give_way(
        self,
        held: Sequence[LeaseState],
        first: int,
        waits_for: str,
        attempt: str,
        drop: Callable[[LeaseState], object],
        waiter: str,
        ordered: bool,
    ) -> Flow[int | None]:
        """Release the locks from this position on for a waiter in the same cycle, and queue right behind it.

        The result is the number of the new ticket, or None if there is none.
        """
        flows = self._flows
        for state in held[first:]:
            drop(state)
        presence = flows._valid_presence(flows.clock())
        args = (
            array([*(state.name for state in held[first:]), waits_for]),
            attempt,
            waiter,
            flows.client,
            presence.name if presence else None,
            flows.holder_name(),
            "t" if ordered else "f",
        )
        (number,) = yield Call(flows.statements.give_way, args, within=self._timings.give_up_within)
        for state in held[first:]:
            state.release_confirmed()
        return None if number is None else int(number)

    def _ask(
        self,
        names: Sequence[str],
        options: LockOptions,
        attempt: str,
        within: float = math.inf,
        queue: _Queue | None = None,
    ) -> Flow[GrantedLocks]:
        """Ask for all the locks, all or none; with `queue`, for as many as possible and a ticket for the next."""
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
            None if queue is None or queue.ticket is None else str(queue.ticket),
            array(queue.held if queue else ()),
            "t" if queue and queue.ordered else "f",
            array(str(queue.places.get(name, "NULL")) for name in names).replace('"', "") if queue else "{}",
            "t" if queue is None or queue.wait else "f",
        )
        again = None if queue else flows.statements.acquire_all_again
        row = yield Call(flows.statements.acquire_all, args, again, within)
        tokens, deadlines, lasting, refused, remaining, ticket, first, watched, fresh, cycle, other, wanted = row
        grants = [
            grant_of(name, token, deadline, left, sent_at, presence)
            for name, token, deadline, left in zip(names, items(tokens), items(deadlines), items(lasting), strict=False)
            if token
        ]
        left = float(remaining or 0.0)
        return GrantedLocks(
            grants,
            None if refused is None else names[int(refused) - 1],
            left,
            None if ticket is None else ticket_status(ticket, fresh, first, watched, left, self._timings),
            None if cycle is None else (int(cycle) - 1, other),
            None if wanted is None else int(wanted) - 1,
        )

    def release(self, states: Sequence[LeaseState]) -> Flow[bool]:
        """Release these leases in one call; the result is whether all of them were still held under their tokens."""
        observation, releasing = self._flows.observation, self._release_all(states)
        return releasing if observation is None else observation.release(states, releasing)

    def _release_all(self, states: Sequence[LeaseState]) -> Flow[bool]:
        doubtful = {state for state in states if state.in_doubt}
        for state in states:
            state.let_go()
        left, all_held = list(states), True
        while left:
            released, busy = yield from self._release([(state.name, state.token) for state in left])
            done = [state for index, state in enumerate(left) if index not in busy]
            if released is not None and released < len(done):
                lost, held = yield from self._learn_why(done, doubtful)
                all_held = all_held and not lost
                done = [state for state in done if state not in held]
            elif released is None and any(self._flows.clock() >= state.trusted_until for state in done):
                # The first reply was lost, and so may have been a lease before it.
                all_held = False
            for state in done:
                state.release_confirmed()
            left = [state for state in left if not state.settled]
            if left:
                yield Sleep(POLL_FIRST)
        return all_held

    def _release(self, grants: Sequence[tuple[str, int]]) -> Flow[tuple[int | None, set[int]]]:
        statements = self._flows.statements
        args = (array(name for name, _ in grants), array(str(token) for _, token in grants))
        released, busy = yield Call(statements.release_set, args, statements.release_set_again)
        positions = {int(position) - 1 for position in items(busy)}
        return None if released is None else int(released), positions

    def _learn_why(
        self, states: Sequence[LeaseState], doubtful: set[LeaseState]
    ) -> Flow[tuple[list[LeaseState], list[LeaseState]]]:
        """Ask which of these leases were lost before their release, and mark them.

        The result is the lost ones, and those that are still held because a renewal has overtaken the release. A lock
        that an operator has freed looks like one that was released just now.
        """
        reply = yield from self._flows.renew([(state.name, state.token, state.ttl) for state in states])
        lost, held = [], []
        for index, state in enumerate(states):
            why = reply.missed.get(index)
            if why in ("expired", "superseded"):
                state.release_refused(Reason.UNREACHABLE if state in doubtful else Reason(why))
                lost.append(state)
            elif why != "released":
                held.append(state)
        return lost, held


class _Queue(NamedTuple):
    """How a caller of `acquire_all` waits."""

    ticket: int | None
    """The number of its ticket for the first name."""
    held: list[str]
    ordered: bool
    places: dict[str, int]
    """The numbers of the tickets that it has given up for another waiter, by the names of the locks."""
    wait: bool


def grant_of(name: str, token: str, deadline: str, left: str, sent_at: float, presence: Presence | None) -> Grant:
    """Return a grant as the database reported it."""
    return Grant(name, int(token), float(deadline), sent_at + float(left) * TRUST, sent_at, presence)


def ticket_status(
    ticket: str, fresh: str | None, first: str | None, watched: str | None, left: float, timings: Timings
) -> TicketStatus:
    """Return a ticket as the database reported it. `left` is the time of the holder's lease."""
    next_check = min(left, timings.holder_check_interval) if watched == "t" else left
    return TicketStatus(int(ticket), fresh == "t", first == "t", next_check)


def _first_lost(held: Sequence[LeaseState]) -> int | None:
    return next((index for index, state in enumerate(held) if state.ended or state.lost()), None)
