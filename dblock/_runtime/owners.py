"""Owners: which thread or task calls, and which leases it holds.

Guarantee: no two threads, greenlets or tasks are the same owner, also not one after the other. An owner is an object.
The number of a thread and the address of a task are used again, and a context variable is inherited by child tasks.

A task is an owner of its own, also for a synchronous client: all tasks of an event loop run in one thread, and must not
pass for each other. Where gevent or eventlet has patched `threading.local`, each greenlet is an owner.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import Any

from dblock._core.holds import Hold
from dblock._core.lease_state import LeaseState
from dblock._core.options import check_name
from dblock.errors import NotLocked

_making = threading.Lock()
_local: Any = threading.local()
_asyncio: Any = None
"""The module asyncio, once it is found imported."""

_HALF = (1 << 64) - 1


class Owner:
    """One thread or task, and the leases that it has acquired and that have not ended."""

    def __init__(self) -> None:
        # Not from `random`: a program may have seeded it with a constant, on every host, and relies on what follows.
        self.number = int.from_bytes(os.urandom(8), "big") >> 3
        """Tells this owner from the others, in the names of its requests."""
        # Any thread may end a lease and so remove it here. One operation on a dict is atomic.
        self._leases: dict[LeaseState, tuple[object, Hold] | None] = {}
        self._process = 0
        self._prefix = ""

    def new_attempt(self) -> str:
        """Return the name of a new request: a random UUID, as Postgres reads it.

        The requests of one owner have the same first half. By it the database sees which locks a waiter holds, and so
        whether waiters wait for each other.
        """
        process = os.getpid()
        if process != self._process:
            # A child of this process has the same numbers.
            self._process, self._prefix = process, f"{hash((self.number, process)) & _HALF:016x}"
        return self._prefix + os.urandom(8).hex()

    def add(self, state: LeaseState) -> None:
        """Record a lease of this owner. The lease removes itself at its end."""
        self._leases[state] = None
        if state.ended:  # before this call, or in another thread
            self.remove(state)

    def remove(self, state: LeaseState) -> None:
        """Forget a lease that has ended."""
        self._leases.pop(state, None)

    @property
    def holds_any(self) -> bool:
        """Whether a lease of this owner has not ended, as of the last event."""
        return bool(self._leases)

    def begin_hold(self, runtime: object, hold: Hold) -> None:
        """Let reentrant locks of this runtime share a lease that was added before, until its end."""
        if hold.grant in self._leases:
            self._leases[hold.grant] = runtime, hold
            if hold.grant.ended:  # in another thread, after the check above
                self._leases.pop(hold.grant, None)

    def hold(self, runtime: object, name: str) -> Hold | None:
        """Return the latest grant of a lock that this owner may share; None if there is none."""
        for state, shared in reversed(list(self._leases.items())):
            if shared is not None and state.lock == name and shared[0] is runtime:
                return shared[1]
        return None

    def leases(self) -> list[LeaseState]:
        """Return the leases that this owner holds at this moment, of all clients."""
        return [state for state in list(self._leases) if state.remaining()]


def caller() -> Owner:
    """Return the owner that calls: the running task, or else the thread or greenlet."""
    local = _local if type(_local) is threading.local else _new_local()
    # A program that has not imported asyncio runs no task, and need not import it for this.
    asyncio = _asyncio or _find_asyncio()
    if asyncio is not None and asyncio._get_running_loop() is not None:
        task = asyncio.current_task()
        if task is not None:
            return _owner_of(task, local)
    try:
        owner: Owner = local.owner
    except AttributeError:
        owner = local.owner = Owner()
    return owner


def assert_locked(name: str) -> None:
    """Raise NotLocked unless the calling thread or task holds a lease of this lock now, from any client.

    Nothing is sent: the lease is held if it is inside its trust window. Leases of every kind of lock pass, also
    those of readers and of efficiency locks.
    """
    check_name(name)
    if not any(state.lock == name for state in caller().leases()):
        raise NotLocked(name)


def _new_local() -> Any:
    """Return the store for a process that was patched after this module was imported."""
    global _local
    with _making:
        if type(_local) is not threading.local:
            _local = threading.local()
        return _local


def _owner_of(task: Any, local: Any) -> Owner:
    if not hasattr(local, "tasks"):
        local.tasks = weakref.WeakKeyDictionary()
    owner: Owner | None = local.tasks.get(task)
    if owner is None:
        owner = local.tasks[task] = Owner()
    return owner


def _find_asyncio() -> Any:
    """Return asyncio if it is imported. Another thread may be in the middle of the import."""
    global _asyncio
    found: Any = sys.modules.get("asyncio")
    if hasattr(found, "_get_running_loop") and hasattr(found, "current_task"):
        _asyncio = found
    return _asyncio
