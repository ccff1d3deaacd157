"""The watch: calls back when a lease is lost, or comes close to it, at the moment that it happens.

Nobody needs it to know whether a lease is lost; a hold tells by itself. It serves those who want to be told. Looking
is cheap and is done when a deadline comes up: usually the lease has been renewed since, and there is a new one.
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
from typing import TYPE_CHECKING, Any

from dblock._core import clock
from dblock._core.lease_state import LeaseState
from dblock._core.options import Seconds, brief, check_seconds
from dblock._runtime.forks import call_after_fork
from dblock.errors import InvalidArgument

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger("dblock")

Callback = Callable[[Any], object]
SHORTEST_LOOK = 0.01
FEW = 100


class _Danger:
    """A wish to be told when less than so many seconds are left."""

    def __init__(self, before: float, tell: Callback) -> None:
        self.before = before
        self.tell = tell
        self.told_of: float | None = None
        """The end that it was told of; a renewal moves it, and is worth telling of anew."""


class WatchedLease:
    """One lease that somebody wants to be told about."""

    def __init__(self, state: LeaseState) -> None:
        self.state = state
        self.dangers: list[_Danger] = []
        self.timer: asyncio.TimerHandle | None = None

    def add_danger(self, before: float, tell: Callback) -> None:
        """Tell when less than so many seconds are left."""
        self.dangers.append(_Danger(before, tell))

    def look(self) -> float:
        """Tell those who want to be told now; return the seconds until the next look, infinite for none."""
        state = self.state
        if state.over or state.lost_by_clock():
            return math.inf
        left = state.trusted_until - clock.now()
        again = left
        for danger in list(self.dangers):
            if left > danger.before:
                again = min(again, left - danger.before)
                continue
            if danger.told_of != state.trusted_until:
                danger.told_of = state.trusted_until
                danger.tell(left)
            again = min(again, max(danger.before / 2, SHORTEST_LOOK))
        return max(again, 0.0)


def check_callback(callback: object) -> None:
    """Raise unless it can be called."""
    if not callable(callback):
        raise InvalidArgument(f"A callback is something that can be called; got {brief(callback)}.")


def check_before(before: Seconds, state: LeaseState) -> float:
    """Return the seconds if a warning can come that long before the end."""
    seconds = check_seconds("warning time", before)
    # A lease that is kept alive comes down to two thirds of its time before each renewal, and that is no danger.
    most = state.ttl * 0.6 if state.keep_alive else state.ttl
    if not 0 < seconds < most:
        raise InvalidArgument(
            f"A warning for lock {state.name!r} with a ttl of {state.ttl:g} s comes more than 0 s and less than "
            f"{most:g} s before the end; got {seconds:g} s."
        )
    return seconds


class CallbackTimer:
    """Looks in a thread of its own, from the first wish on; calls back in a thread for each call."""

    def __init__(self) -> None:
        self.reset_after_fork()
        call_after_fork(self)

    def reset_after_fork(self) -> None:
        """In the child of a fork there is no thread, and no lease of ours."""
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._added: queue.SimpleQueue[WatchedLease | None] = queue.SimpleQueue()
        self._closed = False

    def add(self, watched: WatchedLease) -> None:
        """Look after this one, from now on; also to be called when it has got another wish."""
        self._added.put(watched)
        with self._starting:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._go, name="dblock watch", daemon=True)
                self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._added.put(None)

    @staticmethod
    def call(callback: Callback, argument: object) -> None:
        """Call back, apart from everything else: it may take as long as it likes."""
        threading.Thread(target=guarded, args=(callback, argument), name="dblock callback", daemon=True).start()

    def _go(self) -> None:
        looks: list[tuple[float, int, WatchedLease]] = []
        numbers = itertools.count()
        most = FEW
        while not self._closed:
            timeout = min(max(looks[0][0] - clock.now(), 0.0), threading.TIMEOUT_MAX) if looks else None
            due: list[WatchedLease] = []
            with contextlib.suppress(queue.Empty):
                added = self._added.get(timeout=timeout)
                if added is not None:
                    due.append(added)
            now = clock.now()
            while looks and looks[0][0] <= now:
                due.append(heapq.heappop(looks)[2])
            for watched in due:
                again = watched.look()
                if again < math.inf:
                    heapq.heappush(looks, (clock.now() + again, next(numbers), watched))
            if len(looks) > most:
                # Those of leases that were released long before their time.
                looks = [look for look in looks if not look[2].state.over]
                heapq.heapify(looks)
                most = max(2 * len(looks), FEW)


class AsyncCallbackTimer:
    """Looks by timers of the event loop, and calls back in it. A coroutine function is run as a task."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._tasks: set[asyncio.Task[Any]] = set()

    def in_loop(self, call: Callable[[], object]) -> None:
        """Call this in the event loop: now, or soon if a worker thread has noticed what there is to tell."""
        if threading.get_ident() == self._thread:
            call()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(call)

    def add(self, watched: WatchedLease) -> None:
        """Look after this one, from now on; also to be called when it has got another wish."""
        if watched.timer is None:
            watched.state.at_end(lambda: self.in_loop(lambda: self._rest(watched)))
        self.in_loop(lambda: self._look(watched))

    def call(self, callback: Callback, argument: object) -> None:
        """Call back; a coroutine runs on as a task."""
        self.in_loop(lambda: self._call(callback, argument))

    def _call(self, callback: Callback, argument: object) -> None:
        result = guarded(callback, argument)
        if inspect.isawaitable(result):
            task = self._loop.create_task(_awaited(result))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _look(self, watched: WatchedLease) -> None:
        self._rest(watched)
        again = watched.look()
        if again < math.inf:
            # A timer may ring a hair too early by another clock.
            watched.timer = self._loop.call_later(max(again, 0.001), self._look, watched)

    @staticmethod
    def _rest(watched: WatchedLease) -> None:
        if watched.timer is not None:
            watched.timer.cancel()


def guarded(callback: Callback, argument: object) -> object:
    """Call back; what the callback raises is logged, for nobody waits for it."""
    try:
        return callback(argument)
    except Exception:
        logger.exception("a callback of a lease failed")
        return None


async def _awaited(result: Any) -> None:
    try:
        await result
    except Exception:
        logger.exception("a callback of a lease failed")
