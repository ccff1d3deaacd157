"""The keep-alive's loop as a flow: renew the leases that are due, and release the abandoned ones.

Which leases are due, and what becomes of them, is decided by dblock._core.renewal. The loop runs over a connection of
its own, so that neither a busy pool nor a blocked caller can delay a renewal.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import deque
from typing import NamedTuple

from dblock._core.acquire import LockFlows
from dblock._core.effects import Flow, Sleep
from dblock._core.lease_state import LeaseState
from dblock._core.presence import Presence
from dblock._core.renewal import LONGEST_PAUSE, SHORTEST_PAUSE, RenewalSchedule
from dblock.errors import ClientClosed, DblockError

logger = logging.getLogger("dblock")


class Warm(NamedTuple):
    """Open the connection before it is needed, so that the first renewal does not have to."""


class Reserve(NamedTuple):
    """Have a session beside that of the presence, as long as leases are tied to a presence.

    The end of both sessions shows that the server ends all its sessions. And if the server accepts no connection when
    one of them ends, the client reports over the other one that it is alive.
    """

    lasting: bool
    """Whether a lease has been held for a while. Until then, a connection that may be busy with a call will do."""


class WaitForWake(NamedTuple):
    """Wait until the loop is woken, but no longer than this many seconds."""

    seconds: float


class KeepAliveFlow:
    """The leases of one client, and the loop that keeps them. Waking the loop is the caller's part."""

    def __init__(self, flows: LockFlows) -> None:
        self._flows = flows
        self.lasting = flows.timings.lasting
        """Seconds after which a lease that is still held counts as lasting, in this client."""
        self.schedule = RenewalSchedule(flows, flows.clock)
        self._now = flows.clock
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Forget all leases: they belong to the parent."""
        self.schedule.forget()
        self._dropped: deque[LeaseState] = deque()
        """Abandoned leases that the loop has not seen yet. A finalizer may append, in the middle of anything."""
        self._ownerless: set[LeaseState] = set()
        """The same leases, until the loop has taken them out of the schedule."""
        self._abandoned: list[LeaseState] = []
        self._collecting = threading.RLock()  # reentrant, because the garbage collector may close a client here
        self._in_use = False
        self._asleep_until = math.inf
        self.closed = False

    def add(self, state: LeaseState) -> bool:
        """Keep this lease from now on. Return whether a loop that sleeps must be woken for it."""
        self._in_use = True
        return self.schedule.add(state) < self._asleep_until

    def discard(self, state: LeaseState) -> None:
        """Stop renewing this lease."""
        self.schedule.discard(state)

    def abandon(self, state: LeaseState) -> None:
        """Release a lease that has no owner any more. Safe to call from a finalizer; wake the loop afterwards."""
        self._ownerless.add(state)
        self._dropped.append(state)

    def tied_to(self, presence: Presence) -> list[LeaseState]:
        """Return the leases that are tied to this presence and have not ended."""
        return self.schedule.tied_to(presence)

    def tie(self) -> None:
        """Tie the leases to the client's new presence at once; wake the loop afterwards."""
        self.schedule.tie()

    def latest(self, name: str) -> LeaseState | None:
        """Return the latest lease of this lock, None if none is kept."""
        return self.schedule.latest(name)

    def of_lock(self, lock: str) -> list[LeaseState]:
        """Return the leases of a lock that have not ended and still have an owner."""
        return [state for state in self.schedule.of_lock(lock) if state not in self._ownerless]

    def keeps(self, state: LeaseState) -> bool:
        """Return whether this is a lease of this client that has not ended."""
        return self.schedule.keeps(state)

    def keeps_any(self) -> bool:
        """Return whether there is a lease to keep."""
        return self.schedule.keeps_any()

    def let_go(self) -> Flow[None]:
        """Release all leases that are still held, and the abandoned ones, at the end of the client."""
        self._collect()
        return self.schedule.let_go(self._abandoned)

    def run(self) -> Flow[None]:
        """Renew and release until the client is closed."""
        with contextlib.suppress(DblockError):
            yield Warm()
            self.schedule.reached()
        while not self.closed:
            try:
                yield WaitForWake(self._seconds_to_sleep())
                if self.closed:
                    return
                self._collect()
                self._abandoned = yield from self.schedule.tick(self._abandoned)
                kept_since = self.schedule.kept_since()
                if self._flows.presence is not None and kept_since < math.inf:
                    yield Reserve(self._now() >= kept_since + self.lasting)
            except ClientClosed:
                return
            except Exception:
                logger.exception("keep-alive: unexpected error, continuing")
                yield Sleep(SHORTEST_PAUSE)

    def _collect(self) -> None:
        # A lease that the loop collects is in no list for a moment, at which a closing client would miss it.
        with self._collecting, contextlib.suppress(IndexError):
            while True:
                state = self._dropped.popleft()
                self.schedule.discard(state)
                self._ownerless.discard(state)
                self._abandoned.append(state)

    def due_at(self) -> float:
        """Return when the loop wakes up; a moment in the past while it is at work. Any thread may ask."""
        return self._asleep_until

    def _seconds_to_sleep(self) -> float:
        """Return how long there is nothing to do.

        A client that acquires and releases locks in quick succession would wake the loop each time, and the loop would
        find nothing to do. So while the client is in use the loop looks once a second, and the client wakes it only for
        leases that are due sooner.
        """
        self._asleep_until = math.inf  # a lease that is added while the next one due is searched wakes the loop
        in_use, self._in_use = self._in_use, False
        now, lasts_at = self._now(), self.schedule.kept_since() + self.lasting
        due = min(
            self.schedule.due_at(),
            now + LONGEST_PAUSE if self._abandoned or in_use else math.inf,
            lasts_at if lasts_at > now and self._flows.presence is not None else math.inf,
        )
        self._asleep_until = due
        return max(due - now, 0.0)
