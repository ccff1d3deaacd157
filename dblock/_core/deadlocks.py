"""Look for deadlocks on behalf of one waiter.

The database decides whether the waits form a cycle, and which of them is the victim. This process only knows which
tokens the waiting thread or task holds. A waiter that holds nothing can be in no cycle, so it asks nothing. Nothing is
asked before a waiter has waited for half a second.

A look that fails ends no wait: the waiter looks again later.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence

from dblock._core.effects import Call, Flow
from dblock._core.grants import GrantFlows
from dblock._core.replies import array
from dblock._core.waiters import LocalWaiter
from dblock.errors import CycleWait, DatabaseError, DeadlockDetected

logger = logging.getLogger("dblock")

LOOKS_PER_SECOND = 200
"""How often the waiters of one client look, all together. If there are more waiters, each looks less often."""

Holds = Callable[[], Sequence[int]]
"""Returns the tokens that the waiting thread or task holds."""


class DeadlockWatch:
    """Decides when one waiter looks for a deadlock, and looks."""

    def __init__(self, flows: GrantFlows, name: str, waiter: LocalWaiter, holds: Holds | None) -> None:
        self._flows = flows
        self.name = name
        """The lock that the waiter waits for."""
        self._waiter = waiter
        self._holds = holds
        self._look_interval = flows.timings.deadlock_look_interval
        self._look_at = math.inf if holds is None else flows.clock() + self._look_interval
        self._has_looked = False

    def seconds_left(self) -> float:
        """Return the seconds until the next look."""
        return self._look_at - self._flows.clock()

    @property
    def due(self) -> bool:
        """Whether the waiter should look now: its time has come, or another member of a cycle has notified it."""
        return self._flows.clock() >= self._look_at or (self._waiter.must_look and self._look_at < math.inf)

    def holds_others(self) -> bool:
        """Return whether the waiting thread or task holds locks."""
        return self._holds is not None and bool(self._holds())

    def look(self) -> Flow[None]:
        """Ask the database for a cycle through the waiter's ticket. Raise DeadlockDetected if it ended this wait."""
        tokens = self._holds() if self._holds is not None else ()
        self._waiter.must_look = False
        if not tokens:
            # What a thread or task holds does not grow while it waits.
            self._look_at = math.inf
            return
        flows, attempt = self._flows, self._waiter.attempt
        ended, flows.ended_looks = flows.ended_looks, []
        args = (self.name, attempt, array(map(str, tokens)), array(ended))
        self._has_looked = True
        try:
            row = yield Call(flows.statements.look_for_deadlock, args, within=flows.timings.give_up_within)
        except DatabaseError as error:
            logger.debug("lock %r: could not look for a deadlock: %s", self.name, error)
        else:
            victim, cycle = row
            if victim == "t":
                self._has_looked = False
                raise DeadlockDetected(self.name, [CycleWait(**wait) for wait in json.loads(cycle)])
            if cycle is not None:
                logger.debug("lock %r: waits in a deadlock, another waiter will give up", self.name)
        self._look_at = flows.clock() + max(self._look_interval, self._waiter.company / LOOKS_PER_SECOND)

    def close(self) -> None:
        """Let the next look delete the note that this waiter has left in the database."""
        if self._has_looked:
            self._flows.ended_looks.append(self._waiter.attempt)
