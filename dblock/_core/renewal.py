"""The renewal schedule: which leases the keep-alive renews and when. All leases of a client share one statement.

Each lease is renewed three times in its ttl. A failed renewal is retried while the trust window is open. After that the
lease is lost by the clock alone: the schedule has no part in it.

The schedule never renews a released lease, nor a lease of the parent of a fork. It drops both, and the database would
refuse them anyway because a renewal names an exact grant.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable

from dblock._core import clock
from dblock._core.acquire import POLL_FIRST, TRUST, LockFlows
from dblock._core.effects import Flow, Sleep
from dblock._core.grants import BRISK
from dblock._core.lease_state import LeaseState
from dblock._core.outage import Outage
from dblock._core.presence import Presence
from dblock._core.replies import Renewal
from dblock.errors import ClientClosed, DatabaseError, DblockError

logger = logging.getLogger("dblock")

RENEWALS_PER_TTL = 3
"""How often a lease is renewed in its ttl."""

SLOWER = 2
"""How many times as long as the last reply the next one may take before a retry is worth its time."""

IMPATIENT = 2.5
"""A lease is left out of a renewal if less than this many times the last overdue reply is left of its trust window."""

LEAST_TIME = 0.1
"""Seconds that a reply may take however little time is left."""

SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds before a failed renewal is retried: a twentieth of the ttl, within these bounds."""

Batch = list[tuple[LeaseState, float]]
"""Leases to renew in one statement, each with the ttl that it has now: a renewal by hand may change the ttl before the
reply arrives.
"""


class RenewalSchedule:
    """The leases of a client, when each is due, and the steps of renewing them. Waits for nothing."""

    def __init__(self, service: LockFlows, now: Callable[[], float] = clock.now) -> None:
        self._flows = service
        self._give_up_within = service.timings.give_up_within
        self._now = now
        self._states: dict[LeaseState, float] = {}
        """The leases, each with the moment from which on it is kept, oldest first."""
        self._latest: dict[str, LeaseState] = {}
        """The latest lease of each lock."""
        self._reached = False
        """Whether the database replied to the last call."""
        self._took = 0.0
        """How long the last reply took."""
        self._answered_at = -math.inf
        """When the last reply arrived."""
        self._too_slow = 0.0
        """How long the last renewal waited for a reply that did not come; 0 if it came."""
        self._renewal = Outage("keep-alive: renewals succeed again")
        self._releases = Outage("keep-alive: releases succeed again")
        self._tie_at = math.inf
        """When to tie the leases to the client's presence."""

    def add(self, state: LeaseState) -> float:
        """Renew this lease from now on. Return when it is due."""
        if state.keep_alive and not self._reached:
            state.reply_awaited()
        self._states.setdefault(state, self._now())
        self._latest[state.name] = state
        if state.keep_alive and self._flows.presence not in (None, state.presence):
            # It was requested before the presence was there, and the other leases may have been tied already.
            self.tie()
        return min(self._tie_at, due_at(state))

    def discard(self, state: LeaseState) -> None:
        """Stop renewing this lease."""
        self._states.pop(state, None)
        latest = self._latest.pop(state.name, None)
        if latest is not None and latest is not state:
            self._latest.setdefault(state.name, latest)

    def forget(self) -> None:
        """Drop all leases."""
        self._states, self._latest = {}, {}
        self._reached = False
        self._took = self._too_slow = 0.0

    def tie(self) -> None:
        """Tie the leases to the client's new presence at once."""
        self._tie_at = -math.inf

    def tied_to(self, presence: Presence) -> list[LeaseState]:
        """Return the leases that are tied to this presence and have not ended."""
        return [state for state in list(self._states) if state.presence is presence and not state.ended]

    def latest(self, name: str) -> LeaseState | None:
        """Return the latest lease of this lock, None if none is kept."""
        return self._latest.get(name)

    def of_lock(self, lock: str) -> list[LeaseState]:
        """Return the leases of a lock that have not ended. A client may have several of a shared lock."""
        return [state for state in list(self._states) if state.lock == lock and not state.ended]

    def keeps_any(self) -> bool:
        """Return whether there is a lease to renew or to release."""
        return bool(self._states)

    def kept_since(self) -> float:
        """Return from when on the oldest lease is kept; infinite if there is none. Any thread may ask."""
        try:
            return next(iter(self._states.values()), math.inf)
        except RuntimeError:  # another thread has added or discarded one at this moment
            return self.kept_since()

    def reached(self) -> None:
        """Record that the database can be reached: a lease that is lost now has expired."""
        self._reached = True
        for state in list(self._states):
            state.reply_received()

    def held(self) -> list[LeaseState]:
        """Return the leases that are held at this moment."""
        return [state for state in list(self._states) if not state.over and state.ours and not state.lost_by_clock()]

    def keeps(self, state: LeaseState) -> bool:
        """Return whether this is a lease of this client that has not ended."""
        return state in self._states and not state.ended

    def due_at(self) -> float:
        """Return when the next renewal is due; infinite if there is nothing to renew."""
        states = list(self._states)
        return min(self._tie_at, *map(due_at, states)) if states else math.inf

    def tick(self, abandoned: list[LeaseState]) -> Flow[list[LeaseState]]:
        """Renew the leases that are due, then release the abandoned ones; return those that still need a release."""
        yield from self.renew_due()
        yield from self.release(self.releasable(abandoned))
        return self.releasable(abandoned)

    # Renewal.

    def renew_due(self) -> Flow[None]:
        """Renew the leases that are due, and with them those due half an interval later.

        So leases that began at different times come to be renewed together.
        """
        now = self._now()
        must_tie = self._tie_at <= now
        if must_tie:
            self._tie_at = math.inf  # before the presence is read: a newer one sets this again
        presence = self._presence_to_tie(now)
        if must_tie and presence is None and self._flows.presence is not None:
            self._tie_at = min(self._tie_at, now + LONGEST_PAUSE)
        batch = self._without_finished(self._due(now, presence if must_tie else None))
        if not batch:
            return
        for state, _ in batch:
            state.reply_awaited()
        batch = self._without_impatient(now, batch)
        _tie(batch, presence)
        reply = yield from self._send(now, batch, presence)
        if reply is None:
            return
        late = self._apply(batch, reply)
        if late:
            # Their holders know by now that the leases are lost. Waiters need not wait for another ttl.
            with contextlib.suppress(DatabaseError):
                yield from self._give_back(late)

    def _presence_to_tie(self, now: float) -> Presence | None:
        """Return the client's presence if the leases may be tied to it.

        A lease still tied to another presence comes first; tied to two, it would be unclear which of them counts.
        """
        presence = self._flows.presence
        if presence is None or not presence.stands(now):
            return None
        for state in list(self._states):
            if state.presence not in (None, presence) and not state.presence.ended:
                return None
        return presence

    def _due(self, now: float, presence: Presence | None) -> list[LeaseState]:
        """Return the leases to renew now, because their time has come or because there is a new presence."""
        return [
            state
            for state in list(self._states)
            if state.keep_alive
            and (
                (presence is not None and state.presence is not presence)
                or (state.retry_at or state.sent_at + _interval(state) / 2) <= now
            )
        ]

    def _without_finished(self, due: list[LeaseState]) -> Batch:
        """Drop the leases that have ended or belong to another process; return the others."""
        for state in due:
            if state.over or not state.ours or state.lost_by_clock():
                self.discard(state)
        return [(state, state.ttl) for state in due if state in self._states]

    def _without_impatient(self, now: float, batch: Batch) -> Batch:
        """Leave out the leases with little time left, if the database is slower than they can wait.

        Their short timeout would make the renewal of the others fail too. If all have little time left, none is left
        out.
        """
        if not self._too_slow:
            return batch
        patient = [(state, ttl) for state, ttl in batch if state.trusted_until - now > IMPATIENT * self._too_slow]
        return patient or batch

    def _send(self, now: float, batch: Batch, presence: Presence | None) -> Flow[Renewal | None]:
        """Send the renewal; the result is None if it failed and is to be retried."""
        grants = [(state.name, state.token, ttl) for state, ttl in batch]
        try:
            reply = yield from self._flows.renew(grants, self._within(now, batch), presence)
        except DblockError as error:
            for state, ttl in batch:
                self._retry(state, ttl)
            self._reached = False
            self._too_slow = self._now() - now
            if isinstance(error, ClientClosed):
                raise
            many = "lease" if len(batch) == 1 else "leases"
            self._renewal.failed("keep-alive: renewal of %d %s failed, retrying: %s", len(batch), many, error)
            return None
        self._renewal.worked()
        logger.debug("keep-alive: renewed %d leases", len(batch))
        self._reached = True
        self._answered_at = self._now()
        self._took = self._answered_at - now
        if self._flows.observation is not None:
            margins = [(state.trusted_until - self._answered_at) / ttl for state, ttl in batch]
            self._flows.observation.renewed(self._took, margins)
        self._too_slow = 0.0
        return reply

    def _apply(self, batch: Batch, reply: Renewal) -> list[tuple[str, int]]:
        """Extend or end each lease as the reply says; return the grants whose renewal came too late to be believed."""
        late = []
        for index, (state, ttl) in enumerate(batch):
            why = reply.missed.get(index)
            if why is not None:
                self._miss(state, ttl, why)
            elif not state.renewal_confirmed(reply.sent_at, reply.sent_at + ttl * TRUST, reply.moment + ttl):
                if not state.over:
                    late.append((state.name, state.token))
                self.discard(state)
        return late

    def _within(self, now: float, batch: Batch) -> float:
        """Return the seconds to wait for the reply to a renewal."""
        left = [state.trusted_until - now for state, _ in batch]
        # A reply from longer ago than the shortest ttl says nothing about the next one.
        took = self._took if now - self._answered_at < min(ttl for _, ttl in batch) else 0.0
        # A lease that the reply cannot reach in time, if it takes as long as the last, does not hurry the others.
        least = min((one for one in left if one > took), default=max(left))
        # Half of the time that is left, so that there is time to retry; but not less than the reply is likely to take.
        return max(least / 2, min(SLOWER * took, least), LEAST_TIME)

    def _miss(self, state: LeaseState, ttl: float, why: str) -> None:
        """End a lease that the database did not renew, or retry if another transaction has locked its row."""
        state.reply_received()
        if why == "busy" or state.being_left:
            self._retry(state, ttl)
            return
        self.discard(state)
        state.renewal_refused(why)

    def _retry(self, state: LeaseState, ttl: float) -> None:
        state.retry_renewal(self._now() + min(max(ttl / 20, SHORTEST_PAUSE), LONGEST_PAUSE))

    # Release.

    def releasable(self, abandoned: list[LeaseState]) -> list[LeaseState]:
        """Return the leases that the database may still record as held by this client."""
        now = self._now()
        return [
            state
            for state in abandoned
            # A lease that was lost in doubt may still be granted here. Waiters need not wait for its deadline.
            if (state.may_be_granted if state.loss else not state.settled) and now < state.trusted_until
        ]

    def release(self, abandoned: Iterable[LeaseState]) -> Flow[None]:
        """Release the leases that their holders have dropped. A release that fails can be retried."""
        return self._release(list(abandoned), self._give_back)

    def let_go(self, abandoned: list[LeaseState]) -> Flow[None]:
        """Release all leases that are still held, and the abandoned ones, for the last time."""
        # A lease that is tied to the presence was in doubt from the end of its connection on, and may count as lost.
        kept = [state for state in list(self._states) if state.ours and not state.over]
        last = self.releasable([*kept, *abandoned])
        self._states, self._latest = {}, {}
        return self._release(last, self._give_back_at_last)

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
            many = "lease" if len(held) == 1 else "leases"
            self._releases.failed("keep-alive: release of %d %s failed, retrying: %s", len(held), many, error)
            return
        self._releases.worked()
        for index, state in enumerate(held):
            if index not in busy:
                state.release_confirmed()

    def _give_back_at_last(self, grants: list[tuple[str, int]]) -> Flow[set[int]]:
        """Release these grants, and retry for a while where another transaction has locked the row.

        The result is the indexes of the grants that were not released.
        """
        until, left = self._now() + self._give_up_within, [*range(len(grants))]
        while True:
            busy = yield from self._flows.release_all([grants[index] for index in left], self._give_up_within)
            left = [left[position] for position in sorted(busy)]
            if not left or self._now() >= until:
                return {*left}
            yield Sleep(POLL_FIRST)

    def _give_back(self, grants: list[tuple[str, int]]) -> Flow[set[int]]:
        """Release these grants, unless the time that it takes could cost a lease that is held.

        The result is the indexes of the grants that were not released.
        """
        now = self._now()
        kept = [state.trusted_until for state in list(self._states) if state.keep_alive and not state.over]
        to_spare = min(kept, default=math.inf) - now - SLOWER * self._took
        if to_spare < self._took:
            return {*range(len(grants))}
        until_due = self.due_at() - now
        within = max(min(max(until_due, SLOWER * self._took), to_spare, self._give_up_within), LEAST_TIME)
        giving_up = min(max(within * BRISK, (until_due - within) / 2), self._give_up_within)
        return (yield from self._flows.release_all(grants, within, giving_up))


def due_at(state: LeaseState) -> float:
    """Return when a lease is due for renewal; infinite if it is not kept alive or its holder has let go."""
    if not state.keep_alive or state.over:
        return math.inf
    return state.retry_at or state.sent_at + _interval(state)


def _interval(state: LeaseState) -> float:
    """Return the seconds between two renewals: a part of the ttl, or of the present window if that is shorter.

    The ttl may have been raised since the last renewal, by a lease that shares the grant.
    """
    return min(state.ttl, (state.trusted_until - state.sent_at) / TRUST) / RENEWALS_PER_TTL


def _tie(batch: Batch, presence: Presence | None) -> None:
    """Tie each untied lease to the presence. The lease counts as tied from before the request is sent."""
    if presence is not None:
        for state, _ in batch:
            if state.presence is None or state.presence.ended:
                state.tie(presence)
