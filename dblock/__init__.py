"""A lock service in the Postgres you already run: leases with fencing tokens, in grant order, always.

client = dblock.Client("postgresql://…")
with client.lock("invoice:42", ttl=30, timeout=5) as lease:
    ...  # lease.token rises with every grant of this lock
"""

import logging

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
    NotWritable,
    SchemaError,
    SchemaMissing,
    SchemaOutdated,
    SchemaTooNew,
    Unavailable,
)
from dblock.lease import AsyncLease, Lease
from dblock.lock import AsyncLock, Lock
from dblock.steps import Holder

__version__ = "0.1.0"

__all__ = [
    "AccessDenied",
    "AsyncClient",
    "AsyncLease",
    "AsyncLock",
    "Client",
    "ClientClosed",
    "DatabaseError",
    "DblockError",
    "EmbeddedError",
    "Holder",
    "InvalidArgument",
    "Lease",
    "LeaseLost",
    "Lock",
    "LockTimeout",
    "NotWritable",
    "SchemaError",
    "SchemaMissing",
    "SchemaOutdated",
    "SchemaTooNew",
    "Unavailable",
]

logging.getLogger("dblock").addHandler(logging.NullHandler())
