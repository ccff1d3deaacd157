"""What a step is, and what the database answers to one.

Whatever takes more than one step is written as a generator that yields the steps it needs and is sent their results; a
runner performs them. See dblock._core.acquire.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any, NamedTuple, Protocol, TypeVar

T = TypeVar("T")
Row = tuple["str | None", ...]


GIVE_UP_WITHIN = 2.0
"""Seconds that each step of giving up an unanswered call may take: to cancel it, to see it end, to undo it."""


class Call(NamedTuple):
    """Call one of the database's functions; the result is its row as text, or None. Safe to send twice."""

    sql: bytes
    args: tuple[str | None, ...]
    again: bytes | None = None
    """What to send after the connection broke, if not the same: the first sending may have been done."""
    within: float = math.inf
    """Seconds to wait for the answer; never longer than the client's patience."""
    giving_up: float = GIVE_UP_WITHIN
    """Seconds to cancel it when there was none, and as many again to see it end."""


class Place(Protocol):
    """A place in line, in this process: what a waiter waits at."""

    had_ticket: bool
    """Whether it ever had a ticket."""

    def ticket_issued(self, first: bool, look_in: float) -> None:
        """Take note that it has a ticket, and whether somebody should look in for it, and when."""

    def ticket_redeemed(self) -> None:
        """Take note that its ticket is about to be redeemed or given up."""

    def defer_cleanup(self) -> None:
        """Take note that its ticket could not be given up, and must be."""

    def leave(self) -> None:
        """Be no longer in line."""

    def wait(self, seconds: float) -> Any:
        """Wait until woken, or for that long; an awaitable for a task."""


class Wait(NamedTuple):
    """Wait at a place until woken, but not for longer than so many seconds."""

    place: Place
    seconds: float


class Sleep(NamedTuple):
    """Let this many seconds pass."""

    seconds: float


Flow = Generator["Call | Sleep | Wait", Any, T]
