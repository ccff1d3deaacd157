"""Interrupt a traffic process from inside when it receives a signal.

SIGUSR1 makes it fork, whatever its threads are doing. The child has all the objects and must hold nothing. It checks
its parent's leases, tries to renew and release them, acquires a lock with the client that it has inherited, and exits,
at once or a while later. It records what it finds in its own history.

SIGUSR2 cancels a call. In an asynchronous process, a task is cancelled at its n-th await, for any n. In a synchronous
process, an exception is raised in the main thread in the middle of a call, as Ctrl-C does. So one worker runs there.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import signal
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, TypeVar

import dblock
from tests.robustness.history.record import Recorder

T = TypeVar("T")


class Interrupted(BaseException):
    """Raised when a call is cancelled in the middle."""


CANCELLED = (Interrupted, CancelledError)

FORK, CANCEL = signal.SIGUSR1, signal.SIGUSR2

CHILD_TIMEOUT = 30
"""Seconds after which the child of a fork is killed if it has not exited by then."""

CALLS = ("acquire", "try_acquire", "renew", "release", "campaign", "end", "__call__")
"""The calls of an asynchronous client that are cancelled: of locks, leases, elections, terms and schedules."""

AWAITS = (1, 1, 2, 2, 3, 4, 6, 10)
"""At which of its awaits a call is cancelled. Most calls have two or three, and a wait in the queue is one."""


class Interruptions:
    """The interruptions that signals have requested from this process."""

    def __init__(self) -> None:
        self._leases: weakref.WeakSet[Any] = weakref.WeakSet()
        self._inside = False
        """Whether the main thread is in a call."""
        self._pending = 0
        self._rng = random.Random()
        self._children: list[int] = []

    def remember(self, lease: T) -> T:
        """Remember a lease, so that the children can try to use it."""
        if lease is not None:
            self._leases.add(lease)
        return lease

    def interruptible(self, call: Callable[[], T]) -> Callable[[], T]:
        """Return the same call, but one that can be cancelled in the middle."""
        if threading.current_thread() is not threading.main_thread():
            return call

        def guarded() -> T:
            try:
                self._inside = True
                if self._pending:
                    self._pending -= 1
                    signal.setitimer(signal.ITIMER_REAL, self._rng.choice([0.0005, 0.005, 0.05]) * self._rng.random())
                return call()
            finally:
                self._inside = False

        return guarded

    def uninterruptible(self, call: Callable[[], T]) -> Callable[[], T]:
        """Return the same call, but one that is not cancelled although it is made inside a call that can be."""
        if threading.current_thread() is not threading.main_thread():
            return call

        def guarded() -> T:
            inside, self._inside = self._inside, False
            try:
                return call()
            finally:
                self._inside = inside

        return guarded

    def expect_cancellations(self, client: Any, seed: int) -> None:
        """Cancel a call for each signal."""
        self._rng.seed(seed)
        loop: asyncio.AbstractEventLoop | None = getattr(client, "_loop", None)
        if loop is not None and not isinstance(client, dblock.Client):
            loop.call_soon_threadsafe(loop.set_task_factory, self._make_task)
            signal.signal(CANCEL, lambda *_: self._ask())
        else:
            signal.signal(CANCEL, lambda *_: self._raise(ask=True))
            signal.signal(signal.SIGALRM, lambda *_: self._raise(ask=False))

    def _ask(self) -> None:
        self._pending += 1

    def _raise(self, ask: bool) -> None:
        if self._inside:
            raise Interrupted
        if ask:
            self._pending += 1

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        # The tasks of the keep-alive and the listener are left alone: only the client itself cancels them.
        if self._pending and getattr(coroutine, "__name__", "") in CALLS:
            self._pending -= 1
            coroutine = _cancelled_at(coroutine, self._rng.choice(AWAITS))
        return asyncio.Task(coroutine, loop=loop, **options)

    def expect_forks(self, client: Any, name: str, history: Path, seed: int, make: Callable[[Recorder], Any]) -> None:
        """Fork for each signal; `make` makes the child's worker."""
        self._rng.seed(seed)
        numbers = itertools.count()
        alone = threading.Lock()

        def on_signal(*_: object) -> None:
            # A signal in the middle of another fork is ignored: a second fork would wait forever for what the
            # interpreter holds during the first.
            if alone.acquire(blocking=False):
                try:
                    fork()
                finally:
                    alone.release()

        def fork() -> None:
            number = next(numbers)
            leases, moment = list(self._leases), time.monotonic()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads is the point
                child = os.fork()
            if child:
                self._children.append(child)
                return
            code = 1
            try:
                signal.alarm(CHILD_TIMEOUT)
                recorder = Recorder(history.with_name(f"{name}-child{number}.jsonl"))
                _run_child(client, leases, recorder, make(recorder), moment)
                code = 0
            except BaseException as error:
                recorder.record("trouble", name, what=f"in the child of a fork: {type(error).__name__}: {error}")
            finally:
                os._exit(code)

        signal.signal(FORK, on_signal)

    def wait_for_children(self, recorder: Recorder) -> None:
        """Return once every child has exited, and record as trouble each child that did not exit by itself."""
        for child in self._children:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code == -signal.SIGALRM:
                recorder.record("trouble", "child", what=f"the child of a fork did not exit within {CHILD_TIMEOUT} s")
            elif code < 0:
                recorder.record(
                    "trouble", "child", what=f"the child of a fork was ended by {signal.Signals(-code).name}"
                )


def _run_child(client: Any, leases: list[Any], recorder: Recorder, worker: Any, forked_at: float) -> None:
    """Try everything with the parent's leases that a child must not succeed in, then acquire a lock."""
    for lease in leases:
        if lease.remaining():
            recorder.record("trouble", lease.name, what=f"a child believes in its parent's token {lease.token}")
        if isinstance(lease, dblock.Lease):
            try:
                lease.renew()
                recorder.record("trouble", lease.name, what=f"a child renewed its parent's token {lease.token}")
            except dblock.LeaseLost:
                pass
            if lease.release():
                recorder.record("trouble", lease.name, what=f"a child released its parent's token {lease.token}")
    tried = len(leases)
    leases.clear()
    gc.collect()
    if isinstance(client, dblock.Client):
        name = f"mutex {worker.rng.randrange(3)}"
        lease = worker.acquire(name, ttl=1.0, timeout=2.0)
        if lease is not None:
            worker.hold(lease, worker.rng.choice([0.0, 1.5]))
            worker.release(lease)
    else:
        asyncio.run(_acquire_and_release(client._inner, worker))
    recorder.record("child", "", leases=tried, since=forked_at)
    time.sleep(worker.rng.choice([0.0, 0.0, 1.0]))


async def _acquire_and_release(client: dblock.AsyncClient, worker: Any) -> None:
    """Acquire a lock in the child of an asynchronous process, in an event loop of its own."""
    name = f"mutex {worker.rng.randrange(3)}"
    number = worker.recorder.begin("acquire", name, ttl=1.0)
    try:
        lease = await client.lock(name, ttl=1.0).acquire(timeout=2.0)
    except dblock.LockTimeout:
        worker.recorder.end(number, "failed")
        return
    except dblock.DatabaseError as error:
        worker.recorder.end(number, "unknown", error=str(error))
        return
    worker.recorder.end(number, "ok", token=lease.token)
    worker.believes(lease)
    number = worker.recorder.begin("release", name, token=lease.token)
    try:
        worker.recorder.end(number, "ok", freed=await lease.release())
    except dblock.DblockError as error:
        worker.recorder.end(number, "unknown", error=str(error))


async def _cancelled_at(coroutine: Coroutine[Any, Any, T], at: int) -> T:
    """Run a coroutine, and cancel its task at the n-th await."""
    return await _steps(coroutine, at)


@types.coroutine
def _steps(coroutine: Coroutine[Any, Any, T], at: int) -> Generator[Any, Any, T]:
    error: BaseException | None = None
    awaits = 0
    while True:
        try:
            waiting = coroutine.send(None) if error is None else coroutine.throw(error)
        except StopIteration as done:
            result: T = done.value
            return result
        error = None
        awaits += 1
        if awaits == at:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        try:
            yield waiting
        except BaseException as raised:
            error = raised
