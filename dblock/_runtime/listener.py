"""The listener: performs the loop of dblock._core.listener_flow over one connection for all waiters of a client.

It starts with the first lease or wait, in a thread of its own, also for an AsyncClient. On a notification it reads,
wakes the waiter and goes straight back to waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import select
import socket
import threading
from collections.abc import Callable
from typing import Any, Protocol

from dblock._core import clock
from dblock._core.acquire import LockFlows
from dblock._core.doubtful_presences import KeepsLeases
from dblock._core.effects import (
    CallLater,
    CallOver,
    CallOverKeepAlive,
    Connect,
    Spawn,
    WaitForInput,
    drive,
)
from dblock._core.listener_failures import ConnectFailed
from dblock._core.listener_flow import ListenerFlow
from dblock._core.waiters import LocalWaiter, LocalWaiters
from dblock._runtime.error_mapping import server_states
from dblock._runtime.forks import call_after_fork, forks_so_far, importing
from dblock._runtime.keepalive_runner import KeepAliveRunner
from dblock._runtime.listener_connection import HANG_UP, ListenerConnection, LoopReader, states_of
from dblock._runtime.target import Target
from dblock._runtime.threads import start_only_thread, start_thread, start_timer
from dblock._runtime.wakeups import ThreadWaiter
from dblock.errors import Unavailable

LONGEST_SLEEP = 3600.0


class Performs(Protocol):
    """A runner, as far as the listener needs one."""

    @property
    def terminated_at(self) -> float:
        """When the server last ended one of its sessions with a message, on the clock of dblock._core.clock."""

    def perform(self, effect: Any) -> Any:
        """Perform one effect of a lock's flow."""

    def shrink(self) -> float:
        """Close connections that have been idle for long. Return the seconds until the next one has."""


class _ListenerBase:
    """The part that does not depend on how the loop waits. The simulation waits in its own way."""

    def __init__(
        self, target: Target, flows: LockFlows, installation: str, keepalive: KeepsLeases, grace: float | None
    ) -> None:
        self._target = target
        self._timings = flows.timings
        self._newest: ListenerConnection | None = None
        """The connection that was opened last. The flow does not know it before its handshake."""
        self.flow = ListenerFlow(flows, keepalive, installation, grace, self._wake)
        self._reset()
        call_after_fork(self)

    @property
    def waiters(self) -> LocalWaiters:
        """The client's waiters."""
        return self.flow.waiters

    def reset_after_fork(self) -> None:
        """Forget the parent's connection and waiters. No loop runs in the child."""
        if self._newest is not None:
            self._newest.drop()
        self.flow.reset_after_fork()
        self._reset()

    def _open(self) -> ListenerConnection:
        """Open a connection of which no other process has a copy: that would keep the presence of a dead process."""
        while True:
            forks_before = forks_so_far()
            connection = self._target.connect()
            with importing:  # no fork in here
                if forks_so_far() == forks_before:
                    flow = self.flow
                    self._newest = ListenerConnection(
                        connection,
                        flow.notified,
                        self._target.needs_transactions,
                        doubted=flow.doubt_connection,
                        look=flow.look,
                        timings=self._timings,
                    )
                    return self._newest
            connection.close()

    def _reset(self) -> None:
        raise NotImplementedError

    def _wake(self) -> None:
        raise NotImplementedError


class Listener(_ListenerBase):
    """Runs the loop in a thread of its own."""

    def __init__(
        self,
        runner: Performs,
        keepalive_runner: KeepAliveRunner,
        *args: Any,
        waiter: Callable[[LocalWaiters, str, str], LocalWaiter] = ThreadWaiter,
        each_turn: Callable[[], object] = lambda: None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`waiter` makes a waiter for the caller, and `each_turn` is called in the thread whenever it wakes up.

        With a loop, notifications are read in that loop, in which their waiters are.
        """
        self._loop = loop
        self._runner = runner
        self._keepalive_runner = keepalive_runner
        self._waiter = waiter
        self._each_turn = each_turn
        super().__init__(*args)
        self.flow.in_doubt.keepalive.ended_at = lambda: keepalive_runner.reserve_ended_at(runner.terminated_at)
        self.flow.in_doubt.keepalive.refused = lambda: keepalive_runner.refused

    def _reset(self) -> None:
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._joined = False
        """Whether a caller has begun to wait. A client that is closed at that moment starts no thread for it."""
        self._timers: list[threading.Timer] = []
        self._untimed: list[tuple[float, Callable[[], None]]] = []
        """What to call and when, where no timer could be started: the loop does it, unless it is busy."""
        self._wake_input: socket.socket | None = None
        """Readable once the loop has been woken."""
        self._wake_output: socket.socket | None = None
        self._last_server: dict[str, str] | None = None
        """The parameters that lead to the server of the last connection."""
        self._looks_every = math.inf
        """Seconds between two looks at the presence's socket, in the current wait."""

    def start(self) -> None:
        """Listen from now on."""
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self.flow.closed:
                    try:
                        self._wake_input, self._wake_output = sockets = socket.socketpair()
                    except OSError as error:
                        raise Unavailable(
                            f"This process could not open a socket: {error}. Retry, and raise the limit of open files "
                            "(ulimit -n) if this happens again."
                        ) from error
                    for one in sockets:
                        one.setblocking(False)
                    try:
                        start_only_thread(self._remember, "dblock listener", self._go, *sockets)
                    except BaseException:
                        if self._thread is None:  # otherwise the thread runs and closes them
                            for one in sockets:
                                one.close()
                        raise
        elif self.flow.connection is None or (self._looks_every == math.inf and self.flow.look_every() < math.inf):
            self._wake()  # it waits without a connection, or without looking at the presence

    def _remember(self, thread: threading.Thread | None) -> None:
        self._thread = thread

    def join_queue(self, name: str, attempt: str) -> LocalWaiter:
        """Register a waiter for the calling thread or task."""
        self._joined = True
        self.start()
        waiter = self._waiter(self.waiters, name, attempt)
        self.waiters.add(waiter)
        return waiter

    @property
    def known(self) -> bool:
        """Whether the database may know of this client."""
        return self._thread is not None or self._joined

    @property
    def running(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None and self._thread.is_alive()

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
            surplus_in = min(self._runner.shrink(), self._keepalive_runner.shrink())
            self._wait(effect.connection, min(effect.seconds, surplus_in))
            return self._each_turn()
        if isinstance(effect, CallOver):
            connection: Any = effect.connection
            with connection.translating():
                return connection.exchange(effect.call, effect.within)
        if isinstance(effect, CallOverKeepAlive):
            return self._keepalive_runner.perform(effect.call)
        if isinstance(effect, Connect):
            try:
                self._ask_last_server()
                opened = self._open()
                self._last_server = opened.leads_to_server
                return opened
            except ConnectFailed:
                raise
            except Exception as error:
                raise ConnectFailed(str(error), server_states(error)) from error
        if isinstance(effect, Spawn):
            start_thread("dblock connecting", drive, effect.flow, self._perform)
            return None
        if isinstance(effect, CallLater):
            return self._call_later(effect.seconds, effect.function)
        return self._runner.perform(effect)

    def _ask_last_server(self) -> None:
        """Raise ConnectFailed if the server that had the last presence, one of several, accepts no connections."""
        if self._last_server is not None and self.flow.in_doubt and not self._target.is_one_host:
            for address, state in states_of(self._last_server, self._target).items():
                raise ConnectFailed(f"the server {address} is {state.value}", {address: state})

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
        in_loop = False
        if connection is not None:
            with connection.translating():
                handles.append(connection.fileno())
            if self._loop is not None and connection.readable_in_loop:
                in_loop = True
                if connection.reader is None:
                    connection.reader = LoopReader(self._loop, connection, self._wake)
        wait = _readable(handles, in_loop)
        until = clock.now() + min(seconds, self._call_untimed())
        while True:
            self._looks_every = self.flow.look_every()
            left = max(until - clock.now(), 0.0)
            ready = wait(min(left, self._looks_every))
            if not ready and left > self._looks_every:
                self.flow.look()
                continue
            if connection is None or handles[1] not in ready:
                break
            # Straight back to waiting, so that the waiter that was woken can run.
            with connection.translating():
                connection.read()
        if handles[0] in ready:
            with contextlib.suppress(BlockingIOError):
                woken.recv(4096)


def _readable(handles: list[int], closed_only: bool) -> Callable[[float], list[int]]:
    """Return a function that waits until one of the handles can be read, or for so many seconds.

    It returns the handles that can be read. With `closed_only`, handles after the first count only once they are
    closed by the other end.
    """
    if not hasattr(select, "poll"):
        return lambda seconds: select.select(handles, [], [], min(seconds, LONGEST_SLEEP))[0]
    poll = select.poll()
    for number, handle in enumerate(handles):
        poll.register(handle, HANG_UP if closed_only and number else select.POLLIN)
    return lambda seconds: [handle for handle, _ in poll.poll(min(seconds, LONGEST_SLEEP) * 1000)]
