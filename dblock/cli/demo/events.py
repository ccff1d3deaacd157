"""What happened in the story: one event after the other, apart from how they are shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

KINDS = {
    "act": "a part of the story begins",
    "here": "a worker's process is there",
    "held": "the lock was granted",
    "tried": "the lock was asked for, and another has it",
    "waits": "a worker stands in line",
    "renewed": "the lease was extended",
    "released": "the lock was given back",
    "expired": "the lease ran out, by the database's clock",
    "lost": "a worker learns that its lease is over",
    "read": "the balance was read",
    "stored": "a write was stored",
    "corrupted": "a write was stored that undid another's",
    "refused": "the fence refused a write",
    "frozen": "the process was stopped (SIGSTOP)",
    "woken": "the process goes on (SIGCONT)",
    "killed": "the process was killed (SIGKILL)",
    "sums": "the books were added up",
    "tokens": "the tokens, in the order of the grants",
}
"""Each kind of event, and what it says."""


@dataclass(frozen=True)
class Event:
    """Something that has happened."""

    at: float
    """Seconds since both workers were there."""
    act: str
    """The part of the story: its title."""
    who: str
    """The worker; empty for what the conductor found out."""
    kind: str
    """One of KINDS."""
    text: str
    token: int | None = None
    amount: int | None = None
    """The balance that was read or written, or that the ledger shows in the end."""
    due: int | None = None
    """The balance that the ledger should show."""


Say = Callable[[Event], None]
"""Is told each event when it has happened."""
