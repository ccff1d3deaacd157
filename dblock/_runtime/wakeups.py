"""How a waiter sleeps until it is woken: in a thread, or in a task."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from typing import Any

from dblock._core.waiters import LocalWaiter, LocalWaiters


class ThreadWaiter(LocalWaiter):
    """A waiter that blocks its thread."""

    def __init__(self, waiters: LocalWaiters, name: str, attempt: str) -> None:
        super().__init__(waiters, name, attempt)
        # A lock that is held until the waiter is woken. It costs half as much as an Event.
        self._gate = threading.Lock()
        self._gate.acquire()

    def ticket_redeemed(self) -> None:
        self.has_ticket = False
        self._gate.acquire(blocking=False)

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was woken before
            self._gate.release()

    def wait(self, seconds: float) -> None:
        if self._gate.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            self.wake()  # it stays open until the ticket is redeemed


class TaskWaiter(LocalWaiter):
    """A waiter that blocks its task. Any thread may wake it."""

    def __init__(self, waiters: LocalWaiters, name: str, attempt: str) -> None:
        super().__init__(waiters, name, attempt)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._woken = False
        self._future: asyncio.Future[None] | None = None

    def ticket_redeemed(self) -> None:
        self.has_ticket = False
        self._woken = False

    def wake(self) -> None:
        if threading.get_ident() == self._thread:
            self._wake_now()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._wake_now)

    def _wake_now(self) -> None:
        self._woken = True
        _resolve(self._future)

    async def wait(self, seconds: float) -> None:
        if self._woken:
            return
        loop = self._loop
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
