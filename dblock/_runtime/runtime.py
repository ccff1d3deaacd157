"""The runtime of one client: its pool, keep-alive, listener and callbacks, and how it runs flows.

A runtime opens nothing before the first flow. Then it checks the schema and sets its parts up. Locks and leases hold
the runtime, so it lasts until the last of them is gone. When it is closed or garbage-collected, or when the interpreter
exits, dblock._runtime.shutdown ends its parts.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dblock._core.acquire import LockFlows
from dblock._core.effects import Flow, drive, drive_async
from dblock._core.lease_state import LeaseState, Reason
from dblock._runtime.callbacks import AsyncCallbackTimer, CallbackTimer
from dblock._runtime.forks import call_after_fork, importing
from dblock._runtime.owners import Owner
from dblock._runtime.target import Target
from dblock.errors import ClientClosed, DblockError, Unavailable

if TYPE_CHECKING:
    import asyncio

    from dblock._runtime.keepalive import KeepAlive
    from dblock._runtime.listener import Listener
    from dblock._runtime.runner import AsyncRunner, Install, Runner

T = TypeVar("T")

logger = logging.getLogger("dblock")


class Settings(NamedTuple):
    """Where and how a client reaches its database."""

    target: Target
    listen_target: Target
    schema: str
    pool_size: int
    patience: float
    grace: float | None
    """The grace of the client's presence; None for no presence."""
    install: Install
    """Installs the schema into the embedded server."""


class RuntimeBase:
    """What every runtime does with leases and attempts, however it waits."""

    keepalive: Any
    listener: Any = None
    installation = ""
    new_event: Callable[[], threading.Event] = threading.Event
    """Makes an event that a caller can wait for."""
    background: Callable[[Flow[None]], object] | None = None
    """Runs a flow of calls and sleeps beside the caller. If it is None, the flow gets its own thread or task."""
    has_home = False
    """Whether leases are renewed over the listener's connection."""
    polls = True
    """Whether a wait polls from time to time, because the clock of a wait stops while the machine is suspended."""

    def __init__(self, flows: LockFlows, grace: float | None) -> None:
        self.flows = flows
        self.closed = False
        self.before_close: list[Callable[[], Any]] = []
        """What is called, and awaited by an AsyncClient, before the client is closed: terms whose body still runs."""
        self._grace = grace

    def own_lease(self, name: str) -> LeaseState | None:
        """Return the lease by which this client holds a lock, None if it does not."""
        state = self.keepalive.latest(name) if self.listener is not None else None
        return None if state is None or state.ended or not state.ours or state.lost_by_clock() else state

    def own_leases(self, lock: str, owner: object) -> list[LeaseState]:
        """Return the leases of a shared lock that a thread or task has acquired from this client and still holds."""
        return [state for state in self.client_leases(lock) if state.owner == owner]

    def client_leases(self, lock: str) -> list[LeaseState]:
        """Return the leases of a shared lock that any thread or task has acquired from this client and still holds."""
        states = self.keepalive.of_lock(lock) if self.listener is not None else []
        return [state for state in states if state.ours and not state.lost_by_clock()]

    def held_by(self, owner: Owner) -> list[LeaseState]:
        """Return the leases of this client that a thread or task holds at this moment."""
        return [state for state in owner.leases() if self.keepalive.keeps(state)] if self.listener is not None else []

    def track(self, state: LeaseState) -> None:
        """Hand a lease to the keep-alive, which renews and releases it, and record which thread or task holds it."""
        try:
            presence = state.presence
            if presence is None:
                self.keepalive.add(state)
            else:
                with presence.lock:
                    self.keepalive.add(state)
                    if presence.ended or state.in_doubt:
                        # The presence was lost before the grant's reply came. Whether the lock was taken is not known.
                        state.lose(Reason.UNREACHABLE)
            if self._grace is not None:
                self.listener.start()
            elif self.has_home:
                with contextlib.suppress(Unavailable):  # leases are then renewed over another connection
                    self.listener.start()
        except BaseException as error:
            # A thread could not be started, or Ctrl-C came while it was. The caller gets the error instead of the
            # lease, and gives the grant back.
            self.keepalive.discard(state)
            state.let_go()
            if isinstance(error, Unavailable):
                error.may_be_done = True
            raise
        if self.closed:
            # The client was closed before the grant's reply came. Checked after adding, so that either this thread or
            # the closing one sees the other.
            self.keepalive.discard(state)
            state.let_go()
            raise ClientClosed(may_be_done=True)
        if self.flows.observation is not None:
            self.flows.observation.hold(state)
        if state.owner is not None:
            state.owner.add(state)

    @contextlib.contextmanager
    def deferring(self, name: str, attempt: str, *others: str) -> Iterator[None]:
        """Give up the attempt later if the body, which gives it up, fails. Only an interrupt is raised again."""
        try:
            yield
        except BaseException as error:
            self.defer_cleanup(name, attempt, *others)
            if not isinstance(error, DblockError):
                raise

    def defer_cleanup(self, name: str, attempt: str, *others: str) -> None:
        """Give up the attempt's grants and tickets later, because that was not possible now."""
        if self.listener is not None and not self.closed:
            self.listener.waiters.defer_cleanup(name, attempt, others)
            with contextlib.suppress(Unavailable):  # the next wait or lease starts it
                self.listener.start()


class _OpensLater(RuntimeBase):
    """A runtime that opens its parts when they are first needed."""

    def __init__(self, settings: Settings, flows: LockFlows) -> None:
        super().__init__(flows, settings.grace)
        self.settings = settings
        self.schema = settings.schema
        self.reset_after_fork()
        call_after_fork(self)

    def reset_after_fork(self) -> None:
        raise NotImplementedError

    def _find_grace(self) -> float | None:
        """Return the grace of the client's presence, None if it was not asked for or cannot be kept."""
        from dblock._runtime import socket_probe

        self._grace = self.settings.grace
        if self._grace is not None and socket_probe.poll is None:
            logger.warning(
                "client: this process has no poll() that reports a closed connection, so there is no presence: leases "
                "of a dead process last until they expire."
            )
            self._grace = None
        return self._grace

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("A client, its locks and its leases belong to one process. Make a client in the other one.")


class ThreadRuntime(_OpensLater):
    """Runs flows in the calling thread; keep-alive, listener and callbacks have threads of their own."""

    runner: Runner | None = None
    keepalive: KeepAlive
    listener: Listener
    callbacks: CallbackTimer

    def wait_for(self, event: threading.Event, seconds: float) -> None:
        """Wait until an event of the caller is set, or for so many seconds."""
        event.wait(seconds)

    def reset_after_fork(self) -> None:
        """Forget the parent's thread that may be opening this runtime. The parts forget the rest by themselves."""
        self.opening = threading.Lock()

    def run(self, flow: Flow[T]) -> T:
        """Perform a flow."""
        return (self.runner or self._open()).run(flow)

    def run_even_if_closed(self, flow: Flow[T]) -> T:
        """Perform a flow. Once the client is closed, the calls go over a connection of their own."""
        last: Runner | None = None
        timings = self.flows.timings

        def perform(effect: Any) -> Any:
            nonlocal last
            try:
                return (last or self.runner or self._open()).perform(effect)
            except ClientClosed as closed:
                if last is not None or not self.closed:
                    raise
                effect = effect.sent_again() if closed.may_be_done else effect
            from dblock._runtime.runner import Runner

            last = Runner(self.settings.target, self.schema, 1, timings.give_up_within, prepares=False, timings=timings)
            return last.perform(effect)

        try:
            return drive(flow, perform)
        finally:
            if last is not None:
                last.close()

    def close(self) -> None:
        """Release the leases that are still held, and close the connections."""
        for end in list(self.before_close):
            end()
        with self.opening:
            self.closed = True
            runner, self.runner = self.runner, None
        if runner:
            self.shutdown()

    def _open(self) -> Runner:
        with importing:
            from dblock._runtime.home import Home
            from dblock._runtime.keepalive import KeepAlive
            from dblock._runtime.keepalive_runner import KeepAliveRunner
            from dblock._runtime.listener import Listener
            from dblock._runtime.runner import Runner
            from dblock._runtime.shutdown import ThreadParts, close

        with self.opening:
            if self.closed:
                raise ClientClosed
            if self.runner is None:
                target, listen_target, schema, pool_size, patience, _, install = self.settings
                grace, timings = self._find_grace(), self.flows.timings
                home = Home(self.flows) if listen_target is target else None
                runner = Runner(target, schema, pool_size, patience, home=home, timings=timings)
                try:
                    runner.open(install)
                except BaseException:
                    runner.close()
                    raise
                # The keep-alive's own connection prepares no statements, so its first renewal needs fewer round trips.
                # If the server refuses another connection, the keep-alive borrows one from the pool.
                keepalive_runner = KeepAliveRunner(
                    target, schema, 1, patience, prepares=False, spare=runner, home=home, timings=timings
                )
                self.keepalive = KeepAlive(keepalive_runner, self.flows)
                self.listener = Listener(
                    runner, keepalive_runner, listen_target, self.flows, runner.installation, self.keepalive, grace
                )
                if home is not None:
                    home.set_up(self.listener.flow, self.keepalive.flow.due_at, self.keepalive.keeps_any)
                    self.has_home = True
                runner.join_queue = self.listener.join_queue
                self.callbacks = CallbackTimer()
                parts = ThreadParts(runner, keepalive_runner, self.keepalive, self.listener, self.callbacks, self.flows)
                # Also without close(): when the runtime is garbage-collected, or the interpreter exits.
                self.shutdown = weakref.finalize(self, close, parts)
                self.installation = runner.installation
                self.runner = runner
            return self.runner


class TaskRuntime(_OpensLater):
    """Runs flows in the event loop of its first call; keep-alive and listener have threads of their own."""

    runner: AsyncRunner | None = None
    keepalive: KeepAlive
    listener: Listener
    callbacks: AsyncCallbackTimer
    _loop: asyncio.AbstractEventLoop | None = None
    _opening: asyncio.Lock

    async def wait_for(self, event: asyncio.Event, seconds: float) -> None:
        """Wait until an event of the caller is set, or for so many seconds."""
        import asyncio

        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(event.wait(), seconds)

    def reset_after_fork(self) -> None:
        """Forget the parent's event loop, and with it all that was open."""
        self._loop = self.runner = None

    async def run(self, flow: Flow[T]) -> T:
        """Perform a flow."""
        return await (await self._open()).run(flow)

    async def run_even_if_closed(self, flow: Flow[T]) -> T:
        """Perform a flow. Once the client is closed, the calls go over a connection of their own."""
        last: AsyncRunner | None = None
        timings = self.flows.timings

        async def perform(effect: Any) -> Any:
            nonlocal last
            try:
                return await (last or self.runner or await self._open()).perform(effect)
            except ClientClosed as closed:
                if last is not None or not self.closed:
                    raise
                effect = effect.sent_again() if closed.may_be_done else effect
            from dblock._runtime.runner import AsyncRunner

            last = AsyncRunner(
                self.settings.target, self.schema, 1, timings.give_up_within, prepares=False, timings=timings
            )
            return await last.perform(effect)

        try:
            return await drive_async(flow, perform)
        finally:
            if last is not None:
                last.close()

    async def close(self) -> None:
        """Release the leases that are still held, and close the connections."""
        for end in list(self.before_close):
            await end()
        self.closed = True
        runner, self.runner = self.runner, None
        if runner:
            from dblock._runtime.shutdown import aclose

            try:
                await aclose(self._parts)
            except BaseException:
                self.shutdown()
                raise
            self.shutdown.detach()

    async def _open(self) -> AsyncRunner:
        import asyncio

        from dblock._runtime.asyncio_compat import not_in_asyncio

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise not_in_asyncio() from None
        if self._loop is None:
            self._loop, self._opening = loop, asyncio.Lock()
        if self._loop is not loop:
            raise DblockError("This AsyncClient belongs to another event loop. Make one for each loop.")
        if self.runner is not None:
            return self.runner
        with importing:
            from dblock._runtime.event_loop import LoopCalls, LoopKeepAliveRunner, LoopListenerRunner, LoopWatch
            from dblock._runtime.home import Home
            from dblock._runtime.keepalive import KeepAlive
            from dblock._runtime.listener import Listener
            from dblock._runtime.runner import AsyncRunner
            from dblock._runtime.shutdown import TaskParts, close_without_loop
            from dblock._runtime.wakeups import TaskWaiter

        async with self._opening:
            if self.closed:
                raise ClientClosed
            if self.runner is None:
                target, listen_target, schema, pool_size, patience, _, install = self.settings
                grace, timings = self._find_grace(), self.flows.timings
                home = Home(self.flows) if listen_target is target else None
                runner = AsyncRunner(target, schema, pool_size, patience, home=home, timings=timings)
                try:
                    await runner.open(install)
                except BaseException:
                    runner.close()
                    raise
                watch = LoopWatch(loop)
                calls = LoopCalls(runner, watch)
                threads_target = target.for_threads()
                # Two connections at most: while the loop is blocked, the listener's calls must not delay a renewal. The
                # second one is opened only when both are needed at once.
                keepalive_runner = LoopKeepAliveRunner(
                    threads_target, schema, 2, patience, prepares=False, loop=calls, home=home, timings=timings
                )
                self.keepalive = KeepAlive(keepalive_runner, self.flows, watch.look)
                self.keepalive.flow.lasting = timings.lasting_in_loop
                self.listener = Listener(
                    LoopListenerRunner(calls, keepalive_runner),
                    keepalive_runner,
                    threads_target if listen_target is target else listen_target.for_threads(),
                    self.flows,
                    runner.installation,
                    self.keepalive,
                    grace,
                    waiter=TaskWaiter,
                    each_turn=watch.look,
                    loop=loop,
                )
                if home is not None:
                    home.set_up(self.listener.flow, self.keepalive.flow.due_at, self.keepalive.keeps_any)
                    self.has_home = True
                self.listener.waiters.can_take_turns = watch.runs
                runner.join_queue = self.listener.join_queue
                self.callbacks = AsyncCallbackTimer(loop)
                self._parts = TaskParts(runner, keepalive_runner, self.keepalive, self.listener, self.flows)
                # Also without close(): when the runtime is garbage-collected, or the interpreter exits.
                self.shutdown = weakref.finalize(self, close_without_loop, self._parts)
                if target.closes_with_loop:
                    watch.on_closed = self.shutdown
                if self.closed:
                    self.shutdown()
                    raise ClientClosed
                self.installation = runner.installation
                self.runner = runner
            return self.runner
