"""The events of the story, independent of how they are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

KINDS = {
    "act": "a part of the story starts",
    "here": "a worker's process has started",
    "held": "the lock was granted",
    "tried": "a worker asked for the lock, and another holds it",
    "waits": "a worker is in the queue",
    "renewed": "the lease was extended",
    "released": "the lock was released",
    "expired": "the lease expired, by the database's clock",
    "lost": "a worker learned that its lease was lost",
    "read": "the balance was read",
    "stored": "a write was stored",
    "corrupted": "a write was stored that undid another deposit",
    "refused": "the fence refused a write",
    "frozen": "the process was stopped (SIGSTOP)",
    "woken": "the process continues (SIGCONT)",
    "killed": "the process was killed (SIGKILL)",
    "sums": "the books were added up",
    "tokens": "the tokens, in the order of the grants",
}
"""Each kind of event and its meaning."""


@dataclass(frozen=True)
class Event:
    """One event of the story."""

    at: float
    """Seconds since both workers had started."""
    act: str
    """The title of the part of the story."""
    worker: str
    """The worker; empty for events of the conductor."""
    kind: str
    """One of KINDS."""
    text: str
    token: int | None = None
    amount: int | None = None
    """The balance that was read or written, or the ledger's final balance."""
    due: int | None = None
    """The balance that the ledger should show."""


Say = Callable[[Event], None]
"""Receives each event when it has happened."""
