"""Waiters in the queues of a database in memory. The database wakes them, and their waits pass on the test's clock."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dblock._core.effects import drive
from dblock._core.waiters import LocalWaiter, LocalWaiters
from dblock.testing.clock import MOST_PARTS, wait_and_clear, waits_forever

if TYPE_CHECKING:
    from dblock.testing.memory.runtime import _MemoryRuntime


class MemoryListener:
    """Stands in for the listener: the database wakes the waiters itself."""

    started = True

    def __init__(self, runtime: _MemoryRuntime, waiter: Callable[[_MemoryRuntime, str, str], LocalWaiter]) -> None:
        self.waiters = LocalWaiters(runtime.flows, self._wake, runtime.flows.clock)
        self.waiters.notifications_work = True
        self._runtime = runtime
        self._waiter = waiter
        self._cleaning = False

    def start(self) -> None:
        """Do nothing: there is no connection to open."""

    def join_queue(self, name: str, attempt: str) -> LocalWaiter:
        """Register a waiter."""
        waiter = self._waiter(self._runtime, name, attempt)
        self.waiters.add(waiter)
        return waiter

    def _wake(self) -> None:
        """Give up deferred attempts in a moment, and again each second while that fails."""
        if not self._cleaning and self.waiters.cleanup_due_at() < math.inf:
            self._cleaning = True
            self._runtime.clock.call_later(self._runtime.flows.timings.heartbeat_interval, self._clean)

    def _clean(self) -> None:
        self._cleaning = False
        drive(self.waiters.run_cleanup(), self._runtime.database.call)
        self._wake()


class ClockWaiter(LocalWaiter):
    """A waiter on the test's clock."""

    def __init__(self, runtime: _MemoryRuntime, name: str, attempt: str) -> None:
        super().__init__(runtime.listener.waiters, name, attempt)
        self._database = runtime.database
        self._woken = False
        self._waits = 0

    def ticket_redeemed(self) -> None:
        self.has_ticket = self._woken = False

    def wake(self) -> None:
        self._woken = True

    def _watch(self) -> None:
        for name in (self.name, *self.others):
            self._database.watch(name)

    def wait(self, seconds: float) -> Any:
        self._watch()
        self._waits += 1
        if self._waits > MOST_PARTS:
            raise waits_forever()  # it holds other locks, and has looked for a deadlock each half second
        self._database.clock.wait(lambda: self._woken, seconds)


class TaskWaiter(ClockWaiter):
    """A waiter on the test's clock that blocks its task."""

    def __init__(self, runtime: _MemoryRuntime, name: str, attempt: str) -> None:
        super().__init__(runtime, name, attempt)
        self._event = asyncio.Event()

    def ticket_redeemed(self) -> None:
        super().ticket_redeemed()
        self._event.clear()

    def wake(self) -> None:
        super().wake()
        self._event.set()

    async def wait(self, seconds: float) -> None:
        if not self._woken:
            self._watch()
            await wait_and_clear(self._database.clock, self._event, seconds)
