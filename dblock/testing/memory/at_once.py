"""Locks and leases of the memory clients, with a short way for a lock that is free.

A client sends each request as text, reads the reply as text, and is ready to wait in between. None of that is needed to
acquire a free lock in memory, or to release a lock that has no waiters. These two are done at once, by the same
functions of the database in memory, of the lease and of the keep-alive.

Everything else is left to the shipped code: a lock that is held or has waiters, claims, reentrance, observers, logs at
the level DEBUG, a client that is closed, calls that a test intercepts, and a clock on which something is due first.
"""

from __future__ import annotations

import logging
from typing import Any

from dblock import lease as leases
from dblock import lock as locks
from dblock._core.acquire import TRUST, LockFlows
from dblock._core.options import LockOptions, Seconds
from dblock._core.replies import Grant
from dblock._runtime.owners import Owner, caller
from dblock.testing.memory.database import MemoryDatabase

logger = logging.getLogger("dblock")

_OWN_TIMEOUT: Any = locks._OWN_TIMEOUT


def can_be_used(flows: LockFlows, options: LockOptions) -> bool:
    """Return whether a lock with these options has the short way."""
    return not (options.claims or options.claimers or options.reentrant or flows.observation)


class _Lock:
    """What both kinds of lock share."""

    _runtime: Any
    _options: LockOptions
    _flows: Any
    _lease: Any
    _owner: Owner | None = None
    """The thread or task that was last granted the lock at once."""
    _prefix = ""
    """The first half of the names of its requests."""

    def _acquired_at_once(self) -> Any:
        """Acquire the lock if it is free; otherwise return None."""
        options, runtime, flows = self._options, self._runtime, self._flows
        if flows.crowds.expected(options.name) or logger.isEnabledFor(logging.DEBUG):
            return None
        owner = caller()
        if owner.holds_any and runtime.own_lease(options.name) is not None:
            return None
        database: MemoryDatabase = runtime.database
        with database.clock.lock:
            if runtime.closed:
                return None
            if owner is not self._owner:
                self._owner, self._prefix = owner, owner.new_attempt()[:16]
            database.attempts += 1
            attempt = f"{self._prefix}{database.attempts:016x}"
            try:
                sent_at = flows.clock()
                row = database.acquire_free(options, attempt, flows.holder_name())
                if row is None:
                    return None
                return self._lease(
                    Grant(row.name, row.token, row.expires_at, sent_at + row.ttl * TRUST, sent_at), owner
                )
            except BaseException:
                database.store.abandon(options.name, attempt)
                raise


class _Lease:
    """What both kinds of lease share."""

    _runtime: Any
    _state: Any
    _abandon: Any

    def _released_at_once(self) -> bool:
        """Release the lock if the lease is held and no waiter must be woken; return False if nothing was done."""
        state, runtime = self._state, self._runtime
        database: MemoryDatabase = runtime.database
        with database.clock.lock:
            try:
                if runtime.closed or not state.remaining() or not database.release_unwanted(state.name, state.token):
                    return False
                state.let_go()
                state.release_confirmed()
            except BaseException:
                self._abandon()
                raise
            runtime.keepalive.discard(state)
            return True


class Lease(_Lease, leases.Lease):
    """A lease of a `MemoryClient`."""

    def release(self) -> bool:
        return self._released_at_once() or super().release()


class AsyncLease(_Lease, leases.AsyncLease):
    """A lease of an `AsyncMemoryClient`."""

    async def release(self) -> bool:
        return (self._runtime.runs_here and self._released_at_once()) or await super().release()


class Lock(_Lock, locks.Lock[leases.Lease]):
    """A lock of a `MemoryClient`."""

    def try_acquire(self) -> leases.Lease | None:
        return self._acquired_at_once() or super().try_acquire()

    def acquire(self, timeout: Seconds | None = _OWN_TIMEOUT) -> leases.Lease:
        if timeout is not _OWN_TIMEOUT:
            self._timeout(timeout)
        return self._acquired_at_once() or super().acquire(timeout)


class AsyncLock(_Lock, locks.AsyncLock[leases.AsyncLease]):
    """A lock of an `AsyncMemoryClient`."""

    async def try_acquire(self) -> leases.AsyncLease | None:
        return (self._runtime.runs_here and self._acquired_at_once()) or await super().try_acquire()

    async def acquire(self, timeout: Seconds | None = _OWN_TIMEOUT) -> leases.AsyncLease:
        if timeout is not _OWN_TIMEOUT:
            self._timeout(timeout)
        return (self._runtime.runs_here and self._acquired_at_once()) or await super().acquire(timeout)
