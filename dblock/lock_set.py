"""A set of leases: what a client holds after it was granted several locks.

Guarantee: the set holds all its locks while none of its leases is lost. Each lease has its own token and deadline, and
may be used by itself. `release` releases all of them in one call.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dblock._core.lease_state import LeaseState, Reason
from dblock._core.options import Seconds, check_seconds
from dblock._core.several import SeveralFlows
from dblock._runtime.callbacks import check_callback
from dblock.errors import ClientClosed, DatabaseError, LeaseLost
from dblock.lease import AsyncLease, Lease, _cancelling, _is_ours_alone

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger("dblock")

L = TypeVar("L", Lease, AsyncLease)


class _SetLostBase:
    """An event that is set when one of the leases of a set is lost."""

    def __init__(self, states: Sequence[LeaseState], runtime: Any) -> None:
        self._states = states
        self._runtime = runtime

    def is_set(self) -> bool:
        """Return whether one of the leases is lost at this very moment."""
        return self._first() is not None

    @property
    def name(self) -> str | None:
        """The name of the first lock whose lease was lost; None if none was."""
        state = self._first()
        return state.name if state else None

    @property
    def reason(self) -> Reason | None:
        """Why that lease was lost; None if none was."""
        state = self._first()
        return state.loss.reason if state is not None and state.loss is not None else None

    @property
    def last_held(self) -> datetime | None:
        """The last moment at which all leases were known to be held, by this machine's wall clock."""
        return min((state.last_held for state in self._states), default=None)

    def _first(self) -> LeaseState | None:
        return next((state for state in self._states if state.lost() is not None), None)

    def _over(self) -> bool:
        return all(state.over for state in self._states)

    def _trusted_until(self) -> float:
        return min((state.trusted_until for state in self._states if not state.over), default=math.inf)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.reason or 'not set'}>"


class SetLostEvent(_SetLostBase):
    """The loss of a lease of a set, as an event that a thread can wait for."""

    def wait(self, timeout: Seconds | None = None) -> bool:
        """Wait until a lease is lost and return True. Return False if the timeout or the release comes first."""
        now = self._runtime.flows.clock
        give_up = math.inf if timeout is None else now() + check_seconds("timeout", timeout)
        ended: threading.Event = self._runtime.new_event()
        cancels = [state.at_end(ended.set) for state in self._states]
        try:
            while not self.is_set() and not self._over():
                if now() >= give_up:
                    return False
                ended.wait(max(min(self._trusted_until(), give_up) - now(), 0.001))
                ended.clear()
            return self.is_set()
        finally:
            for cancel in cancels:
                cancel()


class AsyncSetLostEvent(_SetLostBase):
    """The loss of a lease of a set, as an event that a task can wait for."""

    async def wait(self) -> bool:
        """Wait until a lease is lost and return True. Return False if the set is released first."""
        import asyncio

        ended = asyncio.Event()
        callbacks = self._runtime.callbacks
        cancels = [state.at_end(lambda: callbacks.in_loop(ended.set)) for state in self._states]
        try:
            while not self.is_set() and not self._over():
                left = self._trusted_until() - self._runtime.flows.clock()
                await callbacks.wait_and_clear(ended, max(left, 0.001))
            return self.is_set()
        finally:
            for cancel in cancels:
                cancel()


class _SetBase(Mapping[str, L], Generic[L]):
    """What both kinds of set share: the leases by the names of their locks, in the order of these names."""

    def __init__(self, runtime: Any, leases: Sequence[L], states: Sequence[LeaseState]) -> None:
        self._runtime = runtime
        self._leases: dict[str, L] = {lease.name: lease for lease in leases}
        self._states = states
        self._flows = SeveralFlows(runtime.flows)

    def __getitem__(self, name: str) -> L:
        return self._leases[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._leases)

    def __len__(self) -> int:
        return len(self._leases)

    def __bool__(self) -> bool:
        # An empty set was acquired too: `if locks := request.try_acquire()` asks for that.
        return True

    # A set is compared and hashed by what it is, not by its leases: two sets never hold the same grants.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def tokens(self) -> dict[str, int]:
        """The fencing token of each lock, by its name."""
        return {name: lease.token for name, lease in self._leases.items()}

    def remaining(self) -> float:
        """Return the seconds left in the shortest trust window; 0 if a lease is lost or released. Infinite if empty."""
        return min((state.remaining() for state in self._states), default=math.inf)

    def raise_if_lost(self) -> None:
        """Raise LeaseLost, with the reason, unless every lease is inside its trust window at this moment."""
        for state in self._states:
            if not state.remaining():
                raise state.error()

    def on_lost(self, callback: Callable[[LeaseLost], object]) -> None:
        """Call `callback` once, when the first of the leases is lost. It is called as that of `Lease.on_lost`."""
        check_callback(callback)
        told = threading.Lock()

        def tell(error: LeaseLost) -> object:
            return callback(error) if told.acquire(blocking=False) else None

        for lease in self._leases.values():
            lease.on_lost(tell)

    def _to_release(self) -> list[LeaseState]:
        """Return the leases that a call has to release. The others end here, or are left to the keep-alive."""
        if not self._states:
            return []
        abandon = self._runtime.keepalive.abandon
        return [
            state
            for lease, state in zip(self._leases.values(), self._states, strict=True)
            if not state.settled and lease._flows.release_without_asking(abandon) is None
        ]

    def _discard(self) -> None:
        for state in self._states:
            self._runtime.keepalive.discard(state)

    def _check_end(self, error: BaseException | None) -> None:
        """Raise LeaseLost at the end of a body that lost a lease and raises nothing itself."""
        lost = next((state for state in self._states if state.loss is not None), None)
        if error is None and lost is not None:
            raise lost.error()

    def __repr__(self) -> str:
        left = self.remaining()
        now = f"{left:.1f} s left" if left else "lost or over"
        return f"<{type(self).__name__} of {len(self)} locks, {now if self._states else 'empty'}>"


class LockSet(_SetBase[Lease]):
    """The leases of several locks, by name. As a context manager it releases all of them at the end."""

    @property
    def lost(self) -> SetLostEvent:
        """An event that is set when one of the leases is lost, with its name and the reason."""
        return SetLostEvent(self._states, self._runtime)

    def release(self) -> bool:
        """Release all the locks in one call. Return False if one was no longer held under its token."""
        states = self._to_release()
        all_held = not any(state.loss for state in self._states)
        try:
            released = self._runtime.run_even_if_closed(self._flows.release(states)) if states else True
            return released and all_held
        except BaseException:
            # The caller leaves before the release is confirmed. The keep-alive retries it.
            for state in states:
                self._runtime.keepalive.abandon(state)
            raise
        finally:
            self._discard()

    def __enter__(self) -> LockSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
            self._check_end(error)
        except (DatabaseError, ClientClosed):
            # An error of the body matters more than locks that free themselves at their deadline.
            if error is None:
                raise


class AsyncLockSet(_SetBase[AsyncLease]):
    """The leases of several locks, by name. As an async context manager it releases all of them at the end."""

    _body: asyncio.Task[Any] | None = None
    _cancelled_body = False
    _pending = 0

    @property
    def lost(self) -> AsyncSetLostEvent:
        """An event that is set when one of the leases is lost, with its name and the reason."""
        return AsyncSetLostEvent(self._states, self._runtime)

    async def release(self) -> bool:
        """Release all the locks in one call. Return False if one was no longer held under its token."""
        states = self._to_release()
        all_held = not any(state.loss for state in self._states)
        try:
            released = await self._runtime.run_even_if_closed(self._flows.release(states)) if states else True
            return released and all_held
        except BaseException:
            # The caller leaves before the release is confirmed. The keep-alive retries it.
            for state in states:
                self._runtime.keepalive.abandon(state)
            raise
        finally:
            self._discard()

    async def __aenter__(self) -> AsyncLockSet:
        import asyncio

        self._body = asyncio.current_task()
        self._pending = _cancelling(self._body)
        for lease in self._leases.values():
            lease._state.at_end(lambda: self._runtime.callbacks.in_loop(self._cancel_body))
            self._runtime.callbacks.add(lease._watch())
        return self

    def _cancel_body(self) -> None:
        lost = next((state for state in self._states if state.loss is not None), None)
        if lost is not None and self._body is not None and not self._cancelled_body:
            self._cancelled_body = True
            self._body.cancel(f"the lease of lock {lost.name!r} was lost")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import asyncio

        body, self._body = self._body, None
        if self._cancelled_body and body is not None:
            ours = await _is_ours_alone(body, error, self._pending)
            try:
                await self.release()
            except (DatabaseError, ClientClosed) as failed:
                logger.debug("the locks that are left of a set could not be released: %s", failed)
            if not ours:
                # The task was also cancelled for another reason, which comes first.
                if error is None:
                    raise asyncio.CancelledError
            elif error is None or isinstance(error, asyncio.CancelledError):
                self._check_end(None)
            return
        try:
            await self.release()
            self._check_end(error)
        except (DatabaseError, ClientClosed):
            if error is None:
                raise
