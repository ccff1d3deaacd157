"""Flows about what exists already: renew and release grants, keep tickets alive, inspect a lock.

Every one of them names the exact grant or attempt that it is about, so it is safe to send twice.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from dblock._core import clock as clocks
from dblock._core.effects import Call, Flow
from dblock._core.options import interval
from dblock._core.presence import Presence
from dblock._core.replies import (
    Holder,
    QueuePositions,
    Renewal,
    Waiter,
    array,
    decoded,
    items,
    moment,
    new_attempt,
)
from dblock._core.statements import DEFAULT_FENCES, Statements
from dblock._core.timings import Timings, chosen

if TYPE_CHECKING:
    from dblock._core.observation import Observation

BRISK = 1 / 8
"""The part of a renewal's time that each step of giving it up may take, so that there is time for a retry."""


class GrantFlows:
    """The flows of one client, in one schema, apart from acquiring."""

    observation: Observation | None = None
    """The observers of the client; None if it has none."""

    def __init__(
        self,
        schema: str,
        clock: Callable[[], float] = clocks.now,
        uniform: Callable[[float, float], float] = random.uniform,
        new_name: Callable[[], str] = new_attempt,
        fences: str = DEFAULT_FENCES,
        timings: Timings | None = None,
    ) -> None:
        self.statements = Statements(schema, fences)
        self.new_name = new_name
        """Returns a new UUID that cannot be guessed."""
        self.client = new_name()
        """Names this client in the queues. It cannot be guessed."""
        self.presence: Presence | None = None
        """The session by which other clients see that this process is alive, while there is one."""
        self.ended_looks: list[str] = []
        """Attempts that do not wait any more, and whose notes about deadlocks are still in the database."""
        self.clock = clock
        self.uniform = uniform
        self.timings = chosen(timings)
        """The intervals and patiences of the client."""
        self._give_up_within = self.timings.give_up_within

    def renew(
        self, grants: Sequence[tuple[str, int, float]], within: float = math.inf, tie: Presence | None = None
    ) -> Flow[Renewal]:
        """Extend these exact grants, each given by name, token and ttl, in one call, and tie them to a presence."""
        sent_at = self.clock()
        names, tokens, ttls = zip(*grants, strict=True)
        moment, missed, reasons = yield Call(
            self.statements.renew_all,
            (array(names), array(map(str, tokens)), array(map(interval, ttls)), tie.name if tie else None),
            within=within,
            giving_up=min(within * BRISK, self._give_up_within),
        )
        positions = [int(position) - 1 for position in items(missed)]
        return Renewal(sent_at, float(moment), dict(zip(positions, items(reasons), strict=True)))

    def release(self, name: str, token: int, trusted_until: float) -> Flow[bool]:
        """Release this exact grant. The result is False when the grant was lost before."""
        args = (name, str(token))
        (released,) = yield Call(self.statements.release, args, self.statements.release_again)
        if released is None:
            # The first reply was lost. While the trust window is open, only the first attempt can have released it.
            return self.clock() < trusted_until
        return bool(released == "t")

    def release_all(
        self, grants: Sequence[tuple[str, int]], within: float = math.inf, giving_up: float = math.inf
    ) -> Flow[set[int]]:
        """Release these exact grants in one call that waits for no row.

        The result is the positions, from 0, of the grants whose rows another transaction has locked: retry these.
        """
        names, tokens = zip(*grants, strict=True)
        args = (array(names), array(map(str, tokens)))
        (busy,) = yield Call(self.statements.release_all, args, within=within, giving_up=giving_up)
        return {int(position) - 1 for position in items(busy)}

    def withdraw_presence(self, presence: str, grants: Sequence[tuple[str, int]]) -> Flow[set[int]]:
        """Report that this process is alive, though this presence is gone.

        The result is the positions, from 0, of the grants that this process does not hold any more.
        """
        args = (presence, array(name for name, _ in grants), array(str(token) for _, token in grants))
        (lost,) = yield Call(self.statements.withdraw_presence, args, within=self._give_up_within)
        return {int(position) - 1 for position in items(lost)}

    def heartbeat(self, names: Iterable[str], within: float) -> Flow[QueuePositions]:
        """Report that this client's waiters are alive, and ask for their positions in the queues of these locks."""
        row = yield Call(self.statements.heartbeat, (self.client, array(names)), within=within)
        total, firsts, next_checks, watched = row
        return QueuePositions(
            int(total),
            [
                (attempt.replace("-", ""), float(seconds), seen == "t")
                for attempt, seconds, seen in zip(items(firsts), items(next_checks), items(watched), strict=True)
            ],
        )

    def abandon(self, name: str, attempt: str) -> Flow[None]:
        """Give up the attempt's grant and its ticket, for a caller that leaves."""
        yield Call(self.statements.abandon, (name, attempt), within=self._give_up_within)

    def abandon_all(self, names: Sequence[str], attempt: str) -> Flow[None]:
        """Give up the attempt's grants and tickets for all of these locks, in one call."""
        if len(names) == 1:
            yield from self.abandon(names[0], attempt)
        elif names:
            yield Call(self.statements.abandon_all, (array(names), attempt), within=self._give_up_within)

    def abandon_ticket(self, name: str, attempt: str) -> Flow[None]:
        """Give up a ticket without a waiter. A grant of the same attempt stays as it is."""
        yield Call(self.statements.abandon_ticket, (name, attempt), within=self._give_up_within)

    def leave(self) -> Flow[None]:
        """End this client: give up all its tickets, and its presence."""
        name = self.presence.name if self.presence else None
        yield Call(self.statements.leave, (self.client, name), within=self._give_up_within)

    def leave_all_but(self, attempts: Iterable[str]) -> Flow[None]:
        """Give up all tickets of this client except those of these attempts."""
        yield Call(self.statements.leave_but, (self.client, array(attempts)), within=self._give_up_within)

    def listener_is(self, up: bool | None) -> None:
        """Tell the observers whether the listener is connected; None if it needs no connection."""
        if self.observation is not None:
            self.observation.listener_changed(self.client, up)

    def holder(self, name: str) -> Flow[Holder | None]:
        """Ask for the lock's holder. The result is None when the lock is free."""
        row = yield Call(self.statements.holder, (name,))
        if row is None:
            return None
        token, holder, meta, granted_at, expires_at, remaining = row
        return Holder(
            int(token) if token else None,
            holder,
            decoded(meta),
            moment(float(granted_at)),
            moment(float(expires_at)),
            float(remaining),
        )

    def queue(self, name: str) -> Flow[list[Waiter]]:
        """Ask for the lock's waiters, in order."""
        (found,) = yield Call(self.statements.queue, (name,))
        return [Waiter(one["holder"], moment(float(one["since"]))) for one in json.loads(found)]
