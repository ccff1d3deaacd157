"""A lease: what a client has in hand after a grant.

Guarantee: `renew` and `release` act on this exact grant and on no other. A late release never frees the next holder; a
renewal never revives a lease that was lost or released. The database decides both; this process only
remembers how long it may believe in the lease without asking, and says that it is lost as soon as it may not.

A lease belongs to the process that acquired it. In a child of that process it is over, and leaving its `with` does
nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from dblock._core.acquire import POLL_FIRST, TRUST, LockFlows
from dblock._core.effects import Flow, Sleep
from dblock._core.lease_state import LeaseState, Reason
from dblock._core.options import Seconds, check_ttl
from dblock._core.replies import moment
from dblock._runtime.backing import TaskBacking, ThreadBacking
from dblock._runtime.callbacks import WatchedLease, check_before, check_callback
from dblock._runtime.lost_event import AsyncLostEvent, LostEvent
from dblock._runtime.user_transaction import UserTransaction
from dblock.errors import ClientClosed, DatabaseError, LeaseLost, NoFencingToken

if TYPE_CHECKING:
    import asyncio

ThreadSelf = TypeVar("ThreadSelf", bound="ThreadLease")
TaskSelf = TypeVar("TaskSelf", bound="TaskLease")


class _LeaseBase:
    """What every kind of lease knows and computes."""

    _flows: LockFlows
    _watched: WatchedLease | None = None

    def __init__(self, state: LeaseState, abandon: Callable[[LeaseState], object]) -> None:
        self._state = state
        state.release_if_forgotten(self, abandon)

    @property
    def name(self) -> str:
        """The lock's name."""
        return self._state.name

    @property
    def token(self) -> int:
        """The fencing token: higher than that of every earlier grant of this lock."""
        return self._state.token

    @property
    def expires_at(self) -> datetime:
        """The deadline by the database's clock. For logs; use `remaining()` to decide anything."""
        return moment(self._state.expires_at)

    def remaining(self) -> float:
        """Return the seconds for which this lease may still be believed without asking; 0 when it is over."""
        return self._state.remaining()

    def raise_if_lost(self) -> None:
        """Raise LeaseLost, with the reason, unless this lease may be believed at this moment."""
        if not self._state.remaining():
            raise self._state.error()

    def _renewing(self, ttl: Seconds | None) -> Flow[None]:
        state = self._state
        seconds = state.ttl if ttl is None else check_ttl(self.name, ttl)
        self._raise_if_gone()
        while True:
            answer = yield from self._flows.renew([(state.name, state.token, seconds)])
            why = answer.missed.get(0)
            if why != "busy":
                break
            # Another transaction is at work on the row, perhaps the user's own. Ask for as long as we may believe.
            yield Sleep(POLL_FIRST)
            self._raise_if_gone()
        if why is not None:
            state.renewal_refused(why)
        elif state.renewal_confirmed(answer.sent_at, answer.sent_at + seconds * TRUST, answer.moment + seconds):
            state.change_ttl(seconds)
        self.raise_if_lost()

    def _learning_why(self) -> Flow[None]:
        """Take note of the loss of a lease that the database does not know to be held, and of the reason."""
        state = self._state
        state.leave_refused()
        with contextlib.suppress(DatabaseError):
            answer = yield from self._flows.renew([(state.name, state.token, state.ttl)])
            why = answer.missed.get(0)
            if why is not None and why != "busy":
                state.renewal_refused(why)

    def _raise_if_gone(self) -> None:
        """Raise unless the lease can be renewed; one whose release may have been rolled back can."""
        state = self._state
        if state.over or not state.ours or state.lost_by_clock():
            raise state.error()

    def _releasing(self) -> Flow[bool]:
        state = self._state
        if self._finished:
            return False
        # In doubt somebody may have taken it before; that a second sending finds nothing to free proves nothing then.
        doubtful = state.in_doubt
        state.let_go()
        believed_until = -math.inf if doubtful else state.trusted_until
        released = yield from self._flows.release(state.name, state.token, believed_until)
        if released or state.settled:
            state.release_confirmed()
            return released
        # It cannot be renewed, and the database says why. If it can after all, a renewal had come in between.
        why: str | None = "superseded"
        with contextlib.suppress(DatabaseError):
            answer = yield from self._flows.renew([(state.name, state.token, state.ttl)])
            why = answer.missed.get(0)
            if why in (None, "busy", "forced"):
                released = yield from self._flows.release(state.name, state.token, believed_until)
        if released:
            state.release_confirmed()
        else:
            freed = Reason.UNREACHABLE if doubtful else Reason.FORCED
            known = {"expired": Reason.EXPIRED, "released": freed, "forced": Reason.FORCED}
            state.release_refused(known.get(why or "", Reason.SUPERSEDED))
        return released

    @property
    def _finished(self) -> bool:
        """Whether there is nothing for this process to give back: it was given back, or lost, or is not ours."""
        state = self._state
        return state.settled or not state.ours or (not state.over and state.lost_by_clock() is not None)

    @property
    def _may_be_held(self) -> bool:
        """Whether it was given up in doubt, or on demand, and the database may hold it for us still.

        Nobody need wait for its end then.
        """
        state = self._state
        return state.ours and state.may_be_granted

    def _check_end(self, released: bool, error: BaseException | None) -> None:
        """Raise LeaseLost at the end of a body that lost its lease and does not raise anything itself."""
        if not released and error is None and self._state.loss is not None:
            raise self._state.error()

    def _wants(self) -> WatchedLease:
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
    """A grant in hand, for threads."""

    def __init__(self, client: ThreadBacking, state: LeaseState) -> None:
        super().__init__(state, client._keepalive.abandon)
        self._client = client
        self._flows = client._flows

    @property
    def lost(self) -> LostEvent:
        """An event that is set when the lease is lost, with the reason; one can wait for it."""
        return LostEvent(self._state)

    def on_lost(self, callback: Callable[[LeaseLost], object]) -> None:
        """Have this called, in a thread of its own, when the lease is lost; not when it is released."""
        check_callback(callback)
        state, call = self._state, self._client._callbacks.call
        state.at_end(lambda: call(callback, state.error()) if state.loss else None)
        self._client._callbacks.add(self._wants())

    def on_danger(self, callback: Callable[[float], object], *, before: Seconds) -> None:
        """Have this called, in a thread of its own, when less than so many seconds are left; anew after a renewal."""
        check_callback(callback)
        call = self._client._callbacks.call
        self._wants().add_danger(check_before(before, self._state), lambda left: call(callback, left))
        self._client._callbacks.add(self._wants())

    def renew(self, ttl: Seconds | None = None) -> None:
        """Extend the lease to a full ttl from now, its own or a new one; raise LeaseLost when it is not held any more.

        A shorter ttl than before does not bring the deadline nearer.
        """
        self._client._run(self._renewing(ttl))

    def release(self) -> bool:
        """Give the lock back; False means that it was no longer held under this token."""
        try:
            if self._state.left and not self._finished:
                # Released in the user's transaction, which may not have ended; whoever waited here might wait for it.
                self._state.let_go()
                self._client._keepalive.abandon(self._state)
                return True
            if self._may_be_held:
                self._client._keepalive.abandon(self._state)
            return not self._finished and self._client._run(self._releasing())
        except BaseException:
            # The caller is told, or leaves, before it is known to be released; the keep-alive sees to it.
            self._client._keepalive.abandon(self._state)
            raise
        finally:
            self._client._keepalive.discard(self._state)

    def release_in(self, connection: Any) -> None:
        """Give the lock back as part of the transaction under way on this connection, a psycopg or SQLAlchemy one.

        Nobody is granted the lock before the transaction has committed; if it is rolled back, the lease goes on.
        """
        transaction = UserTransaction(connection, self._client._schema, self._client._installation, wants_async=False)
        self.raise_if_lost()
        with self._state.leaving():
            released = transaction.call("release", self.name, self._state.token)
        if not released:
            self._client._run(self._learning_why())
            raise self._state.error()

    def assert_held(self, connection: Any) -> None:
        """Prove the lease in the transaction under way on this connection, or raise LeaseLost.

        From here until that transaction ends nobody else is granted the lock, even if the lease runs out meanwhile.
        """
        transaction = UserTransaction(connection, self._client._schema, self._client._installation, wants_async=False)
        self.raise_if_lost()
        if not transaction.call("assert_held", self.name, self._state.token):
            self._client._run(self._learning_why())
            raise self._state.error()

    def __enter__(self: ThreadSelf) -> ThreadSelf:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Released inside the body: nothing to give back and nothing to report.
        if not self._state.settled:
            try:
                self._check_end(self.release(), error)
            except (DatabaseError, ClientClosed):
                # What the body raised matters more than a lock that will free itself.
                if error is None:
                    raise


class TaskLease(_LeaseBase):
    """A grant in hand, for asyncio."""

    def __init__(self, client: TaskBacking, state: LeaseState) -> None:
        super().__init__(state, client._keepalive.abandon)
        self._client = client
        self._flows = client._flows
        self._body: asyncio.Task[Any] | None = None
        self._cancelled_body = False
        self._cancelling = 0

    @property
    def lost(self) -> AsyncLostEvent:
        """An event that is set when the lease is lost, with the reason; one can await it."""
        return AsyncLostEvent(self._state, self._client._callbacks)

    def on_lost(self, callback: Callable[[LeaseLost], object | Awaitable[object]]) -> None:
        """Have this called, or run as a task, when the lease is lost; not when it is released."""
        check_callback(callback)
        state, call = self._state, self._client._callbacks.call
        state.at_end(lambda: call(callback, state.error()) if state.loss else None)
        self._client._callbacks.add(self._wants())

    def on_danger(self, callback: Callable[[float], object | Awaitable[object]], *, before: Seconds) -> None:
        """Have this called, or run as a task, when less than so many seconds are left; and again after a renewal."""
        check_callback(callback)
        call = self._client._callbacks.call
        self._wants().add_danger(check_before(before, self._state), lambda left: call(callback, left))
        self._client._callbacks.add(self._wants())

    async def renew(self, ttl: Seconds | None = None) -> None:
        """Extend the lease to a full ttl from now, its own or a new one; raise LeaseLost when it is not held any more.

        A shorter ttl than before does not bring the deadline nearer.
        """
        await self._client._run(self._renewing(ttl))

    async def release(self) -> bool:
        """Give the lock back; False means that it was no longer held under this token."""
        try:
            if self._state.left and not self._finished:
                # Released in the user's transaction, which may not have ended; whoever waited here might wait for it.
                self._state.let_go()
                self._client._keepalive.abandon(self._state)
                return True
            if self._may_be_held:
                self._client._keepalive.abandon(self._state)
            return not self._finished and await self._client._run(self._releasing())
        except BaseException:
            # The caller is told, or leaves, before it is known to be released; the keep-alive sees to it.
            self._client._keepalive.abandon(self._state)
            raise
        finally:
            self._client._keepalive.discard(self._state)

    async def release_in(self, connection: Any) -> None:
        """Give the lock back as part of the transaction under way on this connection, a psycopg or SQLAlchemy one.

        Nobody is granted the lock before the transaction has committed; if it is rolled back, the lease goes on.
        """
        transaction = UserTransaction(connection, self._client._schema, self._client._installation, wants_async=True)
        self.raise_if_lost()
        with self._state.leaving():
            released = await transaction.call_async("release", self.name, self._state.token)
        if not released:
            await self._client._run(self._learning_why())
            raise self._state.error()

    async def assert_held(self, connection: Any) -> None:
        """Prove the lease in the transaction under way on this connection, or raise LeaseLost.

        From here until that transaction ends nobody else is granted the lock, even if the lease runs out meanwhile.
        """
        transaction = UserTransaction(connection, self._client._schema, self._client._installation, wants_async=True)
        self.raise_if_lost()
        if not await transaction.call_async("assert_held", self.name, self._state.token):
            await self._client._run(self._learning_why())
            raise self._state.error()

    async def __aenter__(self: TaskSelf) -> TaskSelf:
        self._watch_body()
        return self

    def _watch_body(self) -> None:
        """Cancel the task that runs the body when the lease is lost."""
        import asyncio

        self._body = asyncio.current_task()
        self._cancelling = _cancelling(self._body)
        self._state.at_end(lambda: self._client._callbacks.in_loop(self._cancel_body))
        self._client._callbacks.add(self._wants())

    def _cancel_body(self) -> None:
        if self._state.loss is not None and self._body is not None:
            self._cancelled_body = True
            self._body.cancel(f"the lease of lock {self.name!r} was lost")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import asyncio

        body, self._body = self._body, None
        if self._cancelled_body and body is not None:
            self._client._keepalive.discard(self._state)
            if not await _is_ours_alone(body, error, self._cancelling):
                # Somebody else cancels the task too, and that comes first.
                if error is None:
                    raise asyncio.CancelledError
            elif error is None or isinstance(error, asyncio.CancelledError):
                raise self._state.error() from None
            return
        if not self._state.settled:
            try:
                self._check_end(await self.release(), error)
            except (DatabaseError, ClientClosed):
                if error is None:
                    raise


class Lease(ThreadLease):
    """A grant in hand, with a fencing token. As a context manager it is released at the end."""


class AsyncLease(TaskLease):
    """A grant in hand, with a fencing token. As an async context manager it is released at the end."""


class _NoToken(_LeaseBase):
    # No number, so that a type checker refuses the lease wherever a fence is asked for.
    @property
    def token(self) -> None:  # type: ignore[override]
        """None: raises NoFencingToken."""
        raise NoFencingToken(self.name)


class EfficiencyLease(_NoToken, ThreadLease):
    """A grant that a crash may undo, for work that is only wasted when done twice. It has no token."""


class AsyncEfficiencyLease(_NoToken, TaskLease):
    """A grant that a crash may undo, for work that is only wasted when done twice. It has no token."""


def _cancelling(task: asyncio.Task[Any] | None) -> int:
    """Return how many cancellations of the task are under way; Python 3.10 does not count them."""
    return int(task.cancelling()) if task is not None and hasattr(task, "cancelling") else 0


async def _is_ours_alone(body: asyncio.Task[Any], error: BaseException | None, before: int) -> bool:
    """Take back our cancellation of the body; tell whether it was the only one since it was entered."""
    import asyncio

    if not isinstance(error, asyncio.CancelledError):
        # The body has ended otherwise, and the cancellation is still to come.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
    if not hasattr(body, "uncancel"):
        return True
    return bool(body.uncancel() <= before)
