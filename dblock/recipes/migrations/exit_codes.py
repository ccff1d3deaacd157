"""The exit codes of programs that run migrations behind a gate: those of `dblock migrate`."""

from __future__ import annotations

from dblock.errors import DatabaseAhead, DblockError, LeaseLost, LockTimeout, MigrationFailed, SessionsRemain

EXIT_CODES: dict[type[DblockError], int] = {
    LockTimeout: 75,
    LeaseLost: 76,
    MigrationFailed: 65,
    DatabaseAhead: 66,
    SessionsRemain: 67,
}


def exit_code(error: DblockError) -> int:
    """Return the exit code for an error: 1 unless its kind has one of its own."""
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)
