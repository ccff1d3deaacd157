"""The keep-alive: performs the loop of dblock._core.keepalive_flow for all leases of a client.

It has a thread of its own, also for an AsyncClient, so that neither a blocked caller nor a blocked event loop can delay
a renewal. dblock._runtime.keepalive_runner chooses the connection.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Callable
from typing import Any

from dblock._core.acquire import LockFlows
from dblock._core.effects import Flow, drive
from dblock._core.keepalive_flow import KeepAliveFlow, Reserve, WaitForWake, Warm
from dblock._core.lease_state import LeaseState
from dblock._core.presence import Presence
from dblock._runtime.forks import call_after_fork
from dblock._runtime.keepalive_runner import KeepAliveRunner
from dblock._runtime.threads import start_only_thread


class _KeepAliveBase:
    """The part that does not depend on how the loop waits. The simulation waits in its own way."""

    def __init__(self, flows: LockFlows) -> None:
        self.flow = KeepAliveFlow(flows)
        self._reset()
        call_after_fork(self)

    def reset_after_fork(self) -> None:
        """Forget the parent's leases. No loop runs in the child."""
        self.flow.reset_after_fork()
        self._reset()

    def _reset(self) -> None:
        raise NotImplementedError

    def _wake(self) -> None:
        raise NotImplementedError

    def discard(self, state: LeaseState) -> None:
        """Stop renewing this lease."""
        self.flow.discard(state)

    def abandon(self, state: LeaseState) -> None:
        """Release a lease that has no owner any more. Safe to call from a finalizer, in any thread."""
        self.flow.abandon(state)
        self._wake()

    def tied_to(self, presence: Presence) -> list[LeaseState]:
        """Return the leases that are tied to this presence and have not ended."""
        return self.flow.tied_to(presence)

    def tie(self) -> None:
        """Tie the leases to the client's new presence at once."""
        self.flow.tie()
        self._wake()

    def latest(self, name: str) -> LeaseState | None:
        """Return the latest lease of this lock, None if none is kept."""
        return self.flow.latest(name)

    def of_lock(self, lock: str) -> list[LeaseState]:
        """Return the leases of a lock that have not ended and still have an owner."""
        return self.flow.of_lock(lock)

    def keeps(self, state: LeaseState) -> bool:
        """Return whether this is a lease of this client that has not ended."""
        return self.flow.keeps(state)

    def keeps_any(self) -> bool:
        """Return whether there is a lease to keep."""
        return self.flow.keeps_any()

    def let_go(self) -> Flow[None]:
        """Release all leases that are still held, and the abandoned ones, at the end of the client."""
        return self.flow.let_go()


class KeepAlive(_KeepAliveBase):
    """Runs the loop in a thread of its own, from the first lease on."""

    def __init__(
        self, runner: KeepAliveRunner, flows: LockFlows, each_turn: Callable[[], object] = lambda: None
    ) -> None:
        """`each_turn` is called in the thread whenever it wakes up."""
        self._runner = runner
        self._each_turn = each_turn
        super().__init__(flows)

    def _reset(self) -> None:
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        # A finalizer may put to it, in the middle of anything.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def add(self, state: LeaseState) -> None:
        """Keep this lease alive from now on."""
        due_sooner = self.flow.add(state)
        if self._thread is None:
            self._start()
        elif due_sooner:
            self._wake()

    def close(self) -> None:
        """Stop renewing."""
        self.flow.closed = True
        self._wake()

    @property
    def running(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def _wake(self) -> None:
        self._wakes.put(None)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self.flow.closed:
                start_only_thread(self._remember, "dblock keep-alive", drive, self.flow.run(), self._perform)

    def _remember(self, thread: threading.Thread | None) -> None:
        self._thread = thread

    def _perform(self, effect: Any) -> Any:
        if isinstance(effect, WaitForWake):
            timeout = None if effect.seconds == math.inf else min(effect.seconds, threading.TIMEOUT_MAX)
            with contextlib.suppress(queue.Empty):
                self._wakes.get(True, timeout)
                while True:
                    self._wakes.get(False)
            return self._each_turn()
        if isinstance(effect, Warm):
            return self._runner.warm()
        if isinstance(effect, Reserve):
            return self._runner.reserve(effect.lasting)
        return self._runner.perform(effect)
