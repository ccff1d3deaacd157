"""How a waiter sleeps until it is woken: in a thread, or in a task."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from typing import Any

from dblock._core.waiters import LocalWaiter, LocalWaiters


class ThreadWaiter(LocalWaiter):
    """A place that a thread waits at."""

    def __init__(self, line: LocalWaiters, name: str, attempt: str) -> None:
        super().__init__(line, name, attempt)
        # Closed until it is woken. Half the cost of an Event.
        self._gate = threading.Lock()
        self._gate.acquire()

    def ticket_redeemed(self) -> None:
        """Take note that its ticket is about to be redeemed or given up."""
        self.has_ticket = False
        self._gate.acquire(blocking=False)

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # open already
            self._gate.release()

    def wait(self, seconds: float) -> None:
        """Wait until woken, or for that long."""
        if self._gate.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            self.wake()  # it stays open until the waiter stands up


class TaskWaiter(LocalWaiter):
    """A place that a task waits at."""

    def __init__(self, line: LocalWaiters, name: str, attempt: str) -> None:
        super().__init__(line, name, attempt)
        self._woken = False
        self._future: asyncio.Future[None] | None = None

    def ticket_redeemed(self) -> None:
        """Take note that its ticket is about to be redeemed or given up."""
        self.has_ticket = False
        self._woken = False

    def wake(self) -> None:
        self._woken = True
        _resolve(self._future)

    async def wait(self, seconds: float) -> None:
        """Wait until woken, or for that long."""
        if self._woken:
            return
        loop = asyncio.get_running_loop()
        self._future = loop.create_future()
        timer = loop.call_later(seconds, _resolve, self._future) if seconds < math.inf else None
        try:
            await self._future
        finally:
            self._future = None
            if timer is not None:
                timer.cancel()


def _resolve(future: asyncio.Future[Any] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
