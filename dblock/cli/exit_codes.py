"""The exit codes of the command line. Scripts rely on them, so they do not change (docs/reference/cli.md).

`dblock run`, `dblock migrate` and `dblock once` exit with the code of their command. Their own errors are therefore all
from 64 to 78, as in sysexits.h.
"""

from __future__ import annotations

from dblock.errors import (
    AccessDenied,
    ConfigurationError,
    DatabaseAhead,
    DatabaseError,
    EmbeddedError,
    InvalidArgument,
    LeaseLost,
    LockTimeout,
    LoginRefused,
    MigrationFailed,
    NotWritable,
    SchemaError,
    SessionsRemain,
    Unavailable,
    UnsuitableServer,
)

OK = 0
FAILED = 1
"""The command did nothing, because there was nothing to do or it was not confirmed; standard error has the reason."""
USAGE_ERROR = 2
"""The command line is invalid."""
DOCTOR_WARNING = 3
"""`dblock doctor`: the worst finding is a warning. `dblock certify`: a guarantee does not hold, or is weaker.
`dblock schedules --overdue`: a schedule is overdue."""
NO_LEADER = 3
"""`dblock leader`: the election has no leader."""
DOCTOR_ERROR = 4
"""`dblock doctor`: the worst finding is an error."""
RUN_USAGE_ERROR = 64
"""`dblock run` and `dblock migrate`: the command line is invalid."""
MIGRATION_FAILED = 65
"""`dblock migrate`: this version has failed, here or on another replica, and is not run again."""
DATABASE_AHEAD = 66
"""`dblock migrate`: the database is at a newer version than the caller."""
SESSIONS_REMAIN = 67
"""`dblock migrate`: sessions of an earlier run could not be ended, so nothing was run."""
UNREACHABLE = 69
"""The database could not be reached, stopped replying, or accepts no writes."""
BUG = 70
"""An unexpected error in dblock; --debug shows where."""
REFUSED = 71
"""The database replied with an error."""
NOT_WRITTEN = 74
"""The output could not be written."""
NOT_ACQUIRED = 75
"""`dblock run` and `dblock migrate`: the lock was not acquired, or the version was not done in time."""
LEASE_LOST = 76
"""`dblock run` and `dblock migrate`: the lease was lost, and the command was ended."""
ACCESS_DENIED = 77
"""The role lacks a privilege."""
NOT_CONFIGURED = 78
"""No database is named, the server refuses the login, a setting cannot be used, or the schema does not fit."""
CANNOT_EXECUTE = 126
"""`dblock run` and `dblock migrate`: the command exists but cannot be executed."""
NOT_FOUND = 127
"""`dblock run` and `dblock migrate`: the command was not found."""
INTERRUPTED = 130
"""The command was interrupted by Ctrl-C."""

_CODES: dict[type[BaseException], int] = {
    LockTimeout: NOT_ACQUIRED,
    LeaseLost: LEASE_LOST,
    MigrationFailed: MIGRATION_FAILED,
    DatabaseAhead: DATABASE_AHEAD,
    SessionsRemain: SESSIONS_REMAIN,
    Unavailable: UNREACHABLE,
    NotWritable: UNREACHABLE,
    EmbeddedError: UNREACHABLE,
    LoginRefused: NOT_CONFIGURED,
    AccessDenied: ACCESS_DENIED,
    SchemaError: NOT_CONFIGURED,
    UnsuitableServer: NOT_CONFIGURED,
    ConfigurationError: NOT_CONFIGURED,
    ImportError: NOT_CONFIGURED,
    InvalidArgument: USAGE_ERROR,
    DatabaseError: REFUSED,
    OSError: NOT_WRITTEN,
}
"""The exit code of each error; the first class that fits counts."""


def code_of(error: BaseException) -> int:
    """Return the exit code of an error."""
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), FAILED)


def under_run(code: int) -> int:
    """Return the code that `dblock run` and `dblock migrate` use instead, which is none of a command's usual codes."""
    return {USAGE_ERROR: RUN_USAGE_ERROR, FAILED: REFUSED}.get(code, code)
