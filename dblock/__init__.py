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
    from dblock.client import AsyncClient, Client
    from dblock.errors import (
        AccessDenied,
        ClientClosed,
        ConfigurationError,
        DatabaseError,
        DblockError,
        EmbeddedError,
        InvalidArgument,
        LeaseLost,
        LockTimeout,
        LoginRefused,
        NoFencingToken,
        NotWritable,
        SchemaError,
        SchemaMissing,
        SchemaOutdated,
        SchemaTooNew,
        TermsForgotten,
        TransferRefused,
        Unavailable,
        UnsuitableServer,
    )
    from dblock.lease import AsyncEfficiencyLease, AsyncLease, EfficiencyLease, Lease
    from dblock.lock import AsyncLock, Lock
    from dblock.recipes.elections import AsyncElection, AsyncTerm, Election, Leader, Term, Vacancy
    from dblock.recipes.schedules.run import current_run

__version__ = "0.1.0"

__all__ = [
    "SKIPPED",
    "AccessDenied",
    "AsyncClient",
    "AsyncEfficiencyLease",
    "AsyncElection",
    "AsyncLease",
    "AsyncLock",
    "AsyncTerm",
    "Client",
    "ClientClosed",
    "ConfigurationError",
    "DatabaseError",
    "DblockError",
    "EfficiencyLease",
    "Election",
    "EmbeddedError",
    "Holder",
    "InvalidArgument",
    "Leader",
    "Lease",
    "LeaseLost",
    "Lock",
    "LockTimeout",
    "LoginRefused",
    "NoFencingToken",
    "NotWritable",
    "Reason",
    "SchemaError",
    "SchemaMissing",
    "SchemaOutdated",
    "SchemaTooNew",
    "Term",
    "TermsForgotten",
    "TransferRefused",
    "Unavailable",
    "UnsuitableServer",
    "Vacancy",
    "Waiter",
    "current_run",
    "monotonic",
]

_HOME = {
    "AsyncClient": "client",
    "AsyncEfficiencyLease": "lease",
    "AsyncElection": "recipes.elections",
    "AsyncLease": "lease",
    "AsyncLock": "lock",
    "AsyncTerm": "recipes.elections",
    "Client": "client",
    "EfficiencyLease": "lease",
    "Election": "recipes.elections",
    "Holder": "_core.replies",
    "Leader": "recipes.elections",
    "Lease": "lease",
    "Lock": "lock",
    "Reason": "_core.lease_state",
    "SKIPPED": "_core.slots",
    "Term": "recipes.elections",
    "Vacancy": "recipes.elections",
    "Waiter": "_core.replies",
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
