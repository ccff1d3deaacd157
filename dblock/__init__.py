"""A lock service in the Postgres you already run: leases with fencing tokens, in grant order, always.

client = dblock.Client("postgresql://…")
with client.lock("invoice:42", ttl=30, timeout=5) as lease:
    ...  # lease.token rises with every grant of this lock
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from dblock._runtime.forks import importing

if TYPE_CHECKING:
    from dblock._core.clock import monotonic
    from dblock._core.lease_state import Reason
    from dblock._core.replies import Holder, Waiter
    from dblock._core.slots import SKIPPED
    from dblock._runtime.owners import assert_locked
    from dblock.async_client import AsyncClient
    from dblock.client import Client
    from dblock.decorators import current_lease
    from dblock.errors import (
        AccessDenied,
        ClientClosed,
        ConfigurationError,
        CountsDiffer,
        DatabaseError,
        DblockError,
        DeadlockDetected,
        EmbeddedError,
        InvalidArgument,
        LeaseLost,
        LockTimeout,
        LoginRefused,
        NoFencingToken,
        NotLocked,
        NotWritable,
        PermitsDiffer,
        SchemaError,
        SchemaMissing,
        SchemaOutdated,
        SchemaTooNew,
        TermsForgotten,
        TransferRefused,
        Unavailable,
        UnsuitableServer,
        UpgradeRefused,
        WaitTimeout,
        WrongKind,
    )
    from dblock.lease import AsyncEfficiencyLease, AsyncLease, EfficiencyLease, Lease
    from dblock.lock import AsyncLock, Lock
    from dblock.lock_set import AsyncLockSet, LockSet
    from dblock.recipes.barriers import AsyncBarrier, AsyncLatch, Barrier, Latch
    from dblock.recipes.elections import AsyncElection, AsyncTerm, Election, Leader, Term, Vacancy
    from dblock.recipes.schedules.run import current_run
    from dblock.shared import (
        AsyncPermitLease,
        AsyncReadLease,
        AsyncSemaphore,
        AsyncSharedLock,
        AsyncWriteLease,
        PermitLease,
        ReadLease,
        Semaphore,
        SharedLock,
        WriteLease,
    )

__version__ = "0.1.0"

__all__ = [
    "SKIPPED",
    "AccessDenied",
    "AsyncBarrier",
    "AsyncClient",
    "AsyncEfficiencyLease",
    "AsyncElection",
    "AsyncLatch",
    "AsyncLease",
    "AsyncLock",
    "AsyncLockSet",
    "AsyncPermitLease",
    "AsyncReadLease",
    "AsyncSemaphore",
    "AsyncSharedLock",
    "AsyncTerm",
    "AsyncWriteLease",
    "Barrier",
    "Client",
    "ClientClosed",
    "ConfigurationError",
    "CountsDiffer",
    "DatabaseError",
    "DblockError",
    "DeadlockDetected",
    "EfficiencyLease",
    "Election",
    "EmbeddedError",
    "Holder",
    "InvalidArgument",
    "Latch",
    "Leader",
    "Lease",
    "LeaseLost",
    "Lock",
    "LockSet",
    "LockTimeout",
    "LoginRefused",
    "NoFencingToken",
    "NotLocked",
    "NotWritable",
    "PermitLease",
    "PermitsDiffer",
    "ReadLease",
    "Reason",
    "SchemaError",
    "SchemaMissing",
    "SchemaOutdated",
    "SchemaTooNew",
    "Semaphore",
    "SharedLock",
    "Term",
    "TermsForgotten",
    "TransferRefused",
    "Unavailable",
    "UnsuitableServer",
    "UpgradeRefused",
    "Vacancy",
    "WaitTimeout",
    "Waiter",
    "WriteLease",
    "WrongKind",
    "assert_locked",
    "current_lease",
    "current_run",
    "monotonic",
]

_HOME = {
    "AsyncBarrier": "recipes.barriers",
    "AsyncClient": "async_client",
    "AsyncEfficiencyLease": "lease",
    "AsyncElection": "recipes.elections",
    "AsyncLatch": "recipes.barriers",
    "AsyncLease": "lease",
    "AsyncLock": "lock",
    "AsyncPermitLease": "shared",
    "AsyncReadLease": "shared",
    "AsyncSemaphore": "shared",
    "AsyncSharedLock": "shared",
    "AsyncLockSet": "lock_set",
    "AsyncTerm": "recipes.elections",
    "AsyncWriteLease": "shared",
    "Barrier": "recipes.barriers",
    "Client": "client",
    "EfficiencyLease": "lease",
    "Election": "recipes.elections",
    "Holder": "_core.replies",
    "Latch": "recipes.barriers",
    "Leader": "recipes.elections",
    "Lease": "lease",
    "Lock": "lock",
    "PermitLease": "shared",
    "ReadLease": "shared",
    "LockSet": "lock_set",
    "Reason": "_core.lease_state",
    "SKIPPED": "_core.slots",
    "Semaphore": "shared",
    "SharedLock": "shared",
    "Term": "recipes.elections",
    "Vacancy": "recipes.elections",
    "Waiter": "_core.replies",
    "WriteLease": "shared",
    "assert_locked": "_runtime.owners",
    "current_lease": "decorators",
    "current_run": "recipes.schedules.run",
    "monotonic": "_core.clock",
}
"""The module of each name. All other names are errors."""

logging.getLogger("dblock").addHandler(logging.NullHandler())


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that a short command does not pay for the whole package."""
    if name not in __all__:
        raise AttributeError(f"module 'dblock' has no attribute {name!r}")
    with importing:
        found = getattr(import_module(f"dblock.{_HOME.get(name, 'errors')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
