"""The exit codes of the command line. They are a promise: scripts rely on them (docs/reference/cli.md)."""

from __future__ import annotations

DONE = 0
FAILED = 1
"""It could not be done; standard error says why."""
NOT_UNDERSTOOD = 2
"""The command line itself makes no sense."""
WARNINGS = 3
"""`dblock doctor`: its worst finding is a warning."""
ERRORS = 4
"""`dblock doctor`: its worst finding is an error."""
UNREACHABLE = 69
"""The database could not be reached, or stopped answering."""
BUG = 70
"""Something that should not happen; --debug shows where."""
NOT_ACQUIRED = 75
"""`dblock run`: another holds the lock."""
LOST = 76
"""`dblock run`: the lease was lost, and the command was ended."""
CANNOT_EXECUTE = 126
"""`dblock run`: the command is there and cannot be executed."""
NOT_FOUND = 127
"""`dblock run`: there is no such command."""
INTERRUPTED = 130
"""By Ctrl-C."""
