"""Several locks at once: all of them as one set, or any one of them.

Guarantee: a caller of `lock_all` gets all its locks or none. The database grants them in the order of their names,
whatever order the caller gave, so two callers cannot wait for each other. `lock_any` gets exactly one lock, and gives
up its positions in the other queues in the same transaction. A caller that is interrupted or cancelled leaves nothing
behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from dblock._core.effects import Flow
from dblock._core.lease_state import LeaseState
from dblock._core.lock_any import LockAnyFlows
from dblock._core.options import LockOptions, Seconds, brief, check_name, check_timeout, lock_options
from dblock._core.replies import Grant, log_fields, with_token
from dblock._core.several import SeveralFlows
from dblock._runtime.owners import Owner, caller
from dblock.errors import InvalidArgument, LockTimeout
from dblock.lease import AsyncLease, Lease
from dblock.lock import _OWN_TIMEOUT, _LockBase, _may_be_granted
from dblock.lock_set import AsyncLockSet, LockSet

logger = logging.getLogger("dblock")


class _SeveralBase(_LockBase[Any]):
    """What all requests for several locks share."""

    any_of = False

    def __init__(self, runtime: Any, names: tuple[str, ...], options: LockOptions, kind: Callable[..., Any]) -> None:
        super().__init__(runtime, options, kind)
        self.names = names
        """The names of the locks: those of `lock_all` sorted, those of `lock_any` in the order of preference."""
        self._all = SeveralFlows(runtime.flows)
        self._any = LockAnyFlows(runtime.flows)

    @property
    def name(self) -> str:
        """The names of the locks, for people to read."""
        return ", ".join(self.names)

    def _timeout(self, timeout: Seconds | None) -> float | None:
        return self._options.timeout if timeout is _OWN_TIMEOUT else check_timeout(self._options.name, timeout)

    def _hold(self, grant: Grant, owner: Owner, states: list[LeaseState]) -> LeaseState:
        """Make a lease of a grant, and let the keep-alive renew it."""
        state = LeaseState(grant, self._options.ttl, now=self._flows.clock, owner=owner)
        states.append(state)
        if logger.isEnabledFor(logging.DEBUG):
            fields = log_fields(grant.name, grant.token, holder=self._flows.holder_name())
            logger.debug("lock %r: granted%s", grant.name, with_token(grant.token), extra=fields)
        self._runtime.track(state)
        return state

    def _drop(self, state: LeaseState) -> None:
        self._runtime.keepalive.discard(state)
        state.let_go()

    def _acquiring_all(self, timeout: float | None, attempt: str, states: list[LeaseState]) -> Flow[str | None]:
        owner = caller()

        def holds() -> list[int]:
            """Return the tokens of the other locks by which this thread or task keeps others waiting."""
            return [
                state.token
                for state in self._runtime.held_by(owner)
                # As for a single lock. The locks of the set are given up for others, so they are in no deadlock.
                if state.keep_alive and state not in states and (timeout is None or state.lock not in self.names)
            ]

        flow = self._all.acquire_all(
            self.names,
            self._options,
            timeout,
            attempt,
            lambda grant: self._hold(grant, owner, states),
            self._drop,
            lambda: all(state.lock < self.names[0] for state in self._runtime.held_by(owner)),
            holds,
        )
        observation = self._flows.observation
        missed = "busy" if timeout == 0 else "timeout"
        return flow if observation is None else observation.wait(self.names, flow, missed=missed, all_of=True)

    def _acquiring_any(self, timeout: float | None, attempt: str) -> Flow[Grant | None]:
        flow = self._any.acquire(self.names, self._options, timeout, attempt)
        observation = self._flows.observation
        missed = "busy" if timeout == 0 else "timeout"
        return flow if observation is None else observation.wait(self.names, flow, missed=missed)

    def _leases(self, states: Sequence[LeaseState]) -> tuple[list[Any], list[LeaseState]]:
        """Return the leases of a call that was granted all its locks, and their states.

        A lock that the call gave up in between has several states, and the last one counts.
        """
        latest = {state.name: state for state in states}
        kept = [latest[name] for name in self.names]
        return [self._kind(self._runtime, state) for state in kept], kept

    def _warn_of_own_leases(self) -> None:
        for name in self.names:
            own = self._runtime.own_lease(name)
            if own is not None and own.owner is caller():
                logger.warning(
                    "this thread or task already holds lock %r%s, and waits for it: a set of locks shares none",
                    name,
                    with_token(own.token, ", under "),
                    extra=log_fields(name, own.token, holder=self._flows.holder_name()),
                )

    def _not_acquired(self, waited_for: str, seconds: float | None) -> LockTimeout:
        fields = log_fields(waited_for, holder=self._flows.holder_name(), reason="timeout")
        logger.debug(
            "lock %r: not acquired within %g s, of %d locks", waited_for, seconds or 0.0, len(self.names), extra=fields
        )
        own = None
        for name in self.names if self.any_of else [waited_for]:
            own = own or self._runtime.own_lease(name)
        return LockTimeout(
            own.name if own else waited_for,
            seconds or 0.0,
            False,
            own.token if own else None,
            self.names,
            self.any_of,
        )

    def _must_give_back(self, states: Sequence[LeaseState], error: BaseException) -> bool:
        """End the leases of a call that failed. Return whether the database may know of them, and can be asked."""
        for state in states:
            if not state.ended:
                self._drop(state)
        # A lease that has ended may still be recorded: the client was closed before it could be given up.
        recorded = any(not state.settled for state in states)
        return recorded or _may_be_granted(error)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.names)} locks, ttl {self._options.ttl:g} s>"


class _Threads(_SeveralBase):
    """What both requests of a `Client` share."""

    def _give_back(self, states: Sequence[LeaseState], attempt: str, error: BaseException) -> None:
        """Give back all that the attempt may have been granted, because its caller gets an error instead."""
        if self._must_give_back(states, error):
            with self._runtime.deferring(self.names[0], attempt, *self.names[1:]):
                self._runtime.run_even_if_closed(self._flows.abandon_all(self.names, attempt))


class _Tasks(_SeveralBase):
    """What both requests of an `AsyncClient` share."""

    async def _give_back(self, states: Sequence[LeaseState], attempt: str, error: BaseException) -> None:
        """Give back all that the attempt may have been granted, because its caller gets an error instead."""
        if self._must_give_back(states, error):
            with self._runtime.deferring(self.names[0], attempt, *self.names[1:]):
                await self._runtime.run_even_if_closed(self._flows.abandon_all(self.names, attempt))


class LockAll(_Threads):
    """A request for all of several locks, from `Client.lock_all`. It holds nothing itself."""

    def try_acquire(self) -> LockSet | None:
        """Acquire all the locks if they are free and no waiter is ahead; otherwise return None and hold none."""
        try:
            return self.acquire(0)
        except LockTimeout:
            return None

    def acquire(self, timeout: Seconds | None = _OWN_TIMEOUT) -> LockSet:
        """Wait until all the locks are held. Raise LockTimeout if the timeout passes first, and hold none then."""
        seconds = self._timeout(timeout)
        if not self.names:
            return LockSet(self._runtime, [], [])
        if seconds != 0:
            self._warn_of_own_leases()
        attempt, states = caller().new_attempt(), list[LeaseState]()
        try:
            waited_for = self._runtime.run(self._acquiring_all(seconds, attempt, states))
            if waited_for is None:
                return LockSet(self._runtime, *self._leases(states))
        except BaseException as error:
            self._give_back(states, attempt, error)
            raise
        raise self._not_acquired(waited_for, seconds)

    def __enter__(self) -> LockSet:
        held: LockSet = self._enter(self.acquire())
        return held

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave().__exit__(kind, error, trace)


class LockAny(_Threads):
    """A request for any one of several locks, from `Client.lock_any`. It holds nothing itself."""

    any_of = True

    def try_acquire(self) -> Lease | None:
        """Acquire the first of the locks that is free and for which no waiter is ahead; otherwise return None."""
        try:
            return self.acquire(0)
        except LockTimeout:
            return None

    def acquire(self, timeout: Seconds | None = _OWN_TIMEOUT) -> Lease:
        """Wait until one of the locks is held: `name` of the lease says which. Raise LockTimeout after the timeout."""
        seconds = self._timeout(timeout)
        if seconds != 0:
            self._warn_of_own_leases()
        attempt, states = caller().new_attempt(), list[LeaseState]()
        try:
            grant = self._runtime.run(self._acquiring_any(seconds, attempt))
            if grant is not None:
                return Lease(self._runtime, self._hold(grant, caller(), states))
        except BaseException as error:
            self._give_back(states, attempt, error)
            raise
        raise self._not_acquired(self.names[0], seconds)

    def __enter__(self) -> Lease:
        lease: Lease = self._enter(self.acquire())
        return lease

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave().__exit__(kind, error, trace)


class AsyncLockAll(_Tasks):
    """A request for all of several locks, from `AsyncClient.lock_all`. It holds nothing itself."""

    async def try_acquire(self) -> AsyncLockSet | None:
        """Acquire all the locks if they are free and no waiter is ahead; otherwise return None and hold none."""
        try:
            return await self.acquire(0)
        except LockTimeout:
            return None

    async def acquire(self, timeout: Seconds | None = _OWN_TIMEOUT) -> AsyncLockSet:
        """Wait until all the locks are held. Raise LockTimeout if the timeout passes first, and hold none then."""
        seconds = self._timeout(timeout)
        if not self.names:
            return AsyncLockSet(self._runtime, [], [])
        if seconds != 0:
            self._warn_of_own_leases()
        attempt, states = caller().new_attempt(), list[LeaseState]()
        try:
            waited_for = await self._runtime.run(self._acquiring_all(seconds, attempt, states))
            if waited_for is None:
                return AsyncLockSet(self._runtime, *self._leases(states))
        except BaseException as error:
            await self._give_back(states, attempt, error)
            raise
        raise self._not_acquired(waited_for, seconds)

    async def __aenter__(self) -> AsyncLockSet:
        held: AsyncLockSet = self._enter(await (await self.acquire()).__aenter__())
        return held

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave().__aexit__(kind, error, trace)


class AsyncLockAny(_Tasks):
    """A request for any one of several locks, from `AsyncClient.lock_any`. It holds nothing itself."""

    any_of = True

    async def try_acquire(self) -> AsyncLease | None:
        """Acquire the first of the locks that is free and for which no waiter is ahead; otherwise return None."""
        try:
            return await self.acquire(0)
        except LockTimeout:
            return None

    async def acquire(self, timeout: Seconds | None = _OWN_TIMEOUT) -> AsyncLease:
        """Wait until one of the locks is held: `name` of the lease says which. Raise LockTimeout after the timeout."""
        seconds = self._timeout(timeout)
        if seconds != 0:
            self._warn_of_own_leases()
        attempt, states = caller().new_attempt(), list[LeaseState]()
        try:
            grant = await self._runtime.run(self._acquiring_any(seconds, attempt))
            if grant is not None:
                return AsyncLease(self._runtime, self._hold(grant, caller(), states))
        except BaseException as error:
            await self._give_back(states, attempt, error)
            raise
        raise self._not_acquired(self.names[0], seconds)

    async def __aenter__(self) -> AsyncLease:
        lease: AsyncLease = self._enter(await (await self.acquire()).__aenter__())
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave().__aexit__(kind, error, trace)


def names_of_all(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names for `lock_all`: checked, each once, in the order in which every caller takes the locks."""
    return tuple(sorted(set(_checked("lock_all", names))))


def names_of_any(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names for `lock_any`: checked, each once, in the caller's order."""
    found = tuple(dict.fromkeys(_checked("lock_any", names)))
    if not found:
        raise InvalidArgument("lock_any needs the name of at least one lock: of no locks, none can be granted.")
    return found


def set_options(names: tuple[str, ...], ttl: Seconds, timeout: Seconds | None, meta: Any) -> LockOptions:
    """Check the options that all the locks share."""
    return lock_options(names[0] if names else "(none)", ttl, timeout, meta)


def _checked(function: str, names: Iterable[str]) -> list[str]:
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise InvalidArgument(f"{function} takes a list of names; got {brief(names)}.")
    return [check_name(name) for name in names]
