"""The listener: performs the loop of dblock._core.listener_flow over one connection for all waiters of a client.

It starts with the first lease or wait, in a thread or a task of its own. On a notification it reads, wakes the waiter
and goes straight back to waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

from dblock._core import clock
from dblock._core.acquire import LockFlows
from dblock._core.doubtful_presences import KeepsLeases
from dblock._core.effects import (
    CallLater,
    CallOver,
    CallOverKeepAlive,
    Connect,
    Flow,
    Spawn,
    WaitForInput,
    drive,
    drive_async,
)
from dblock._core.listener_flow import ListenerFlow
from dblock._core.waiters import LocalWaiters
from dblock._runtime.asyncio_compat import wait_and_clear
from dblock._runtime.forks import call_after_fork
from dblock._runtime.listener_connection import ListenerConnection, connect_failed
from dblock._runtime.runner import AsyncRunner, Runner
from dblock._runtime.target import Target
from dblock._runtime.threads import start_thread, start_timer
from dblock._runtime.wakeups import TaskWaiter, ThreadWaiter
from dblock.errors import Unavailable

LONGEST_SLEEP = 3600.0


class _ListenerBase:
    """The part that does not depend on how the loop waits."""

    def __init__(
        self, target: Target, flows: LockFlows, installation: str, keepalive: KeepsLeases, grace: float | None
    ) -> None:
        self._target = target
        self.flow = ListenerFlow(flows, keepalive, installation, grace, self._wake)
        self._reset()
        call_after_fork(self)

    @property
    def waiters(self) -> LocalWaiters:
        """The client's waiters."""
        return self.flow.waiters

    def reset_after_fork(self) -> None:
        """Forget the parent's connection and waiters. No loop runs in the child."""
        self.flow.reset_after_fork()
        self._reset()

    def _opened(self, connection: Any) -> ListenerConnection:
        return ListenerConnection(connection, self.flow.notified, self._target.needs_transactions)

    def _reset(self) -> None:
        raise NotImplementedError

    def _wake(self) -> None:
        raise NotImplementedError


class Listener(_ListenerBase):
    """Runs the loop in a thread of its own."""

    def __init__(self, runner: Runner, keepalive_runner: Runner, *args: Any) -> None:
        self._runner = runner
        self._keepalive_runner = keepalive_runner
        super().__init__(*args)

    def _reset(self) -> None:
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._timers: list[threading.Timer] = []
        self._untimed: list[tuple[float, Callable[[], None]]] = []
        """What to call and when, where no timer could be started: the loop does it, unless it is busy."""
        self._wake_input: socket.socket | None = None
        """Readable once the loop has been woken."""
        self._wake_output: socket.socket | None = None

    def start(self) -> None:
        """Listen from now on."""
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self.flow.closed:
                    self._wake_input, self._wake_output = sockets = socket.socketpair()
                    for one in sockets:
                        one.setblocking(False)
                    try:
                        self._thread = start_thread("dblock listener", self._go, *sockets)
                    except BaseException:
                        for one in sockets:
                            one.close()
                        raise

    def join_queue(self, name: str, attempt: str) -> ThreadWaiter:
        """Register a waiter for the calling thread."""
        self.start()
        waiter = ThreadWaiter(self.waiters, name, attempt)
        self.waiters.add(waiter)
        return waiter

    @property
    def started(self) -> bool:
        """Whether the database may know of this client."""
        return self._thread is not None

    def close(self) -> None:
        """Stop listening."""
        self.flow.closed = True
        for timer in self._timers:
            timer.cancel()
        self._wake()

    def join(self, timeout: float) -> None:
        """Wait until the connection is closed."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _wake(self) -> None:
        output = self._wake_output
        if output is not None:
            with contextlib.suppress(OSError):  # full, because the loop has not read earlier wake-ups; or closed
                output.send(b"!")

    def _go(self, *sockets: socket.socket) -> None:
        try:
            drive(self.flow.run(), self._perform)
        finally:
            self.flow.hang_up()
            for one in sockets:
                one.close()

    def _perform(self, effect: Any) -> Any:
        if isinstance(effect, WaitForInput):
            return self._wait(effect.connection, effect.seconds)
        if isinstance(effect, CallOver):
            connection: Any = effect.connection
            with connection.translating():
                return connection.connection.wait(connection.raw.exchange(effect.call, effect.within))
        if isinstance(effect, CallOverKeepAlive):
            return self._keepalive_runner.perform(effect.call)
        if isinstance(effect, Connect):
            try:
                return self._opened(self._target.connect())
            except Exception as error:
                raise connect_failed(error, self._target) from error
        if isinstance(effect, Spawn):
            start_thread("dblock connecting", drive, effect.flow, self._perform)
            return None
        if isinstance(effect, CallLater):
            return self._call_later(effect.seconds, effect.function)
        return self._runner.perform(effect)

    def _call_later(self, seconds: float, function: Callable[[], None]) -> None:
        self._timers = [timer for timer in self._timers if timer.is_alive()]
        try:
            self._timers.append(start_timer("dblock timer", seconds, function))
        except Unavailable:
            self._untimed.append((clock.now() + seconds, function))

    def _call_untimed(self) -> float:
        """Call the functions that are due and got no timer. Return the seconds until the next is due."""
        now = clock.now()
        due = [function for at, function in self._untimed if at <= now]
        self._untimed = [(at, function) for at, function in self._untimed if at > now]
        for function in due:
            function()
        return min((at for at, _ in self._untimed), default=math.inf) - now

    def _wait(self, connection: Any, seconds: float) -> None:
        woken = self._wake_input
        assert woken is not None
        handles = [woken.fileno()]
        if connection is not None:
            with connection.translating():
                handles.append(connection.fileno())
        wait = _readable(handles)
        until = clock.now() + min(seconds, self._call_untimed())
        while True:
            ready = wait(max(until - clock.now(), 0.0))
            if connection is None or handles[1] not in ready:
                break
            # Straight back to waiting, so that the waiter that was woken can run.
            with connection.translating():
                connection.read()
        if handles[0] in ready:
            with contextlib.suppress(BlockingIOError):
                woken.recv(4096)


class AsyncListener(_ListenerBase):
    """Runs the loop in a task of its own."""

    def __init__(self, runner: AsyncRunner, keepalive_runner: AsyncRunner, *args: Any) -> None:
        self._runner = runner
        self._keepalive_runner = keepalive_runner
        super().__init__(*args)

    def _reset(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._woken: asyncio.Event | None = None

    def start(self) -> None:
        """Listen from now on."""
        if (self._task is None or self._task.done()) and not self.flow.closed:
            if self._task is not None:
                # All tasks were cancelled, but the client continues.
                if self._connecting is not None:
                    self._connecting.cancel()
                self.flow.restart()
            self._woken = asyncio.Event()
            self._task = asyncio.get_running_loop().create_task(self._go(), name="dblock listener")

    def join_queue(self, name: str, attempt: str) -> TaskWaiter:
        """Register a waiter for the running task."""
        self.start()
        waiter = TaskWaiter(self.waiters, name, attempt)
        self.waiters.add(waiter)
        return waiter

    @property
    def started(self) -> bool:
        """Whether the database may know of this client."""
        return self._task is not None

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """The tasks that run for it in the event loop."""
        return {task for task in (self._task, self._connecting) if task is not None}

    def close(self) -> None:
        """Stop listening."""
        self.flow.closed = True
        task = self._task
        if task is not None and not task.get_loop().is_closed():
            task.cancel()
            if self._connecting is not None:
                self._connecting.cancel()
        self.flow.hang_up()

    def _wake(self) -> None:
        if self._woken is not None:
            self._woken.set()

    async def _go(self) -> None:
        try:
            await drive_async(self.flow.run(), self._perform)
        finally:
            self.flow.hang_up()

    async def _perform(self, effect: Any) -> Any:
        if isinstance(effect, WaitForInput):
            return await self._wait(effect.connection, effect.seconds)
        if isinstance(effect, CallOver):
            connection: Any = effect.connection
            with connection.translating():
                return await connection.connection.wait(connection.raw.exchange(effect.call, effect.within))
        if isinstance(effect, CallOverKeepAlive):
            return await self._keepalive_runner.perform(effect.call)
        if isinstance(effect, Connect):
            try:
                return self._opened(await self._target.connect_async())
            except Exception as error:
                raise connect_failed(error, self._target) from error
        if isinstance(effect, Spawn):
            self._spawn(effect.flow)
            return None
        if isinstance(effect, CallLater):
            asyncio.get_running_loop().call_later(effect.seconds, effect.function)
            return None
        return await self._runner.perform(effect)

    def _spawn(self, flow: Flow[None]) -> None:
        task = asyncio.get_running_loop().create_task(drive_async(flow, self._perform), name="dblock connecting")
        self._connecting = task
        task.add_done_callback(self._connecting_ended)

    def _connecting_ended(self, task: asyncio.Task[None]) -> None:
        # A task that is cancelled before its first step runs nothing of its flow, so the flow cannot tell.
        if task is self._connecting and task.cancelled():
            self.flow.connect_cancelled()

    async def _wait(self, connection: Any, seconds: float) -> None:
        loop, woken = asyncio.get_running_loop(), self._woken
        assert woken is not None
        readable = False

        def on_readable() -> None:
            nonlocal readable
            readable = True
            woken.set()

        if connection is not None:
            with connection.translating():
                connection.start_reading(loop, on_readable)
        try:
            await wait_and_clear(woken, None if seconds == math.inf else seconds)
        finally:
            if connection is not None:
                connection.stop_reading()
        if readable:
            with connection.translating():
                connection.read()


def _readable(handles: list[int]) -> Callable[[float], list[int]]:
    """Return a function that waits until one of the handles can be read, or for so many seconds.

    It returns the handles that can be read.
    """
    if not hasattr(select, "poll"):
        return lambda seconds: select.select(handles, [], [], min(seconds, LONGEST_SLEEP))[0]
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    return lambda seconds: [handle for handle, _ in poll.poll(min(seconds, LONGEST_SLEEP) * 1000)]
