"""How the graph names its locks and participants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dblock._core.printing import duration, printable

if TYPE_CHECKING:
    from dblock.admin.inspect import LockState


def holder_text(lock: LockState) -> str | None:
    """Return a lock's holder. A lock with shares has as many holders as shares that are held."""
    if lock.held is None:
        return lock.holder
    if lock.permits is not None:
        return f"{lock.held} of {lock.permits} permits"
    return f"{lock.held} holder{'' if lock.held == 1 else 's'}" if lock.held else None


def participant_name(participant: str) -> str:
    """Return a participant's name, safe to print."""
    return printable(participant) if participant else "an unnamed participant"


def lock_details(lock: LockState) -> str:
    """Return a lock's token and remaining time."""
    if lock.state == "free":
        return "free"
    if lock.held is not None:
        return f"{lock.kind}, {holder_text(lock)}"
    token = f"token {lock.token}" if lock.token else "without durability"
    forced = ", told to release" if lock.state == "forced" else ""
    return f"{token}, {duration(lock.remaining)} left{forced}"
