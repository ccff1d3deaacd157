"""The rounds of the keep-alive: which leases are renewed when, all together, three times in each lease's time.

What fails is tried again for as long as the leases can still be believed; then they are lost, by the clock alone. What
was released is never renewed, nor what belongs to the parent of a fork: both are struck off the list, and the database
would refuse them anyway, since a renewal names an exact grant.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable

from dblock._core import clock
from dblock._core.acquire import TRUST, LockFlows
from dblock._core.effects import GIVE_UP_WITHIN, Flow
from dblock._core.grants import BRISK
from dblock._core.lease_state import LeaseState
from dblock._core.presence import Presence
from dblock.errors import ClientClosed, DatabaseError, DblockError

logger = logging.getLogger("dblock")

RENEWALS_PER_TTL = 3
"""How often a lease is renewed in its time."""

SLOWER = 2
"""How much longer than the last answer the next may take, before another try is worth its time."""

LEAST_TIME = 0.1
"""Seconds that an answer is given however little time is left."""

SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds before a renewal that failed is tried again: a twentieth of the ttl, within these bounds."""


class RenewalSchedule:
    """Which leases are to be renewed and when, and the steps of renewing them. Waits for nothing."""

    def __init__(self, service: LockFlows, now: Callable[[], float] = clock.now) -> None:
        self._flows = service
        self._now = now
        self._states: dict[LeaseState, None] = {}
        self._reached = False
        self._took = 0.0
        """How long the last answer took."""
        self._answered_at = -math.inf
        """When it came."""
        self._too_slow = 0.0
        """How long the last answer was waited for in vain."""
        self._tie_now = False
        """Whether there is a new presence to tie the leases to."""

    def add(self, state: LeaseState) -> None:
        if state.keep_alive and not self._reached:
            state.reply_awaited()
        self._states[state] = None

    def tie(self) -> None:
        """Tie the leases to our new presence at once."""
        self._tie_now = True

    def tied_to(self, presence: Presence) -> list[LeaseState]:
        """Return what is tied to this presence, and not known to be lost."""
        return [state for state in list(self._states) if state.presence is presence and not state.ended]

    def reached(self) -> None:
        """Take note that the database can be reached: what is lost now ran out for another reason."""
        self._reached = True
        for state in list(self._states):
            state.reply_received()

    def discard(self, state: LeaseState) -> None:
        self._states.pop(state, None)

    def releasable(self, abandoned: list[LeaseState]) -> list[LeaseState]:
        """Return those that may still be held in the database."""
        now = self._now()
        return [
            state
            for state in abandoned
            # Of those that are lost some may well be ours still; nobody else need wait for their end.
            if (state.may_be_granted if state.loss else not state.settled) and now < state.trusted_until
        ]

    def release(self, abandoned: Iterable[LeaseState]) -> Flow[None]:
        """Release what nobody has in hand any more; what could not be released yet can be tried again."""
        return self._release(list(abandoned), self._give_back)

    def let_go(self, abandoned: list[LeaseState]) -> Flow[None]:
        """Release all that is still held, and what was abandoned; there will be no other round."""
        last = [*self.held(), *self.releasable(abandoned)]
        self._states = {}
        return self._release(last, lambda grants: self._flows.release_all(grants, GIVE_UP_WITHIN))

    def _release(
        self, held: list[LeaseState], give_back: Callable[[list[tuple[str, int]]], Flow[set[int]]]
    ) -> Flow[None]:
        for state in held:
            self.discard(state)
            state.let_go()
        if not held:
            return
        try:
            busy = yield from give_back([(state.name, state.token) for state in held])
        except ClientClosed:
            raise
        except DblockError as error:
            logger.warning("%d leases could not be released: %s", len(held), error)
            return
        for place, state in enumerate(held):
            if place not in busy:
                state.release_confirmed()

    def _give_back(self, grants: list[tuple[str, int]]) -> Flow[set[int]]:
        """Give these back, unless that could cost what is held: that comes first."""
        now = self._now()
        kept = [state.trusted_until for state in list(self._states) if state.keep_alive and not state.over]
        to_spare = min(kept, default=math.inf) - now - SLOWER * self._took
        if to_spare < self._took:
            return {*range(len(grants))}
        until_due = self.due_at() - now
        within = max(min(max(until_due, SLOWER * self._took), to_spare, GIVE_UP_WITHIN), LEAST_TIME)
        giving_up = min(max(within * BRISK, (until_due - within) / 2), GIVE_UP_WITHIN)
        return (yield from self._flows.release_all(grants, within, giving_up))

    def held(self) -> list[LeaseState]:
        """Return what is held at this moment."""
        return [state for state in list(self._states) if not state.over and state.ours and not state.lost_by_clock()]

    def forget(self) -> None:
        """Strike everything off the list."""
        self._states = {}
        self._reached = False
        self._took = self._too_slow = 0.0

    def due_at(self) -> float:
        """Return when the next round is due; never, if there is nothing to renew."""
        if self._tie_now and self._states:
            return -math.inf
        return min((due_at(state) for state in list(self._states)), default=math.inf)

    def tick(self, abandoned: list[LeaseState]) -> Flow[list[LeaseState]]:
        """Renew what is due, and only then release what was abandoned; return what of it is still to be released."""
        yield from self.renew_due()
        yield from self.release(self.releasable(abandoned))
        return self.releasable(abandoned)

    def renew_due(self) -> Flow[None]:
        """Renew what is due, and with it all that would be due half a round later, so that they come to go together."""
        now = self._now()
        tie_now, self._tie_now = self._tie_now, False
        presence = self._flows.presence
        tie = presence if presence is not None and presence.stands(now) else None
        if any(state.presence not in (None, tie) and not state.presence.ended for state in list(self._states)):
            tie = None  # one tie after the other, or nobody could say which of them counts
        chosen = [
            state
            for state in list(self._states)
            if state.keep_alive
            and (
                (tie_now and state.presence is not tie)
                or max(state.sent_at + state.ttl / RENEWALS_PER_TTL / 2, state.retry_at) <= now
            )
        ]
        for state in chosen:
            if state.over or not state.ours or state.lost_by_clock():
                self.discard(state)
        # Each with the ttl that it has now, which a renewal by hand may change meanwhile.
        asked = [(state, state.ttl) for state in chosen if state in self._states]
        if not asked:
            return
        for state, _ in asked:
            state.reply_awaited()
        if self._too_slow:
            # The database takes longer than those with least time left can wait. Let them not take the rest along.
            patient = [(state, ttl) for state, ttl in asked if state.trusted_until - now > 2.5 * self._too_slow]
            asked = patient or asked
        for state, _ in asked:
            if tie is not None and (state.presence is None or state.presence.ended):
                state.bind(tie)
        within = self._within(now, asked)
        try:
            answer = yield from self._flows.renew([(state.name, state.token, ttl) for state, ttl in asked], within, tie)
        except DblockError as error:
            for state, ttl in asked:
                self._try_again(state, ttl)
            self._reached = False
            self._too_slow = self._now() - now
            if isinstance(error, ClientClosed):
                raise
            many = "lease" if len(asked) == 1 else "leases"
            logger.warning("%d %s could not be renewed, trying again: %s", len(asked), many, error)
            return
        self._reached = True
        self._answered_at = self._now()
        self._took = self._answered_at - now
        self._too_slow = 0.0
        late = []
        for place, (state, ttl) in enumerate(asked):
            why = answer.missed.get(place)
            if why is not None:
                self._miss(state, ttl, why)
                continue
            if not state.renewal_confirmed(answer.sent_at, answer.sent_at + ttl * TRUST, answer.moment + ttl):
                if not state.over:
                    late.append((state.name, state.token))
                self.discard(state)
        if late:
            # Their holders know by now that they are lost; nobody need wait for another ttl, if it can be helped.
            with contextlib.suppress(DatabaseError):
                yield from self._give_back(late)

    def _within(self, now: float, asked: list[tuple[LeaseState, float]]) -> float:
        """Return how long to wait for the answer to a renewal."""
        left = [state.trusted_until - now for state, _ in asked]
        # What was long ago says nothing any more.
        took = self._took if now - self._answered_at < min(ttl for _, ttl in asked) else 0.0
        # What cannot be answered in time, by the last answer, does not hurry the others.
        least = min((one for one in left if one > took), default=max(left))
        # Half of it, so that there is time for another try; but not less than the answer is likely to take.
        return max(least / 2, min(SLOWER * took, least), LEAST_TIME)

    def _miss(self, state: LeaseState, ttl: float, why: str) -> None:
        state.reply_received()
        if why == "busy" or state.being_left:
            self._try_again(state, ttl)
            return
        self.discard(state)
        state.renewal_refused(why)

    def _try_again(self, state: LeaseState, ttl: float) -> None:
        state.retry_renewal(self._now() + min(max(ttl / 20, SHORTEST_PAUSE), LONGEST_PAUSE))


def due_at(state: LeaseState) -> float:
    """Return when a lease is to be renewed next; never, if it is not kept alive or over."""
    if not state.keep_alive or state.over:
        return math.inf
    return max(state.sent_at + state.ttl / RENEWALS_PER_TTL, state.retry_at)
