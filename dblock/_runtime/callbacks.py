"""Timers that call back when a lease is lost or close to it, at that moment.

A lease reports its own loss whenever it is read; the timers only make the callbacks prompt. A check is cheap and comes
when a deadline comes up. Usually the lease has been renewed by then, and the check sets the next deadline.
"""

from __future__ import annotations

import contextlib
import heapq
import inspect
import itertools
import logging
import math
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from dblock._core import clock
from dblock._core.holds import HeldState
from dblock._core.lease_state import LeaseState
from dblock._core.options import Seconds, brief, check_seconds
from dblock._runtime.forks import call_after_fork
from dblock._runtime.threads import start_only_thread, start_thread
from dblock.errors import InvalidArgument, Unavailable

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger("dblock")

Callback = Callable[[Any], object]
SHORTEST_PAUSE = 0.01
"""Seconds between two checks of a lease in danger, at least."""
FEW = 100
"""How many planned checks may pile up before those of released leases are dropped."""


class Timer(Protocol):
    """A check that is planned."""

    def cancel(self) -> object:
        """Do not check."""


class _Danger:
    """A callback for the moment when fewer than `before` seconds are left."""

    def __init__(self, before: float, callback: Callback) -> None:
        self.before = before
        self.callback = callback
        self.called_for: float | None = None
        """The end of the trust window that the callback was last called for. A renewal moves it."""


class WatchedLease:
    """One lease with callbacks."""

    def __init__(self, state: LeaseState | HeldState) -> None:
        self.state = state
        self.dangers: list[_Danger] = []
        self.timer: Timer | None = None

    def add_danger(self, before: float, callback: Callback) -> None:
        """Call back when fewer than `before` seconds are left."""
        self.dangers.append(_Danger(before, callback))

    def check(self) -> float:
        """Call the callbacks that are due; return the seconds until the next check, infinite for none."""
        state = self.state
        if state.over or state.lost_by_clock():
            return math.inf
        left = state.trusted_until - state.now()
        again = left
        for danger in list(self.dangers):
            if left > danger.before:
                again = min(again, left - danger.before)
                continue
            if danger.called_for != state.trusted_until:
                danger.called_for = state.trusted_until
                danger.callback(left)
            again = min(again, max(danger.before / 2, SHORTEST_PAUSE))
        return max(again, 0.0)


def check_callback(callback: object) -> None:
    """Raise InvalidArgument unless the callback is callable."""
    if not callable(callback):
        raise InvalidArgument(f"A callback must be callable; got {brief(callback)}.")


def check_before(before: Seconds, state: LeaseState | HeldState) -> float:
    """Return the seconds if `on_danger` can warn that long before the end of the trust window."""
    seconds = check_seconds("warning time", before)
    # A lease that is kept alive has two thirds of its ttl left before each renewal. That is no danger.
    most = state.ttl * 0.6 if state.keep_alive else state.ttl
    if not 0 < seconds < most:
        raise InvalidArgument(
            f"The `before` of on_danger is more than 0 s and less than {most:g} s for lock {state.name!r} with a ttl "
            f"of {state.ttl:g} s; got {seconds:g} s."
        )
    return seconds


class CallbackTimer:
    """Check leases in one thread, started with the first callback. Each callback is called in a new thread."""

    def __init__(self) -> None:
        self.reset_after_fork()
        call_after_fork(self)

    def reset_after_fork(self) -> None:
        """Start without a thread and without leases in the child of a fork."""
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._added: queue.SimpleQueue[WatchedLease | Callable[[], object] | None] = queue.SimpleQueue()
        self._closed = False

    def add(self, watched: WatchedLease) -> None:
        """Check this lease from now on. Call it again when the lease gets another callback."""
        self._added.put(watched)
        with self._starting:
            if self._thread is None and not self._closed:
                start_only_thread(self._remember, "dblock callbacks", self._go)

    def _remember(self, thread: threading.Thread | None) -> None:
        self._thread = thread

    def close(self) -> None:
        self._closed = True
        self._added.put(None)

    def call(self, callback: Callback, argument: object) -> None:
        """Call back in a new thread, so that a slow callback delays nothing else.

        If no thread can be started, call back in the thread of the checks, which then come late. A lease still reports
        its own loss in time.
        """
        try:
            start_thread("dblock callback", guarded, callback, argument)
        except Unavailable:
            self._added.put(lambda: guarded(callback, argument))

    def _go(self) -> None:
        checks: list[tuple[float, int, WatchedLease]] = []
        numbers = itertools.count()
        most = FEW
        while not self._closed:
            timeout = min(max(checks[0][0] - clock.now(), 0.0), threading.TIMEOUT_MAX) if checks else None
            due: list[WatchedLease] = []
            with contextlib.suppress(queue.Empty):
                added = self._added.get(timeout=timeout)
                if isinstance(added, WatchedLease):
                    due.append(added)
                elif added is not None:
                    added()
            now = clock.now()
            while checks and checks[0][0] <= now:
                due.append(heapq.heappop(checks)[2])
            for watched in due:
                again = watched.check()
                if again < math.inf:
                    heapq.heappush(checks, (clock.now() + again, next(numbers), watched))
            if len(checks) > most:
                # Drop the checks of leases that were released long before their deadline.
                checks = [check for check in checks if not check[2].state.over]
                heapq.heapify(checks)
                most = max(2 * len(checks), FEW)


class AsyncCallbackTimer:
    """Check leases by timers of the event loop, and call back in it. A coroutine runs as a task."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._tasks: set[asyncio.Task[Any]] = set()

    def in_loop(self, call: Callable[[], object]) -> None:
        """Call this in the event loop: now, or soon if another thread has noticed the event."""
        if threading.get_ident() == self._thread:
            call()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(call)

    def add(self, watched: WatchedLease) -> None:
        """Check this lease from now on. Call it again when the lease gets another callback."""
        if watched.timer is None:
            watched.state.at_end(lambda: self.in_loop(lambda: self._cancel_timer(watched)))
        self.in_loop(lambda: self._check(watched))

    async def wait_and_clear(self, event: asyncio.Event, seconds: float) -> None:
        """Return once the event is set or so many seconds have passed. Clear the event in either case."""
        from dblock._runtime.asyncio_compat import wait_and_clear

        await wait_and_clear(event, seconds)

    def call(self, callback: Callback, argument: object) -> None:
        """Call back in the event loop. A coroutine runs as a task."""
        self.in_loop(lambda: self._call(callback, argument))

    def _call(self, callback: Callback, argument: object) -> None:
        result = guarded(callback, argument)
        if inspect.isawaitable(result):
            task = self._loop.create_task(_awaited(result))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _check(self, watched: WatchedLease) -> None:
        self._cancel_timer(watched)
        again = watched.check()
        if again < math.inf:
            # The event loop's timer runs on another clock and may fire slightly early.
            watched.timer = self._loop.call_later(max(again, 0.001), self._check, watched)

    @staticmethod
    def _cancel_timer(watched: WatchedLease) -> None:
        if watched.timer is not None:
            watched.timer.cancel()


def guarded(callback: Callback, argument: object) -> object:
    """Call back and log what the callback raises, because no caller waits for it."""
    try:
        return callback(argument)
    except Exception:
        logger.exception("lease callback failed")
        return None


async def _awaited(result: Any) -> None:
    try:
        await result
    except Exception:
        logger.exception("lease callback failed")
