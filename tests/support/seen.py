"""Locks, places and notes as the database would tell of them, made by hand."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from dblock.admin.inspect import Event, LockState, Waiter

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


def held(name: str, holder: str = "ann", token: int | None = 1, left: float = 30.0, **others: Any) -> LockState:
    """Return a lock that somebody holds."""
    facts: dict[str, Any] = {
        "meta": None, "granted_at": NOON, "expires_at": NOON + timedelta(seconds=left), "released_at": None,
        "forced_at": None, "waiting": 0,
    }  # fmt: skip
    return LockState(name=name, number=token or 0, holder=holder, remaining=left, **(facts | others))


def free(name: str, token: int | None = 1, *, released: bool = True, waiting: int = 0) -> LockState:
    """Return a lock that nobody holds, released or run out."""
    return LockState(name, token or 0, None, None, NOON, None if released else NOON, NOON if released else None, None,
    0.0,
                     waiting)  # fmt: skip


def place(name: str, number: int, holder: str, seconds: float = 1.0) -> Waiter:
    """Return a place in line."""
    return Waiter(name, number, holder, NOON, seconds)


def note(number: int, event: str, name: str = "a", token: int | None = 1, holder: str = "ann") -> Event:
    """Return a note in the history."""
    return Event(NOON, name, token, event, holder, None, None, number)
