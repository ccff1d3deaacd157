"""A lock: a name, the terms on which to hold it, and the ways to get it.

A lock object holds nothing by itself. It may be shared by threads or tasks; each acquisition is a lease of its own.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Generic, TypeVar

from dblock.errors import DblockError, LockTimeout
from dblock.lease import AsyncLease, Lease
from dblock.steps import Holder, Run, RunAsync, Service
from dblock.terms import Seconds, Terms, check_timeout

L = TypeVar("L", Lease, AsyncLease)


_OWN_TIMEOUT: Any = object()
"""Stands for the timeout that the lock was made with."""


class _LockBase(Generic[L]):
    """What both kinds of lock know."""

    def __init__(self, service: Service, terms: Terms) -> None:
        self._service = service
        self._terms = terms
        # The lease of each `with` body under way, by the thread or task that runs it: two may run at once
        # when the first one's lease has run out, and each must release its own.
        self._bodies: dict[object, list[L]] = {}

    @property
    def name(self) -> str:
        """The lock's name."""
        return self._terms.name

    def _timeout(self, timeout: Seconds | None) -> float | None:
        return self._terms.timeout if timeout is _OWN_TIMEOUT else check_timeout(self.name, timeout)

    def _enter(self, owner: object, lease: L) -> L:
        self._bodies.setdefault(owner, []).append(lease)
        return lease

    def _leave(self, owner: object) -> L:
        if owner not in self._bodies and len(self._bodies) == 1:
            # Entered here and left there, as some test frameworks do; there is only one it can be.
            (owner,) = self._bodies
        if owner not in self._bodies:
            raise DblockError(
                f"Lock {self.name!r} is entered by several, and left by a thread or task that is none of them. "
                "Leave each `with` where it was entered, or acquire() and release() by hand."
            )
        leases = self._bodies[owner]
        lease = leases.pop()
        if not leases:
            del self._bodies[owner]
        return lease

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} ttl {self._terms.ttl:g} s>"


class Lock(_LockBase[Lease]):
    """A lock, for threads. Made by `Client.lock`."""

    def __init__(self, run: Run, service: Service, terms: Terms) -> None:
        super().__init__(service, terms)
        self._run = run

    def try_acquire(self) -> Lease | None:
        """Take the lock if it is free at this moment; None when another holds it."""
        grant = self._run(self._service.try_acquire(self._terms))
        return Lease(self._run, self._service, grant, self._terms.ttl) if grant else None

    def acquire(self, timeout: Seconds | None = _OWN_TIMEOUT) -> Lease:
        """Wait for the lock; raise LockTimeout when the timeout passes first. None waits without end."""
        seconds = self._timeout(timeout)
        grant = self._run(self._service.acquire(self._terms, seconds))
        if grant is None:
            raise LockTimeout(self.name, seconds or 0.0)
        return Lease(self._run, self._service, grant, self._terms.ttl)

    def holder(self) -> Holder | None:
        """Ask who holds the lock now; None when nobody does."""
        return self._run(self._service.holder(self.name))

    def __enter__(self) -> Lease:
        return self._enter(threading.get_ident(), self.acquire())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(threading.get_ident()).__exit__(kind, error, trace)


class AsyncLock(_LockBase[AsyncLease]):
    """A lock, for asyncio. Made by `AsyncClient.lock`."""

    def __init__(self, run: RunAsync, service: Service, terms: Terms) -> None:
        super().__init__(service, terms)
        self._run = run

    async def try_acquire(self) -> AsyncLease | None:
        """Take the lock if it is free at this moment; None when another holds it."""
        grant = await self._run(self._service.try_acquire(self._terms))
        return AsyncLease(self._run, self._service, grant, self._terms.ttl) if grant else None

    async def acquire(self, timeout: Seconds | None = _OWN_TIMEOUT) -> AsyncLease:
        """Wait for the lock; raise LockTimeout when the timeout passes first. None waits without end."""
        seconds = self._timeout(timeout)
        grant = await self._run(self._service.acquire(self._terms, seconds))
        if grant is None:
            raise LockTimeout(self.name, seconds or 0.0)
        return AsyncLease(self._run, self._service, grant, self._terms.ttl)

    async def holder(self) -> Holder | None:
        """Ask who holds the lock now; None when nobody does."""
        return await self._run(self._service.holder(self.name))

    async def __aenter__(self) -> AsyncLease:
        return self._enter(_task(), await self.acquire())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave(_task()).__aexit__(kind, error, trace)


def _task() -> object:
    import asyncio

    return asyncio.current_task()
