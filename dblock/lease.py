"""Leases: what a client holds after a grant.

Guarantee: `renew` and `release` act on one exact grant. A late release never frees the next holder, and a renewal never
revives a lease that was lost or released. The database decides both. This process only assumes that the lease is held
while its trust window is open, and reports it as lost from the end of the window on.

A lease belongs to the process that acquired it. In a forked child of that process the lease is over, and the end of its
`with` does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from dblock._core.holds import HeldState
from dblock._core.lease_flows import LeaseFlows
from dblock._core.lease_state import LeaseState
from dblock._core.options import Seconds
from dblock._core.replies import moment
from dblock._runtime.callbacks import WatchedLease, check_before, check_callback
from dblock._runtime.lost_events import AsyncLostEvent, LostEvent
from dblock._runtime.runtime import TaskRuntime, ThreadRuntime
from dblock._runtime.user_transaction import UserTransaction
from dblock.errors import ClientClosed, DatabaseError, LeaseLost, NoFencingToken

if TYPE_CHECKING:
    import asyncio

ThreadSelf = TypeVar("ThreadSelf", bound="ThreadLease")
TaskSelf = TypeVar("TaskSelf", bound="TaskLease")


class _LeaseBase:
    """What all kinds of lease share: everything that needs no I/O."""

    _runtime: Any
    _watched: WatchedLease | None = None

    def __init__(self, runtime: ThreadRuntime | TaskRuntime, state: LeaseState | HeldState) -> None:
        self._state = state
        self._grant = state.grant if isinstance(state, HeldState) else state
        self._flows = LeaseFlows(runtime.flows, state)
        state.release_if_forgotten(self, runtime.keepalive.abandon)

    @property
    def name(self) -> str:
        """The lock's name."""
        return self._state.lock

    @property
    def token(self) -> int:
        """The fencing token: higher than the token of every earlier grant of this lock."""
        return self._state.token

    @property
    def expires_at(self) -> datetime:
        """The deadline by the database's clock. Use it in logs, and `remaining()` to decide."""
        return moment(self._state.expires_at)

    def remaining(self) -> float:
        """Return the seconds left in the trust window; 0 if the lease is lost or released."""
        return self._state.remaining()

    @property
    def ttl(self) -> float:
        """The seconds for which each renewal extends the lease."""
        return self._state.ttl

    @property
    def trusted_until(self) -> float:
        """The end of the trust window on the clock of `dblock.monotonic()`. Each renewal moves it.

        Hand it to a process or thread that must stop by itself. It does not say whether the lease was lost or released
        before that moment: `lost` and `remaining()` do.
        """
        return self._state.trusted_until

    def raise_if_lost(self) -> None:
        """Raise LeaseLost, with the reason, unless the lease is inside its trust window at this moment."""
        if not self._state.remaining():
            raise self._state.error()

    def on_lost(self, callback: Callable[[LeaseLost], object]) -> None:
        """Call `callback` with the LeaseLost when the lease is lost, and not when it is released.

        A `Client` calls it in a new thread. An `AsyncClient` calls it in the event loop, and runs a coroutine function
        as a task.
        """
        check_callback(callback)
        state, call = self._state, self._runtime.callbacks.call
        self._runtime.callbacks.add(self._watch())
        state.at_end(lambda: call(callback, state.error()) if state.loss else None)

    def on_danger(self, callback: Callable[[float], object], *, before: Seconds) -> None:
        """Call `callback` with the seconds left when fewer than `before` are left, once for each trust window.

        It is called in the same place as the callback of `on_lost`.
        """
        check_callback(callback)
        call = self._runtime.callbacks.call
        self._runtime.callbacks.add(self._watch())  # first, because this fails where no thread can be started
        self._watch().add_danger(check_before(before, self._state), lambda left: call(callback, left))
        self._runtime.callbacks.add(self._watch())

    def _leave_hold(self) -> bool | None:
        """End one of several leases that share a grant, and return whether it was held.

        Return None if there is no other lease, so that the grant itself must be released.
        """
        return self._state.leave() if isinstance(self._state, HeldState) else None

    def _abandon(self, _: object = None) -> None:
        """Let the keep-alive release the grant in the background."""
        self._runtime.keepalive.abandon(self._grant)

    def _check_end(self, released: bool, error: BaseException | None) -> None:
        """Raise LeaseLost at the end of a body that lost its lease and raises nothing itself."""
        if not released and error is None and self._state.loss is not None:
            raise self._state.error()

    def _watch(self) -> WatchedLease:
        if self._watched is None:
            self._watched = WatchedLease(self._state)
        return self._watched

    def __repr__(self) -> str:
        state = self._state
        left = state.remaining()
        under = f" token {state.token}" if state.token > 0 else ""
        now = f"{left:.1f} s left" if left else f"lost: {state.loss.reason}" if state.loss else "over"
        return f"<{type(self).__name__} {self.name!r}{under}, {now}>"


class ThreadLease(_LeaseBase):
    """A lease for threads."""

    def __init__(self, runtime: ThreadRuntime, state: LeaseState | HeldState) -> None:
        super().__init__(runtime, state)
        self._runtime: ThreadRuntime = runtime

    @property
    def lost(self) -> LostEvent:
        """An event that is set when the lease is lost, with the reason. A thread can wait for it."""
        return LostEvent(self._state, self._runtime.new_event)

    def renew(self, ttl: Seconds | None = None) -> None:
        """Extend the lease to a full ttl from now, its own or a new one. Raise LeaseLost if it is no longer held.

        A shorter ttl does not bring the deadline nearer.
        """
        self._runtime.run(self._flows.renew(ttl))

    def release(self) -> bool:
        """Release the lock. Return False if it was no longer held under this token. After `release_in` return True.

        A lease that shares its grant with others only ends. The last of them releases the lock.
        """
        if self._state is not self._grant:
            left = self._leave_hold()
            if left is not None:
                return left
        try:
            released = self._flows.release_without_asking(self._abandon)
            return self._runtime.run_even_if_closed(self._flows.release()) if released is None else released
        except BaseException:
            # The caller leaves before the release is confirmed. The keep-alive retries it.
            self._abandon()
            raise
        finally:
            self._runtime.keepalive.discard(self._grant)

    def release_in(self, connection: Any) -> None:
        """Release the lock as part of the open transaction on this connection, of psycopg, SQLAlchemy or Django.

        The lock is granted to another client only after the transaction has committed. If it is rolled back, the lease
        is still held, and the next renewal confirms it. A lease that shares its grant with others is proved and ends,
        in both cases. The last of them releases the lock.
        """
        transaction = UserTransaction(connection, self._runtime.schema, self._runtime.installation, wants_async=False)
        self.raise_if_lost()
        with self._state.leaving() as last:
            # One of several leases that share a grant is proved and ends. The last one releases the grant.
            call = "release" if last else "assert_held"
            if not transaction.call(call, self._state.name, self._state.token):
                self._runtime.run(self._flows.learn_why())
                raise self._state.error()

    def assert_held(self, connection: Any) -> None:
        """Prove the lease in the open transaction on this connection, or raise LeaseLost.

        After this call the lock is granted to another client only when that transaction has ended, even if the lease
        expires before.
        """
        self._call("assert_held", connection)

    def bind(self, connection: Any) -> None:
        """Let dblock follow the waits of the open transaction on this connection when it looks for deadlocks.

        A deadlock that leads over a row is found if the transactions on both sides are bound, or have called
        `assert_held`. A binding ends with its transaction, and proves nothing. Raise LeaseLost if the lease is lost.
        """
        self._call("bind_transaction", connection)

    def _call(self, function: str, connection: Any) -> None:
        """Call a function that returns whether the lease is held, in the user's transaction."""
        transaction = UserTransaction(connection, self._runtime.schema, self._runtime.installation, wants_async=False)
        self.raise_if_lost()
        if not transaction.call(function, self._state.name, self._state.token):
            self._runtime.run(self._flows.learn_why())
            raise self._state.error()

    def __enter__(self: ThreadSelf) -> ThreadSelf:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # If the body has released the lease, there is nothing to release and nothing to report.
        if not self._state.settled:
            try:
                self._check_end(self.release(), error)
            except (DatabaseError, ClientClosed):
                # An error of the body matters more than a lock that frees itself at its deadline.
                if error is None:
                    raise


class TaskLease(_LeaseBase):
    """A lease for asyncio."""

    def __init__(self, runtime: TaskRuntime, state: LeaseState | HeldState) -> None:
        super().__init__(runtime, state)
        self._runtime: TaskRuntime = runtime
        self._body: asyncio.Task[Any] | None = None
        self._cancelled_body = False
        self._cancelling = 0
        self._bodies: list[TaskLease] = state.hold.bodies if isinstance(state, HeldState) else []

    @property
    def lost(self) -> AsyncLostEvent:
        """An event that is set when the lease is lost, with the reason. A task can wait for it."""
        return AsyncLostEvent(self._state, self._runtime.callbacks)

    async def renew(self, ttl: Seconds | None = None) -> None:
        """Extend the lease to a full ttl from now, its own or a new one. Raise LeaseLost if it is no longer held.

        A shorter ttl does not bring the deadline nearer.
        """
        await self._runtime.run(self._flows.renew(ttl))

    async def release(self) -> bool:
        """Release the lock. Return False if it was no longer held under this token. After `release_in` return True.

        A lease that shares its grant with others only ends. The last of them releases the lock.
        """
        if self._state is not self._grant:
            left = self._leave_hold()
            if left is not None:
                return left
        try:
            released = self._flows.release_without_asking(self._abandon)
            return await self._runtime.run_even_if_closed(self._flows.release()) if released is None else released
        except BaseException:
            # The caller leaves before the release is confirmed. The keep-alive retries it.
            self._abandon()
            raise
        finally:
            self._runtime.keepalive.discard(self._grant)

    async def release_in(self, connection: Any) -> None:
        """Release the lock as part of the open transaction on this connection, of psycopg or SQLAlchemy.

        The lock is granted to another client only after the transaction has committed. If it is rolled back, the lease
        is still held, and the next renewal confirms it. A lease that shares its grant with others is proved and ends,
        in both cases. The last of them releases the lock.
        """
        transaction = UserTransaction(connection, self._runtime.schema, self._runtime.installation, wants_async=True)
        self.raise_if_lost()
        with self._state.leaving() as last:
            # One of several leases that share a grant is proved and ends. The last one releases the grant.
            call = "release" if last else "assert_held"
            if not await transaction.call_async(call, self._state.name, self._state.token):
                await self._runtime.run(self._flows.learn_why())
                raise self._state.error()

    async def assert_held(self, connection: Any) -> None:
        """Prove the lease in the open transaction on this connection, or raise LeaseLost.

        After this call the lock is granted to another client only when that transaction has ended, even if the lease
        expires before.
        """
        await self._call("assert_held", connection)

    async def bind(self, connection: Any) -> None:
        """Let dblock follow the waits of the open transaction on this connection when it looks for deadlocks.

        A deadlock that leads over a row is found if the transactions on both sides are bound, or have called
        `assert_held`. A binding ends with its transaction, and proves nothing. Raise LeaseLost if the lease is lost.
        """
        await self._call("bind_transaction", connection)

    async def _call(self, function: str, connection: Any) -> None:
        """Call a function that returns whether the lease is held, in the user's transaction."""
        transaction = UserTransaction(connection, self._runtime.schema, self._runtime.installation, wants_async=True)
        self.raise_if_lost()
        if not await transaction.call_async(function, self._state.name, self._state.token):
            await self._runtime.run(self._flows.learn_why())
            raise self._state.error()

    async def __aenter__(self: TaskSelf) -> TaskSelf:
        import asyncio

        body = asyncio.current_task()
        self._watch_body(body, _cancelling(body))
        return self

    def _watch_body(self, body: asyncio.Task[Any] | None, cancelling: int) -> None:
        """Cancel the task that runs the body when the lease is lost."""
        self._body, self._cancelling = body, cancelling
        self._bodies.append(self)
        self._state.at_end(lambda: self._runtime.callbacks.in_loop(self._cancel_body))
        self._runtime.callbacks.add(self._watch())

    def _cancel_body(self) -> None:
        # Of nested bodies that share a grant, the innermost is cancelled first. Each cancels the next one as it ends.
        if self._body is None or self._state.loss is None or self._cancelled_body:
            return
        if [lease for lease in self._bodies if lease._body is self._body][-1:] == [self]:
            self._cancelled_body = True
            self._body.cancel(f"the lease of lock {self.name!r} was lost")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import asyncio

        body, self._body = self._body, None
        if self in self._bodies:
            self._bodies.remove(self)
        if self._cancelled_body and body is not None:
            self._runtime.keepalive.discard(self._grant)
            self._leave_hold()
            try:
                if not await _is_ours_alone(body, error, self._cancelling):
                    # The task was also cancelled for another reason, which comes first.
                    if error is None:
                        raise asyncio.CancelledError
                elif error is None or isinstance(error, asyncio.CancelledError):
                    raise self._state.error() from None
            finally:
                for lease in [lease for lease in self._bodies if lease._body is body][-1:]:
                    lease._cancel_body()
            return
        if not self._state.settled:
            try:
                self._check_end(await self.release(), error)
            except (DatabaseError, ClientClosed):
                if error is None:
                    raise


class Lease(ThreadLease):
    """A lease with a fencing token. As a context manager it releases the lock at the end."""


class AsyncLease(TaskLease):
    """A lease with a fencing token. As an async context manager it releases the lock at the end."""


class _NoToken(_LeaseBase):
    # Not an int, so that a type checker refuses the lease wherever a fencing token is needed.
    @property
    def token(self) -> None:  # type: ignore[override]
        """Raises NoFencingToken."""
        raise NoFencingToken(self.name)


class EfficiencyLease(_NoToken, ThreadLease):
    """A lease without a fencing token. A crash of the database may forget its grant.

    It is for work that is only wasted when it is done twice.
    """


class AsyncEfficiencyLease(_NoToken, TaskLease):
    """A lease without a fencing token. A crash of the database may forget its grant.

    It is for work that is only wasted when it is done twice.
    """


def _cancelling(task: asyncio.Task[Any] | None) -> int:
    """Return how many cancellations of the task are pending. Python 3.10 does not count them."""
    return int(task.cancelling()) if task is not None and hasattr(task, "cancelling") else 0


async def _is_ours_alone(body: asyncio.Task[Any], error: BaseException | None, before: int) -> bool:
    """Undo the cancellation by the lease. Return whether it was the only one since the body was entered."""
    import asyncio

    if not isinstance(error, asyncio.CancelledError):
        # The body has ended for another reason, and the cancellation by the lease has yet to arrive.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
    if not hasattr(body, "uncancel"):
        return True
    return bool(body.uncancel() <= before)
