"""Build locks, waiters and history events by hand, as dblock.admin.inspect reads them from the database."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from dblock.admin.inspect import Event, LockState, Waiter

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


def held_lock(name: str, holder: str = "ann", token: int | None = 1, left: float = 30.0, **others: Any) -> LockState:
    """Return a lock that is held."""
    facts: dict[str, Any] = {
        "meta": None, "granted_at": NOON, "expires_at": NOON + timedelta(seconds=left), "released_at": None,
        "forced_at": None, "waiting": 0,
    }  # fmt: skip
    return LockState(name=name, number=token or 0, holder=holder, remaining=left, **(facts | others))


def free_lock(name: str, token: int | None = 1, *, released: bool = True, waiting: int = 0) -> LockState:
    """Return a free lock: its last lease was released, or expired."""
    return LockState(name, token or 0, None, None, NOON, None if released else NOON, NOON if released else None, None,
    0.0,
                     waiting)  # fmt: skip


def waiter(name: str, number: int, holder: str, seconds: float = 1.0) -> Waiter:
    """Return a waiter in a lock's queue."""
    return Waiter(name, number, holder, NOON, seconds)


def history_event(number: int, event: str, name: str = "a", token: int | None = 1, holder: str = "ann") -> Event:
    """Return an event of the history."""
    return Event(NOON, name, token, event, holder, None, None, number)
