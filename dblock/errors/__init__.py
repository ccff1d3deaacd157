"""Every error that dblock raises, under one base.

    DblockError
    ├── InvalidArgument        (also a ValueError)   refused before anything was sent
    │   └── ConfigurationError no database is named, or a setting cannot be used
    ├── LockTimeout            (also a TimeoutError) the lock was not acquired before the timeout
    ├── DeadlockDetected       the wait was part of a cycle of waits, and was ended
    ├── LeaseLost              the lease is no longer held, or can no longer be known to be held
    ├── NoFencingToken         an efficiency lock has no fencing token
    ├── WrongKind              the name belongs to a lock of another kind
    ├── PermitsDiffer          the semaphore has another number of permits
    ├── UpgradeRefused         a reader asked for the write lock without releasing its read lease
    ├── NotLocked              the calling thread or task does not hold the lock that the code relies on
    ├── ClientClosed           the client was closed
    ├── MigrationFailed        a version has failed, here or on another replica, and is not run again
    ├── MigrationBlocked       a migration could not lock a table in time, or deadlocked
    ├── DatabaseAhead          the database is at a newer version than the caller
    ├── SessionsRemain         sessions of an earlier migration could not be ended
    ├── TransferRefused        the named candidate cannot lead next
    ├── TermsForgotten         an observer asks for terms that are not kept any more
    ├── WaitTimeout            (also a TimeoutError) a barrier did not trip, or a latch did not open, in time
    ├── CountsDiffer           clients give different numbers for one barrier or latch
    ├── DatabaseError          the database could not be asked, did not reply, or replied with an error
    │   ├── Unavailable        no connection, or it broke; the call may have taken effect
    │   ├── NotWritable        a standby, or a server in read-only mode
    │   ├── LoginRefused       wrong password, unknown role or database, or no CONNECT
    │   ├── AccessDenied       the role may not call dblock's functions
    │   ├── UnsuitableServer   the server does not behave as dblock needs it
    │   └── SchemaError        dblock's schema does not fit this client
    │       ├── SchemaMissing
    │       ├── SchemaOutdated
    │       └── SchemaTooNew
    └── EmbeddedError          the embedded Postgres could not be started, found or stopped

A message says what happened, to which lock, and what to do next. No message contains a password, and neither does any
exception that an error is chained to.
"""

from dblock.errors.base import (
    ClientClosed,
    ConfigurationError,
    DblockError,
    EmbeddedError,
    InvalidArgument,
)
from dblock.errors.database import (
    AccessDenied,
    ClaimBusy,
    DatabaseError,
    LoginRefused,
    NotWritable,
    SchemaError,
    SchemaMissing,
    SchemaOutdated,
    SchemaTooNew,
    Unavailable,
    UnsuitableServer,
)
from dblock.errors.locks import (
    CycleWait,
    DeadlockDetected,
    LeaseLost,
    LockTimeout,
    NoFencingToken,
    NotLocked,
    PermitsDiffer,
    UpgradeRefused,
    WrongKind,
)
from dblock.errors.recipes import (
    CountsDiffer,
    DatabaseAhead,
    MigrationBlocked,
    MigrationFailed,
    SessionsRemain,
    TermsForgotten,
    TransferRefused,
    WaitTimeout,
)

__all__ = [
    "AccessDenied",
    "ClaimBusy",
    "ClientClosed",
    "ConfigurationError",
    "CountsDiffer",
    "CycleWait",
    "DatabaseAhead",
    "DatabaseError",
    "DblockError",
    "DeadlockDetected",
    "EmbeddedError",
    "InvalidArgument",
    "LeaseLost",
    "LockTimeout",
    "LoginRefused",
    "MigrationBlocked",
    "MigrationFailed",
    "NoFencingToken",
    "NotLocked",
    "NotWritable",
    "PermitsDiffer",
    "SchemaError",
    "SchemaMissing",
    "SchemaOutdated",
    "SchemaTooNew",
    "SessionsRemain",
    "TermsForgotten",
    "TransferRefused",
    "Unavailable",
    "UnsuitableServer",
    "UpgradeRefused",
    "WaitTimeout",
    "WrongKind",
]
