"""The runtimes of the memory clients: how they run flows and keep leases alive, on the test's clock.

They stand in for `ThreadRuntime` and `TaskRuntime`. No thread is started, and nothing sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from dblock._core.acquire import LockFlows
from dblock._core.effects import Call, Flow, JoinQueue, Sleep, Wait, drive
from dblock._core.keepalive_flow import WaitForWake, Warm
from dblock._core.lease_state import LeaseState
from dblock._core.waiters import LocalWaiter
from dblock._runtime.asyncio_compat import not_in_asyncio
from dblock._runtime.keepalive import _KeepAliveBase
from dblock._runtime.runtime import RuntimeBase
from dblock.errors import ClientClosed, DblockError
from dblock.testing.clock import ClockEvent, Timer, wait_and_clear
from dblock.testing.memory.background import Background
from dblock.testing.memory.callbacks import ClockCallbacks, TaskCallbacks
from dblock.testing.memory.client_clock import MemoryClientClock
from dblock.testing.memory.database import MemoryDatabase, NotInMemory
from dblock.testing.memory.waiters import ClockWaiter, MemoryListener, TaskWaiter

T = TypeVar("T")


class _KeepAlive(_KeepAliveBase):
    """Runs the loop of the keep-alive from one event of the clock to the next."""

    def __init__(self, database: MemoryDatabase, clock: MemoryClientClock, flows: LockFlows) -> None:
        self._database = database
        self._clock = clock
        super().__init__(flows)
        self._schedule = self.flow.schedule
        self.discard = self._schedule.discard  # type: ignore[method-assign]  # two calls less for each release

    def _reset(self) -> None:
        self._loop: Flow[None] | None = None
        self._timer: Timer | None = None
        self._has_new = False
        """Whether leases were added since the clock last moved."""

    def add(self, state: LeaseState) -> None:
        """Keep this lease alive from now on. Whether the loop must be woken for it is asked before the clock moves."""
        self._schedule.add(state)
        if not self._has_new:
            self._has_new = True
            self._database.clock.call_before_next(self._plan)

    def _plan(self) -> None:
        self._has_new = False
        due_sooner = [self.flow.add(state) for state in self._schedule.held()]
        if self._loop is None:
            self._loop = self.flow.run()
            self._continue()
        elif any(due_sooner):
            self._wake()

    def abandon(self, state: LeaseState) -> None:
        """Release a lease that has no owner any more. Safe to call from a finalizer, in any thread."""
        self.flow.abandon(state)
        self._database.clock.call_soon(self._wake)

    def check_now(self) -> None:
        """Renew what is due at this moment of the clock."""
        self._wake()

    def close(self) -> None:
        """Stop renewing."""
        self.flow.closed = True
        self._wake_at(math.inf)

    def _wake(self) -> None:
        if self._loop is not None and not self.flow.closed:
            self._wake_at(0.0)

    def _wake_at(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._database.clock.call_later(seconds, self._continue) if seconds < math.inf else None

    def _continue(self) -> None:
        """Run the loop until it waits."""
        loop = self._loop
        assert loop is not None
        with contextlib.suppress(StopIteration):
            effect = loop.send(None)
            while not isinstance(effect, (WaitForWake, Sleep)):
                try:
                    row = None if isinstance(effect, Warm) else self._database.call(effect)
                except DblockError as error:
                    effect = loop.throw(error)
                else:
                    effect = loop.send(row)
            self._wake_at(max(effect.seconds, self._clock.least_pause))


class _MemoryRuntime(RuntimeBase):
    """What both memory runtimes share."""

    schema = "dblock"
    polls = False
    keepalive: _KeepAlive
    listener: MemoryListener
    callbacks: ClockCallbacks

    def __init__(
        self,
        database: MemoryDatabase,
        flows: LockFlows,
        waiter: Callable[[_MemoryRuntime, str, str], LocalWaiter],
    ) -> None:
        super().__init__(flows, grace=None)
        self.database = database
        self.clock = database.clock
        client_clock = flows.clock
        assert isinstance(client_clock, MemoryClientClock)
        self.client_clock = client_clock
        self.keepalive = _KeepAlive(database, client_clock, flows)
        self.listener = MemoryListener(self, waiter)
        self.new_event = lambda: ClockEvent(self.clock)
        self.background = Background(client_clock, self.perform)
        database.connect(flows.client, self.listener.waiters)

    @property
    def installation(self) -> str:  # type: ignore[override]
        """Raise NotInMemory: only a proof in the user's transaction needs to know the installation."""
        raise NotInMemory("transactions, which assert_held, bind, release_in and fence need")

    def _perform_even_if_closed(self, effect: Any) -> Any:
        try:
            return self.perform(effect)
        except ClientClosed:
            return self.database.call(effect)

    def perform(self, effect: Any) -> Any:
        """Perform one effect of a lock's flow that does not wait."""
        if effect.__class__ is Call:
            if self.closed:
                raise ClientClosed
            return self.database.call(effect)
        assert isinstance(effect, JoinQueue)
        return self.listener.join_queue(effect.name, effect.attempt)

    def check_now(self) -> None:
        """Check all leases at this moment, because the clock of this client has resumed."""
        self.callbacks.check_now()
        self.keepalive.check_now()

    def _shut_down(self) -> None:
        """Release the leases that are still held, and give up the tickets."""
        if not self.closed:
            self.closed = True
            self.keepalive.close()
            self.listener.waiters.wake_all()  # each waiter asks again, and gets ClientClosed
            with contextlib.suppress(DblockError):
                drive(self.keepalive.let_go(), self.database.call)
                drive(self.flows.leave(), self.database.call)
            self.database.disconnect(self.flows.client)

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("A client, its locks and its leases belong to one process. Make a client in the other one.")


class MemoryRuntime(_MemoryRuntime):
    """Runs flows in the calling thread. A wait moves the clock."""

    def __init__(self, database: MemoryDatabase, flows: LockFlows) -> None:
        super().__init__(database, flows, ClockWaiter)
        self.callbacks = ClockCallbacks(self.clock, self.client_clock)

    def run(self, flow: Flow[T]) -> T:
        """Perform a flow."""
        return self._run(flow, self.perform)

    def run_even_if_closed(self, flow: Flow[T]) -> T:
        """Perform a flow even if the client has been closed."""
        return self._run(flow, self._perform_even_if_closed)

    def perform(self, effect: Any) -> Any:
        if effect.__class__ is Call and not self.closed:
            return self.database.call(effect)
        if effect.__class__ is Wait:
            return effect.waiter.wait(effect.seconds)
        if effect.__class__ is Sleep:
            return self.clock.wait(lambda: False, effect.seconds)
        return super().perform(effect)

    def _run(self, flow: Flow[T], perform: Callable[[Any], Any]) -> T:
        clock = self.clock
        with clock.lock:
            if clock.is_due:
                clock.run_due()
            try:
                return drive(flow, perform)
            finally:
                if clock.is_due:
                    clock.run_due()
                if not clock.auto:
                    clock.changed.notify_all()

    def wait_for(self, event: threading.Event, seconds: float) -> None:
        """Wait until an event of the caller is set, or for so many seconds of the clock."""
        if isinstance(event, ClockEvent):
            event.wait(seconds)  # raises if it waits too often
        else:
            self.clock.wait(event.is_set, seconds)

    def close(self) -> None:
        """Release the leases that are still held."""
        for end in list(self.before_close):
            end()
        with self.clock.changed:
            self._shut_down()
            self.clock.run_due()
            self.clock.changed.notify_all()


class AsyncMemoryRuntime(_MemoryRuntime):
    """Runs flows in the running event loop. A task waits until another one releases the lock or moves the clock."""

    _loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, database: MemoryDatabase, flows: LockFlows) -> None:
        super().__init__(database, flows, TaskWaiter)
        self.callbacks: TaskCallbacks = TaskCallbacks(self.clock, self.client_clock)

    @property
    def runs_here(self) -> bool:
        """Whether the client belongs to the running event loop: that of its first call."""
        return self._loop is not None and self._loop is asyncio._get_running_loop()

    async def run(self, flow: Flow[T]) -> T:
        """Perform a flow."""
        self._check_loop()
        return await self._run(flow, self.perform)

    async def run_even_if_closed(self, flow: Flow[T]) -> T:
        """Perform a flow even if the client has been closed."""
        self._check_loop()
        return await self._run(flow, self._perform_even_if_closed)

    def _check_loop(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise not_in_asyncio() from None
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise DblockError("This AsyncMemoryClient belongs to another event loop. Make one for each loop.")

    async def _run(self, flow: Flow[T], perform: Callable[[Any], Any]) -> T:
        self.clock.run_due()
        try:
            effect = next(flow)
            while True:
                try:
                    if effect.__class__ is Wait:
                        result = await effect.waiter.wait(effect.seconds)
                    elif effect.__class__ is Sleep:
                        await wait_and_clear(self.clock, asyncio.Event(), effect.seconds)
                        result = None
                    else:
                        result = perform(effect)
                except BaseException as error:
                    effect = flow.throw(error)
                else:
                    effect = flow.send(result)
        except StopIteration as done:
            value: T = done.value
            return value
        finally:
            self.clock.run_due()

    async def wait_for(self, event: asyncio.Event, seconds: float) -> None:
        """Wait until an event of the caller is set, or for so many seconds of the clock."""
        over = asyncio.Event()
        waiting = asyncio.ensure_future(event.wait())
        waiting.add_done_callback(lambda _: over.set())
        try:
            await wait_and_clear(self.clock, over, seconds)
        finally:
            waiting.cancel()

    async def close(self) -> None:
        """Release the leases that are still held."""
        for end in list(self.before_close):
            await self.clock.moving(end())  # a body that does not return keeps its term until the lease ends
        self._shut_down()
        self.clock.run_due()
