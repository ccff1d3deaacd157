"""Locks: a name, options, and the methods to acquire it.

A lock object holds nothing. Threads or tasks may share it, because each acquisition returns its own lease. With
`reentrant=True` the leases of one thread or task share a grant (`dblock._core.holds`).
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

from dblock._core.effects import Flow
from dblock._core.holds import Hold
from dblock._core.lease_state import LeaseState
from dblock._core.options import LockOptions, Seconds, check_timeout
from dblock._core.replies import Grant, Holder, Waiter, log_fields, with_token
from dblock._runtime.owners import Owner, caller
from dblock._runtime.runtime import TaskRuntime, ThreadRuntime
from dblock.errors import DblockError, InvalidArgument, LockTimeout
from dblock.lease import TaskLease, ThreadLease

logger = logging.getLogger("dblock")

L = TypeVar("L", bound="ThreadLease | TaskLease")
ThreadL = TypeVar("ThreadL", bound=ThreadLease)
TaskL = TypeVar("TaskL", bound=TaskLease)

CLAIM_ELSEWHERE = 5.0
"""Seconds that a claim in another database may take."""

_OWN_TIMEOUT: Any = object()
"""Stands for the timeout that the lock was created with."""


class _LockBase(Generic[L]):
    """What both kinds of lock share."""

    def __init__(
        self, runtime: ThreadRuntime | TaskRuntime, options: LockOptions, kind: Callable[[Any, Any], L]
    ) -> None:
        self._runtime: Any = runtime
        self._kind = kind
        self._flows = runtime.flows
        self._options = options
        # The leases of the `with` bodies that are running, by thread or task. Two bodies may run at once if the first
        # one's lease has expired, and each must release its own.
        self._bodies: dict[Owner, list[L]] = {}

    @property
    def name(self) -> str:
        """The lock's name."""
        return self._options.name

    def _timeout(self, timeout: Seconds | None) -> float | None:
        return self._options.timeout if timeout is _OWN_TIMEOUT else check_timeout(self.name, timeout)

    def _acquiring(self, timeout: float | None, attempt: str, owner: Owner) -> Flow[Grant | None]:
        holds = functools.partial(self._holds, owner, timeout)
        flow = self._flows.acquire(self._options, timeout, attempt, holds=holds)
        observation = self._flows.observation
        missed = "busy" if timeout == 0 else "timeout"
        return flow if observation is None else observation.wait((self.name,), flow, missed=missed)

    def _trying(self, attempt: str) -> Flow[Grant | None]:
        flow = self._flows.try_acquire(self._options, attempt)
        observation = self._flows.observation
        return flow if observation is None else observation.wait((self.name,), flow, missed="busy")

    def _holds(self, owner: Owner, timeout: float | None) -> list[int]:
        """Return the tokens by which a thread or task keeps others waiting, for as long as it waits itself."""
        return [
            state.token
            for state in self._runtime.held_by(owner)
            # A lease that is not renewed ends by itself. A wait for an own lock ends at its timeout, if it has one.
            if state.keep_alive and (timeout is None or state.lock != self.name)
        ]

    def _lease(self, grant: Grant, owner: Owner) -> L:
        options = self._options
        state = LeaseState(grant, options.ttl, keep_alive=options.keep_alive, now=self._flows.clock, owner=owner)
        if logger.isEnabledFor(logging.DEBUG):
            fields = log_fields(grant.lock or grant.name, grant.token, holder=self._flows.holder_name())
            logger.debug("lock %r: granted%s", grant.name, with_token(grant.token), extra=fields)
        self._runtime.track(state)
        if not options.reentrant:
            return self._kind(self._runtime, state)
        hold = Hold(state, options.claims)
        owner.begin_hold(self._runtime, hold)
        return self._kind(self._runtime, hold.begin(options.ttl, options.keep_alive))

    def _again(self, owner: Owner) -> L | None:
        """Return another lease of the grant that the thread or task holds; None if a grant must be asked for."""
        options = self._options
        hold = owner.hold(self._runtime, self.name)
        if hold is None:
            return None
        missing = [one for one in options.claims if one not in hold.claims]
        if missing and hold.grant.remaining():
            raise InvalidArgument(
                f"This thread or task holds lock {self.name!r} already, and that grant has not claimed "
                f"{', '.join(map(repr, missing))}. Claim all resources where the lock is acquired first."
            )
        kept_alive = hold.grant.keep_alive
        state = hold.join(options.ttl, options.keep_alive)
        if state is None:
            return None
        try:
            if options.keep_alive and not kept_alive:
                self._runtime.keepalive.add(hold.grant)
            return self._kind(self._runtime, state)
        except BaseException:
            # The caller gets an error instead of the lease, which must not be counted.
            if state.leave() is None:
                self._runtime.keepalive.abandon(hold.grant)
            raise

    def _timed_out(self, seconds: float | None) -> LockTimeout:
        fields = log_fields(self.name, holder=self._flows.holder_name(), reason="timeout")
        logger.debug("lock %r: not acquired within %g s", self.name, seconds or 0.0, extra=fields)
        own = self._runtime.own_lease(self.name)
        claims = bool(self._options.claims or self._options.claimers)
        return LockTimeout(self.name, seconds or 0.0, claims, own.token if own else None)

    def _warn_of_own_lease(self, owner: Owner) -> None:
        own = self._runtime.own_lease(self.name)
        if own is not None and own.owner is owner:
            logger.warning(
                "this thread or task already holds lock %r%s, and waits for it: only locks with reentrant=True share",
                self.name,
                with_token(own.token, ", under "),
                extra=log_fields(self.name, own.token, holder=self._flows.holder_name()),
            )

    def _patience(self, lease: ThreadLease | TaskLease, timeout: float | None, began: float) -> float:
        """Return how long a claim elsewhere may take, within the timeout and the trust window."""
        left = math.inf if timeout is None else timeout - (time.monotonic() - began)
        return max(min(left, lease.remaining(), CLAIM_ELSEWHERE), 0.05)

    def _enter(self, lease: L) -> L:
        self._bodies.setdefault(caller(), []).append(lease)
        return lease

    def _leave(self) -> L:
        owner = caller()
        if owner not in self._bodies and len(self._bodies) == 1:
            # Some test frameworks enter and leave in different threads or tasks. Only one body is running.
            (owner,) = self._bodies
        if owner not in self._bodies:
            entered = f"entered by {len(self._bodies)} others" if self._bodies else "not entered"
            raise DblockError(
                f"The `with` of lock {self.name!r} is left by a thread or task that did not enter it; it is {entered}. "
                "Leave each `with` where it was entered, or call acquire() and release()."
            )
        leases = self._bodies[owner]
        lease = leases.pop()
        if not leases:
            del self._bodies[owner]
        return lease

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} ttl {self._options.ttl:g} s>"


class Lock(_LockBase[ThreadL]):
    """A lock for threads, from `Client.lock` or `Client.efficiency_lock`."""

    def __init__(self, runtime: ThreadRuntime, options: LockOptions, kind: type[ThreadL]) -> None:
        super().__init__(runtime, options, kind)
        if options.claimers and any(inspect.iscoroutinefunction(claimer.claim) for claimer in options.claimers):
            raise InvalidArgument(
                f"A claim of lock {self.name!r} is asynchronous, for an AsyncClient. Pass the claims of a FencedStore."
            )

    def try_acquire(self) -> ThreadL | None:
        """Acquire the lock if it is free and no waiter is ahead; otherwise return None."""
        owner, began = caller(), time.monotonic()
        attempt = owner.new_attempt()
        again = self._again(owner) if self._options.reentrant else None
        if again is not None:
            return self._claimed(again, 0.5, began)
        try:
            grant = self._runtime.run(self._trying(attempt))
            return self._claimed(self._lease(grant, owner), 0.5, began) if grant else None
        except BaseException as error:
            self._abandon(attempt, error)
            raise

    def acquire(self, timeout: Seconds | None = _OWN_TIMEOUT) -> ThreadL:
        """Wait in the queue for the lock. Raise LockTimeout if the timeout passes first; None waits without end."""
        seconds = self._timeout(timeout)
        logger.debug("lock %r: acquiring", self.name)
        owner, began = caller(), time.monotonic()
        attempt = owner.new_attempt()
        lease = self._again(owner) if self._options.reentrant else None
        if lease is not None:
            lease = self._claimed(lease, seconds, began)
            if lease is None:
                raise self._timed_out(seconds)
            return lease
        if owner.holds_any:
            self._warn_of_own_lease(owner)
        try:
            grant = self._runtime.run(self._acquiring(seconds, attempt, owner))
            lease = self._claimed(self._lease(grant, owner), seconds, began) if grant is not None else None
            if lease is not None:
                return lease
        except BaseException as error:
            self._abandon(attempt, error)
            raise
        raise self._timed_out(seconds)

    def _abandon(self, attempt: str, error: BaseException) -> None:
        """Give back what the attempt may have been granted, because its caller gets an error instead."""
        if _may_be_granted(error):
            with self._runtime.deferring(self.name, attempt):
                self._runtime.run_even_if_closed(self._flows.abandon(self.name, attempt))

    def holder(self) -> Holder | None:
        """Return the current holder of the lock, None if it is free."""
        found: Holder | None = self._runtime.run(self._flows.holder(self.name))
        return found

    def queue(self) -> list[Waiter]:
        """Return the waiters for the lock, in the order of the queue."""
        waiters: list[Waiter] = self._runtime.run(self._flows.queue(self.name))
        return waiters

    def _claimed(self, lease: ThreadL, timeout: float | None, began: float) -> ThreadL | None:
        """Raise the fences in other databases before returning the lease. Return None on timeout."""
        if self._options.claimers:
            try:
                for claimer in self._options.claimers:
                    claimer.claim(lease.token, self._patience(lease, timeout, began))
                lease.raise_if_lost()
            except TimeoutError:
                lease.release()
                return None
            except BaseException:
                lease.release()
                raise
        return lease

    def __enter__(self) -> ThreadL:
        return self._enter(self.acquire())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave().__exit__(kind, error, trace)


class AsyncLock(_LockBase[TaskL]):
    """A lock for asyncio, from `AsyncClient.lock` or `AsyncClient.efficiency_lock`."""

    def __init__(self, runtime: TaskRuntime, options: LockOptions, kind: type[TaskL]) -> None:
        super().__init__(runtime, options, kind)
        if options.claimers and not all(inspect.iscoroutinefunction(claimer.claim) for claimer in options.claimers):
            raise InvalidArgument(
                f"A claim of lock {self.name!r} would block the event loop. Pass the claims of an AsyncFencedStore."
            )

    async def try_acquire(self) -> TaskL | None:
        """Acquire the lock if it is free and no waiter is ahead; otherwise return None."""
        owner, began = caller(), time.monotonic()
        attempt = owner.new_attempt()
        again = self._again(owner) if self._options.reentrant else None
        if again is not None:
            return await self._claimed(again, 0.5, began)
        try:
            grant = await self._runtime.run(self._trying(attempt))
            return await self._claimed(self._lease(grant, owner), 0.5, began) if grant else None
        except BaseException as error:
            await self._abandon(attempt, error)
            raise

    async def acquire(self, timeout: Seconds | None = _OWN_TIMEOUT) -> TaskL:
        """Wait in the queue for the lock. Raise LockTimeout if the timeout passes first; None waits without end."""
        seconds = self._timeout(timeout)
        logger.debug("lock %r: acquiring", self.name)
        owner, began = caller(), time.monotonic()
        attempt = owner.new_attempt()
        lease = self._again(owner) if self._options.reentrant else None
        if lease is not None:
            lease = await self._claimed(lease, seconds, began)
            if lease is None:
                raise self._timed_out(seconds)
            return lease
        if owner.holds_any:
            self._warn_of_own_lease(owner)
        try:
            grant = await self._runtime.run(self._acquiring(seconds, attempt, owner))
            lease = await self._claimed(self._lease(grant, owner), seconds, began) if grant is not None else None
            if lease is not None:
                return lease
        except BaseException as error:
            await self._abandon(attempt, error)
            raise
        raise self._timed_out(seconds)

    async def _abandon(self, attempt: str, error: BaseException) -> None:
        """Give back what the attempt may have been granted, because its caller gets an error instead."""
        if _may_be_granted(error):
            with self._runtime.deferring(self.name, attempt):
                await self._runtime.run_even_if_closed(self._flows.abandon(self.name, attempt))

    async def holder(self) -> Holder | None:
        """Return the current holder of the lock, None if it is free."""
        found: Holder | None = await self._runtime.run(self._flows.holder(self.name))
        return found

    async def queue(self) -> list[Waiter]:
        """Return the waiters for the lock, in the order of the queue."""
        waiters: list[Waiter] = await self._runtime.run(self._flows.queue(self.name))
        return waiters

    async def _claimed(self, lease: TaskL, timeout: float | None, began: float) -> TaskL | None:
        """Raise the fences in other databases before returning the lease. Return None on timeout."""
        if self._options.claimers:
            try:
                for claimer in self._options.claimers:
                    await claimer.claim(lease.token, self._patience(lease, timeout, began))
                lease.raise_if_lost()
            except TimeoutError:
                await lease.release()
                return None
            except BaseException:
                await lease.release()
                raise
        return lease

    async def __aenter__(self) -> TaskL:
        return self._enter(await (await self.acquire()).__aenter__())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave().__aexit__(kind, error, trace)


def _may_be_granted(error: BaseException) -> bool:
    """Return whether a request that ended with this error may have been granted: its reply was not received."""
    return error.may_be_done if isinstance(error, DblockError) else True
