"""A term in the hands of its leader.

The term is believed inside its trust window, as a lease is. It must end when `ending` is set: the leader was asked to
resign, another candidate was named, or one with a higher rank waits. From then on the lease is not renewed. A body that
returns releases the lock. A body that does not return keeps it until the deadline, and `lost` is set then.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Iterator
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dblock._core.lease_flows import LeaseFlows
from dblock._core.options import Seconds, check_seconds
from dblock._runtime.lost_events import AsyncLostEvent, LostEvent
from dblock.errors import LeaseLost
from dblock.lease import AsyncLease, Lease
from dblock.recipes.elections.flows import EndsTerm

if TYPE_CHECKING:
    import asyncio

    from dblock.recipes.elections.async_election import AsyncElection
    from dblock.recipes.elections.election import Election

logger = logging.getLogger("dblock")

CHECK_INTERVAL = 0.1
"""Seconds between two looks at the trust window at most, in a body that waits for the end of its term."""

BODY_INTERVAL = 0.02
"""Seconds between two looks whether a body has returned at most."""

ENDS_AS = {"transfer": "transferred", "priority": "outranked"}
"""How a term ends that ended for this reason. For every other reason it is resigned."""


class _TermBase:
    """What both kinds of term share: everything that needs no I/O."""

    _lease: Any

    def __init__(self, election: Any, lease: Any) -> None:
        self._election = election
        self._runtime = election._runtime
        self._lease = lease
        self._state = lease._state
        # The lease's own release would leave the end of the term to be recorded by others.
        self._ends = EndsTerm(election._runtime.flows, election._flows)
        lease._flows = LeaseFlows(self._ends, lease._state)  # type: ignore[arg-type]
        self._started = False
        self._reason: str | None = None
        self._warned = False
        self._waiting: list[Any] = []
        """Events that are set when the term must end or is over."""

    @property
    def election(self) -> str:
        """The name of the election."""
        return str(self._election.name)

    @property
    def token(self) -> int:
        """The fencing token: higher than the token of every earlier term of this election."""
        return int(self._lease.token)

    @property
    def expires_at(self) -> datetime:
        """The deadline by the database's clock. Use it in logs, and `remaining()` to decide."""
        found: datetime = self._lease.expires_at
        return found

    @property
    def trusted_until(self) -> float:
        """The end of the trust window on the clock of `dblock.monotonic()`. Each renewal moves it."""
        return float(self._lease.trusted_until)

    @property
    def ending_reason(self) -> str | None:
        """Why the term must end: resign, stop, close, transfer, priority or over; None while it may continue."""
        return self._reason

    def remaining(self) -> float:
        """Return the seconds left in the trust window; 0 if the term is lost or over."""
        return float(self._lease.remaining())

    def raise_if_lost(self) -> None:
        """Raise LeaseLost, with the reason, unless the term is inside its trust window at this moment."""
        self._lease.raise_if_lost()

    def on_lost(self, callback: Callable[[LeaseLost], object]) -> None:
        """Call `callback` when the term is lost, and not when it ends in order. See Lease.on_lost."""
        self._lease.on_lost(callback)

    def _stop_renewing(self, reason: str) -> None:
        self._reason = self._reason or reason
        logger.info("election %r: the term of token %d must end: %s", self.election, self.token, reason)
        self._runtime.keepalive.discard(self._state)

    def _obey(self, demand: str | None) -> None:
        """End the term if the database has a reason. `over` is none if the term has ended in order in the meantime."""
        if demand is not None and (demand != "over" or self.remaining()):
            self._ask_to_end(demand)

    def _ask_to_end(self, reason: str) -> None:
        raise NotImplementedError

    def _decide_how(self, error: BaseException | None) -> None:
        if isinstance(error, Exception) and self._reason is None:
            self._ends.how = "failed"
        else:
            self._ends.how = ENDS_AS.get(self._reason or "", "resigned")

    def _wake_waits(self) -> None:
        for event in list(self._waiting):
            event.set()

    def _pause(self, give_up_at: float, interval: float) -> float:
        """Return the seconds until the next look at the term, unless it changes before."""
        left: float = max(give_up_at - self._state.now(), 0.0)
        return min(left, interval) if self._runtime.polls else left

    def _announce_loss(self) -> None:
        """Let the end of the trust window end the waits, unless they look at it from time to time."""
        if not self._runtime.polls:
            self._runtime.callbacks.add(self._lease._watch())

    def _warn_if_ignored(self) -> bool:
        """Log that the body has ignored the request to end until its lease ended. Return whether it has."""
        if self._reason is None or self._lease.remaining() or self._state.over:
            return False
        if not self._warned:
            self._warned = True
            logger.warning(
                "election %r: the body was asked to end (%s) and has not returned; its term of token %d ended at the "
                "deadline of its lease",
                self.election,
                self._reason,
                self.token,
            )
        return True

    def __repr__(self) -> str:
        left = self.remaining()
        now = f"{left:.1f} s left" if left else "over"
        return f"<{type(self).__name__} of {self.election!r}, token {self.token}, {now}>"


class Term(_TermBase):
    """A term for threads. As a context manager it ends when the body has returned."""

    _lease: Lease

    def __init__(self, election: Election, lease: Lease) -> None:
        super().__init__(election, lease)
        self._ending: threading.Event = self._runtime.new_event()
        self._over: threading.Event = self._runtime.new_event()
        self._thread = threading.get_ident()

    @property
    def ending(self) -> threading.Event:
        """An event that is set when the body should return: see `ending_reason`. A loss does not set it."""
        return self._ending

    @property
    def lost(self) -> LostEvent:
        """An event that is set when the term is lost, with the reason. A thread can wait for it."""
        return self._lease.lost

    def wait(self, timeout: Seconds | None = None) -> bool:
        """Wait until the body must return, because the term is lost or must end. Return False after the timeout."""
        give_up_at = float("inf") if timeout is None else self._state.now() + check_seconds("timeout", timeout)
        with self._change() as changed:
            while not self.ending.is_set() and self._lease.remaining():
                if self._state.now() >= give_up_at:
                    return False
                changed.wait(self._pause(give_up_at, CHECK_INTERVAL))
        return True

    def publish(self, value: Any) -> None:
        """Replace the value that others see beside the leader. Raise LeaseLost if this term has ended."""
        self.raise_if_lost()
        if not self._election._run(self._election._flows.publish(self.token, value)):
            self._election._run(self._lease._flows.learn_why())
            raise self._state.error()

    def fence(self, connection: Any) -> contextlib.AbstractContextManager[Term]:
        """Prove the term in the open transaction on this connection, or raise LeaseLost.

        After this call no other term begins before that transaction has ended, even if this one expires. Use it as a
        call, or in a `with` around the statements that rely on it.
        """
        self._lease.assert_held(connection)
        return contextlib.nullcontext(self)

    def end(self) -> None:
        """End the term and release its lock, for a caller that uses no `with`. Raise LeaseLost if it was lost."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Term:
        self._thread = threading.get_ident()
        try:
            self._election._begin(self)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._over.is_set():
            return
        self._warn_if_ignored()
        self._decide_how(error)
        try:
            self._lease.__exit__(kind, error, trace)
        finally:
            self._election._finish(self)

    def _ask_to_end(self, reason: str) -> None:
        if not self.ending.is_set():
            self._stop_renewing(reason)
            self.ending.set()
            self._wake_waits()

    def _end_waits(self) -> None:
        """Tell every thread that waits for the body that the term is over."""
        self._over.set()
        self._wake_waits()

    @contextlib.contextmanager
    def _change(self) -> Iterator[threading.Event]:
        """Yield an event that is set when the term is lost, must end or is over."""
        changed = self._runtime.new_event()
        self._announce_loss()
        cancel = self._state.at_end(changed.set)
        self._waiting.append(changed)
        try:
            yield changed
        finally:
            self._waiting.remove(changed)
            cancel()

    def _has_no_body(self) -> bool:
        """Return whether the caller has campaigned for this term and entered no `with`."""
        return not self._started and self._thread == threading.get_ident()

    def _wait_for_body(self, timeout: float | None) -> bool:
        """Wait until the body has returned. Return False if it has not when its lease ends, or after the timeout."""
        if self._thread == threading.get_ident():
            return False
        give_up_at = float("inf") if timeout is None else self._state.now() + timeout
        with self._change() as changed:
            while not self._over.is_set():
                changed.wait(self._pause(max(give_up_at, self._state.now() + BODY_INTERVAL), BODY_INTERVAL))
                changed.clear()
                if not self._over.is_set() and (self._state.now() >= give_up_at or self._warn_if_ignored()):
                    return False
        return self._state.loss is None


class _AsyncFence:
    """The proof of a term, to be awaited or used in an `async with`."""

    def __init__(self, term: AsyncTerm, connection: Any) -> None:
        self._term = term
        self._connection = connection

    async def _prove(self) -> AsyncTerm:
        await self._term._lease.assert_held(self._connection)
        return self._term

    def __await__(self) -> Generator[Any, None, AsyncTerm]:
        return self._prove().__await__()

    async def __aenter__(self) -> AsyncTerm:
        return await self._prove()

    async def __aexit__(self, *error: object) -> None:
        pass


class AsyncTerm(_TermBase):
    """A term for asyncio. As an async context manager it ends when the body has returned. A loss cancels the body."""

    _lease: AsyncLease

    def __init__(self, election: AsyncElection, lease: AsyncLease) -> None:
        import asyncio

        super().__init__(election, lease)
        self._ending = asyncio.Event()
        self._over = asyncio.Event()
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None
        self._cancelled: asyncio.Task[Any] | None = None
        """The task of the body to cancel when the term must end."""

    @property
    def ending(self) -> asyncio.Event:
        """An event that is set when the body should return: see `ending_reason`. A loss does not set it."""
        return self._ending

    @property
    def lost(self) -> AsyncLostEvent:
        """An event that is set when the term is lost, with the reason. A task can wait for it."""
        return self._lease.lost

    async def wait(self, timeout: Seconds | None = None) -> bool:
        """Wait until the body must return, because the term is lost or must end. Return False after the timeout."""
        give_up_at = float("inf") if timeout is None else self._state.now() + check_seconds("timeout", timeout)
        with self._change() as changed:
            while not self.ending.is_set() and self._lease.remaining():
                if self._state.now() >= give_up_at:
                    return False
                await self._wait_and_clear(changed, self._pause(give_up_at, CHECK_INTERVAL))
        return True

    async def publish(self, value: Any) -> None:
        """Replace the value that others see beside the leader. Raise LeaseLost if this term has ended."""
        self.raise_if_lost()
        if not await self._election._run(self._election._flows.publish(self.token, value)):
            await self._election._run(self._lease._flows.learn_why())
            raise self._state.error()

    def fence(self, connection: Any) -> _AsyncFence:
        """Prove the term in the open transaction on this connection, or raise LeaseLost.

        Await it, or use it in an `async with` around the statements that rely on it. After that no other term begins
        before the transaction has ended, even if this one expires.
        """
        return _AsyncFence(self, connection)

    async def end(self) -> None:
        """End the term and release its lock, for a caller that uses no `async with`. Raise LeaseLost if it was lost."""
        await self.__aexit__(None, None, None)

    async def __aenter__(self) -> AsyncTerm:
        import asyncio

        self._task = asyncio.current_task()
        await self._lease.__aenter__()
        try:
            await self._election._begin(self)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._over.is_set():
            return
        self._warn_if_ignored()
        self._decide_how(error)
        try:
            await self._lease.__aexit__(kind, error, trace)
        finally:
            await self._election._finish(self)

    def _ask_to_end(self, reason: str) -> None:
        if not self.ending.is_set():
            self._stop_renewing(reason)
            self.ending.set()
            self._wake_waits()
            if self._cancelled is not None:
                self._cancelled.cancel(f"the term of election {self.election!r} must end: {reason}")

    def _end_waits(self) -> None:
        """Tell every task that waits for the body that the term is over."""
        self._over.set()
        self._wake_waits()

    @contextlib.contextmanager
    def _change(self) -> Iterator[asyncio.Event]:
        """Yield an event that is set when the term is lost, must end or is over."""
        import asyncio

        changed = asyncio.Event()
        callbacks = self._runtime.callbacks
        self._announce_loss()
        cancel = self._state.at_end(lambda: callbacks.in_loop(changed.set))
        self._waiting.append(changed)
        try:
            yield changed
        finally:
            self._waiting.remove(changed)
            cancel()

    async def _wait_and_clear(self, changed: asyncio.Event, seconds: float) -> None:
        await self._runtime.callbacks.wait_and_clear(changed, seconds)

    def _has_no_body(self) -> bool:
        """Return whether the calling task has campaigned for this term and entered no `async with`."""
        import asyncio

        return not self._started and self._task is asyncio.current_task()

    async def _wait_for_body(self, timeout: float | None) -> bool:
        """Wait until the body has returned. Return False if it has not when its lease ends, or after the timeout."""
        import asyncio

        if asyncio.current_task() in (self._task, self._cancelled):
            return False
        give_up_at = float("inf") if timeout is None else self._state.now() + timeout
        with self._change() as changed:
            while not self._over.is_set():
                await self._wait_and_clear(changed, self._pause(give_up_at, BODY_INTERVAL))
                if not self._over.is_set() and (self._state.now() >= give_up_at or self._warn_if_ignored()):
                    return False
        return self._state.loss is None
