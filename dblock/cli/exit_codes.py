"""The exit codes of the command line. Scripts rely on them, so they do not change (docs/reference/cli.md)."""

from __future__ import annotations

OK = 0
FAILED = 1
"""The command failed; standard error has the reason."""
USAGE_ERROR = 2
"""The command line is invalid."""
DOCTOR_WARNING = 3
"""`dblock doctor`: the worst finding is a warning."""
DOCTOR_ERROR = 4
"""`dblock doctor`: the worst finding is an error."""
UNREACHABLE = 69
"""The database could not be reached, or stopped replying."""
BUG = 70
"""An unexpected error in dblock; --debug shows where."""
NOT_ACQUIRED = 75
"""`dblock run`: the lock was not acquired."""
LEASE_LOST = 76
"""`dblock run`: the lease was lost, and the command was ended."""
CANNOT_EXECUTE = 126
"""`dblock run`: the command exists but cannot be executed."""
NOT_FOUND = 127
"""`dblock run`: the command was not found."""
INTERRUPTED = 130
"""The command was interrupted by Ctrl-C."""
