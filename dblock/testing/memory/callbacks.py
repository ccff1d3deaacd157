"""The callbacks of leases in memory, called at their moment by the call that moves the test's clock."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from typing import Any

from dblock._runtime.callbacks import WatchedLease, guarded
from dblock.testing.clock import Clock, wait_and_clear
from dblock.testing.memory.client_clock import MemoryClientClock

LEAST_PAUSE = 1e-6
"""Seconds to the next check of a lease at least, so that rounding cannot make the clock stand still."""


class ClockCallbacks:
    """Checks leases by timers of the clock, and calls back in the thread that moves the clock."""

    def __init__(self, clock: Clock, client_clock: MemoryClientClock) -> None:
        self._clock = clock
        self._client_clock = client_clock
        self._watched: set[WatchedLease] = set()

    def add(self, watched: WatchedLease) -> None:
        """Check this lease from now on. Call it again when the lease gets another callback."""
        if watched not in self._watched:
            self._watched.add(watched)
            watched.state.at_end(lambda: self._forget(watched))
        self._check(watched)

    def check_now(self) -> None:
        """Check all leases at this moment of the clock."""
        for watched in list(self._watched):
            self._check(watched)

    def _check(self, watched: WatchedLease) -> None:
        self._cancel_timer(watched)
        again = watched.check()
        if again < math.inf:
            pause = max(again, LEAST_PAUSE, self._client_clock.least_pause)
            watched.timer = self._clock.call_later(pause, self._check, watched)

    def _forget(self, watched: WatchedLease) -> None:
        self._watched.discard(watched)
        self._cancel_timer(watched)

    @staticmethod
    def _cancel_timer(watched: WatchedLease) -> None:
        if watched.timer is not None:
            watched.timer.cancel()

    def call(self, callback: Callable[[Any], object], argument: object) -> None:
        """Call back at this moment of the clock, after what is under way."""
        self._clock.call_later(0.0, guarded, callback, argument)


class TaskCallbacks(ClockCallbacks):
    """Calls back in the event loop. A coroutine runs as a task."""

    def __init__(self, clock: Clock, client_clock: MemoryClientClock) -> None:
        super().__init__(clock, client_clock)
        self._tasks: set[asyncio.Future[Any]] = set()

    def in_loop(self, call: Callable[[], object]) -> None:
        """Call this in the event loop, in which everything happens here."""
        call()

    async def wait_and_clear(self, event: asyncio.Event, seconds: float) -> None:
        """Return once the event is set or so many seconds have passed. Clear the event in either case."""
        await wait_and_clear(self._clock, event, seconds)

    def call(self, callback: Callable[[Any], object], argument: object) -> None:
        self._clock.call_later(0.0, self._call, callback, argument)

    def _call(self, callback: Callable[[Any], object], argument: object) -> None:
        result = guarded(callback, argument)
        if inspect.isawaitable(result):
            task = asyncio.ensure_future(_awaited(result))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _awaited(result: Any) -> None:
    async def wait(_: object) -> None:
        await result

    found: Any = guarded(wait, None)
    await found
