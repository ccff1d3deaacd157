"""A lock service in the Postgres you already run: leases with fencing tokens, in grant order, always.

client = dblock.Client("postgresql://…")
with client.lock("invoice:42", ttl=30, timeout=5) as lease:
    ...  # lease.token rises with every grant of this lock
"""

import logging

from dblock.calls import Holder, Waiter
from dblock.client import AsyncClient, Client
from dblock.errors import (
    AccessDenied,
    ClientClosed,
    DatabaseError,
    DblockError,
    EmbeddedError,
    InvalidArgument,
    LeaseLost,
    LockTimeout,
    NoFencingToken,
    NotWritable,
    SchemaError,
    SchemaMissing,
    SchemaOutdated,
    SchemaTooNew,
    Unavailable,
)
from dblock.hold import Reason
from dblock.lease import AsyncEfficiencyLease, AsyncLease, EfficiencyLease, Lease
from dblock.lock import AsyncLock, Lock

__version__ = "0.1.0"

__all__ = [
    "AccessDenied",
    "AsyncClient",
    "AsyncEfficiencyLease",
    "AsyncLease",
    "AsyncLock",
    "Client",
    "ClientClosed",
    "DatabaseError",
    "DblockError",
    "EfficiencyLease",
    "EmbeddedError",
    "Holder",
    "InvalidArgument",
    "Lease",
    "LeaseLost",
    "Lock",
    "LockTimeout",
    "NoFencingToken",
    "NotWritable",
    "Reason",
    "SchemaError",
    "SchemaMissing",
    "SchemaOutdated",
    "SchemaTooNew",
    "Unavailable",
    "Waiter",
]

logging.getLogger("dblock").addHandler(logging.NullHandler())
