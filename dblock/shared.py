"""Shared locks: read-write locks and semaphores, and their leases.

Guarantee: while a writer holds a read-write lock, it holds the lock alone. While readers hold it, no writer does. A
semaphore has at most as many holders as permits, and no two of them have the same permit. The database decides all of
this; each holder has its own token, deadline and loss signal, as the holder of a plain lock has.

The queue is first come, first served. A reader that arrives after a waiting writer waits behind it, so a stream of
readers does not starve a writer. Readers that wait next to each other enter together.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from types import TracebackType
from typing import Any, NoReturn

from dblock._core.effects import Flow
from dblock._core.lease_flows import LeaseFlows
from dblock._core.lease_state import LeaseState
from dblock._core.options import Seconds
from dblock._core.replies import Grant, Holder, log_fields, new_attempt
from dblock._core.shared_acquire import SharedOptions, check_permits, is_reader
from dblock._runtime.owners import Owner, caller
from dblock._runtime.runtime import TaskRuntime, ThreadRuntime
from dblock.errors import LockTimeout, UpgradeRefused
from dblock.lease import AsyncLease, Lease, TaskLease, ThreadLease
from dblock.lock import _OWN_TIMEOUT, AsyncLock, Lock, TaskL, ThreadL, _may_be_granted

logger = logging.getLogger("dblock")


class ReadToken(int):
    """The token of a read lease: an integer that fenced_store refuses, as it refuses the lease.

    A copy that went through JSON, SQL or arithmetic is a plain integer, and no fence can tell it from a writer's token.
    """

    __slots__ = ()

    reads_only = True
    """True: fenced_store refuses the token."""


class _ReadLease:
    """What both kinds of read lease share."""

    _state: Any

    reads_only = True
    """True: fenced_store refuses the lease, because other readers may hold the lock at the same time."""

    @property
    def token(self) -> ReadToken:
        """The token, for logs and proofs: higher than the token of every earlier grant of this lock."""
        return ReadToken(self._state.token)


class ReadLease(_ReadLease, ThreadLease):
    """A reader's lease of a read-write lock. Its token is for logs and proofs, and passes no fence."""

    def upgrade(self) -> NoReturn:
        """Raise UpgradeRefused, which says why a read lease cannot become a write lease."""
        raise UpgradeRefused(self.name)


class AsyncReadLease(_ReadLease, TaskLease):
    """A reader's lease of a read-write lock. Its token is for logs and proofs, and passes no fence."""

    async def upgrade(self) -> NoReturn:
        """Raise UpgradeRefused, which says why a read lease cannot become a write lease."""
        raise UpgradeRefused(self.name)


class _WriteLease:
    """What both kinds of write lease share."""

    _runtime: Any
    _state: Any
    _flows: LeaseFlows

    def _downgrading(self, attempt: str) -> Flow[Grant]:
        grant: Grant | None = yield from self._runtime.flows.downgrade(self._state, attempt)
        if grant is None:
            yield from self._flows.learn_why()
            raise self._state.error()
        return grant

    def _give_back(self, attempt: str) -> Flow[None]:
        """Give back both grants, because it is not known which of them this process has."""
        self._state.let_go()
        self._runtime.keepalive.abandon(self._state)
        abandoning: Flow[None] = self._runtime.flows.abandon(self._state.lock, attempt)
        return abandoning

    def _begin_reading(self, grant: Grant) -> LeaseState:
        before = self._state
        state = LeaseState(grant, before.ttl, keep_alive=before.keep_alive, now=before.now, owner=before.owner)
        self._runtime.track(state)
        return state


class WriteLease(_WriteLease, Lease):
    """A writer's lease of a read-write lock, with a fencing token."""

    _read: ReadLease | None = None

    def downgrade(self) -> ReadLease:
        """Turn this lease into a read lease with a new token, without a moment in which another writer could enter.

        Readers that wait may enter. This lease is over then, and a `with` of it releases the read lease at its end. If
        the database does not reply, both leases are given back. If an open transaction has proved this lease, raise
        DatabaseError, and keep this lease.
        """
        attempt = new_attempt()
        self.raise_if_lost()
        try:
            self._read = ReadLease(self._runtime, self._begin_reading(self._runtime.run(self._downgrading(attempt))))
        except BaseException as error:
            if _may_be_granted(error):
                with self._runtime.deferring(self.name, attempt):
                    self._runtime.run_even_if_closed(self._give_back(attempt))
            raise
        self._runtime.keepalive.discard(self._state)
        return self._read

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._read is None:
            super().__exit__(kind, error, trace)
        else:
            self._read.__exit__(kind, error, trace)


class AsyncWriteLease(_WriteLease, AsyncLease):
    """A writer's lease of a read-write lock, with a fencing token."""

    _read: AsyncReadLease | None = None

    async def downgrade(self) -> AsyncReadLease:
        """Turn this lease into a read lease with a new token, without a moment in which another writer could enter.

        Readers that wait may enter. This lease is over then, and an `async with` of it releases the read lease at its
        end. If the database does not reply, both leases are given back. If an open transaction has proved this lease,
        raise DatabaseError, and keep this lease.
        """
        attempt = new_attempt()
        self.raise_if_lost()
        try:
            grant = await self._runtime.run(self._downgrading(attempt))
            self._read = AsyncReadLease(self._runtime, self._begin_reading(grant))
        except BaseException as error:
            if _may_be_granted(error):
                with self._runtime.deferring(self.name, attempt):
                    await self._runtime.run_even_if_closed(self._give_back(attempt))
            raise
        self._runtime.keepalive.discard(self._state)
        if self._body is not None:
            self._read._watch_body(self._body, self._cancelling)
        return self._read

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._read is None:
            await super().__aexit__(kind, error, trace)
        else:
            await self._read.__aexit__(kind, error, trace)


class _PermitLease:
    """What both kinds of permit lease share."""

    _state: Any

    @property
    def permit(self) -> int:
        """The number of the permit, from 0. No other holder has it at the same time."""
        return int(self._state.name.rpartition("#")[2])


class PermitLease(_PermitLease, Lease):
    """A lease of one permit of a semaphore, with a fencing token."""


class AsyncPermitLease(_PermitLease, AsyncLease):
    """A lease of one permit of a semaphore, with a fencing token."""


class _SharedLockBase:
    """What all shared locks share: everything that needs no I/O."""

    _runtime: Any
    _options: SharedOptions
    name: Any

    def _refuse_upgrade(self) -> None:
        """Raise if this thread or task would wait for its own read lease."""
        if self._options.mode == "write" and any(map(is_reader, self._own_leases())):
            raise UpgradeRefused(self.name)

    def _warn_of_own_lease(self, owner: Owner) -> None:
        if self._options.mode is not None and not all(map(is_reader, self._own_leases())):
            logger.warning(
                "this thread or task already holds lock %r for writing, and waits for it: read-write locks are not "
                "re-entrant",
                self.name,
                extra=log_fields(self.name, holder=self._runtime.flows.holder_name()),
            )

    def _own_leases(self) -> list[LeaseState]:
        leases: list[LeaseState] = self._runtime.own_leases(self.name, caller())
        return leases

    def _take_permits(self, permits: int) -> None:
        """Ask for the new number of permits from now on, if this object was given a number."""
        if self._options.permits is not None:
            self._options = replace(self._options, permits=permits)

    def _timed_out(self, seconds: float | None) -> LockTimeout:
        fields = log_fields(self.name, holder=self._runtime.flows.holder_name(), reason="timeout")
        logger.debug("lock %r: not acquired within %g s", self.name, seconds or 0.0, extra=fields)
        claims = bool(self._options.claims or self._options.claimers)
        own = self._in_the_way()
        return LockTimeout(self.name, seconds or 0.0, claims, own.token if own else None, shared=True)

    def _in_the_way(self) -> LeaseState | None:
        """Return a lease of this client, of any thread or task, that the caller has waited for; None if it has none.

        Of a read-write lock that is a writer's, and for a writer also a reader's. Any permit of a semaphore is one.
        """
        leases: list[LeaseState] = self._runtime.client_leases(self.name)
        reads = self._options.mode == "read"
        return next((one for one in leases if not (reads and is_reader(one))), None)


class SharedLock(_SharedLockBase, Lock[ThreadL]):
    """One side of a read-write lock for threads, from `Client.read_lock` or `Client.write_lock`."""

    _options: SharedOptions

    def try_acquire(self) -> ThreadL | None:
        """Acquire the lock if no holder is in the way and no waiter is ahead; otherwise return None."""
        self._refuse_upgrade()
        return super().try_acquire()

    def acquire(self, timeout: Seconds | None = _OWN_TIMEOUT) -> ThreadL:
        """Wait in the queue for the lock. Raise LockTimeout if the timeout passes first; None waits without end.

        Raise UpgradeRefused if this thread holds a read lease of the lock and asks for the write lock.
        """
        self._refuse_upgrade()
        return super().acquire(timeout)

    def holder(self) -> Holder | None:
        """Return the holder that was granted the lock first, None if it is free."""
        return next(iter(self.holders()), None)

    def holders(self) -> list[Holder]:
        """Return all current holders of the lock, in the order of their grants."""
        holders: list[Holder] = self._runtime.run(self._runtime.flows.holders(self.name))
        return holders


class AsyncSharedLock(_SharedLockBase, AsyncLock[TaskL]):
    """One side of a read-write lock for asyncio, from `AsyncClient.read_lock` or `AsyncClient.write_lock`."""

    _options: SharedOptions

    async def try_acquire(self) -> TaskL | None:
        """Acquire the lock if no holder is in the way and no waiter is ahead; otherwise return None."""
        self._refuse_upgrade()
        return await super().try_acquire()

    async def acquire(self, timeout: Seconds | None = _OWN_TIMEOUT) -> TaskL:
        """Wait in the queue for the lock. Raise LockTimeout if the timeout passes first; None waits without end.

        Raise UpgradeRefused if this task holds a read lease of the lock and asks for the write lock.
        """
        self._refuse_upgrade()
        return await super().acquire(timeout)

    async def holder(self) -> Holder | None:
        """Return the holder that was granted the lock first, None if it is free."""
        return next(iter(await self.holders()), None)

    async def holders(self) -> list[Holder]:
        """Return all current holders of the lock, in the order of their grants."""
        holders: list[Holder] = await self._runtime.run(self._runtime.flows.holders(self.name))
        return holders


class Semaphore(SharedLock[PermitLease]):
    """A semaphore for threads, from `Client.semaphore`: a lock with several permits."""

    def __init__(self, runtime: ThreadRuntime, options: SharedOptions) -> None:
        super().__init__(runtime, options, PermitLease)

    def available(self) -> int:
        """Return how many permits are free at this moment. A free permit may be reserved for a waiter."""
        free: int = self._runtime.run(self._runtime.flows.available(self.name, self._options.permits))
        return free

    def resize(self, permits: int) -> None:
        """Change the number of permits for all clients. More permits wake waiters; fewer take none from a holder."""
        check_permits(self.name, permits)
        self._runtime.run(self._runtime.flows.resize(self.name, permits))
        self._take_permits(permits)


class AsyncSemaphore(AsyncSharedLock[AsyncPermitLease]):
    """A semaphore for asyncio, from `AsyncClient.semaphore`: a lock with several permits."""

    def __init__(self, runtime: TaskRuntime, options: SharedOptions) -> None:
        super().__init__(runtime, options, AsyncPermitLease)

    async def available(self) -> int:
        """Return how many permits are free at this moment. A free permit may be reserved for a waiter."""
        free: int = await self._runtime.run(self._runtime.flows.available(self.name, self._options.permits))
        return free

    async def resize(self, permits: int) -> None:
        """Change the number of permits for all clients. More permits wake waiters; fewer take none from a holder."""
        check_permits(self.name, permits)
        await self._runtime.run(self._runtime.flows.resize(self.name, permits))
        self._take_permits(permits)
