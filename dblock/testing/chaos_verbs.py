"""Chaos verbs: make happen in a test what goes wrong in production.

`Chaos` names the verbs, so that `PostgresChaos` (dblock.testing.chaos) and `MemoryChaos` (dblock.testing.memory.chaos)
offer the same ones. This module also checks the arguments of both.
"""

from __future__ import annotations

import math
import re
from typing import Any, Protocol

from dblock._core.lease_state import LeaseState
from dblock._core.options import Seconds, brief
from dblock.errors import InvalidArgument


class Chaos(Protocol):
    """What can go wrong. Every verb is undone at the end of the test."""

    def freeze(self, lease: Any) -> None:
        """Freeze the holder. Until `thaw`, its lease is not renewed, and it learns of no loss."""

    def thaw(self, lease: Any) -> None:
        """Let a frozen holder continue. It finds out at once whether it still holds the lock."""

    def expire(self, lease: Any) -> None:
        """Let the ttl of a lease pass. Its holder finds out at once, unless it is frozen."""

    def steal(self, name: str) -> Any:
        """Take a lock from its holder, past all waiters, and return the lease of the thief."""

    def cut_listener(self) -> int:
        """End the connections over which clients are woken; return how many."""

    def kill_backend(self) -> int:
        """End all connections of the clients; return how many."""

    def deny(self, sqlstate: str) -> None:
        """Refuse every call with this SQLSTATE, until `allow`."""

    def slow(self, ms: float) -> None:
        """Let every call take so many milliseconds longer, until `slow(0)`."""

    def allow(self) -> None:
        """End `deny` and `slow`."""

    def step_clock(self, seconds: Seconds) -> None:
        """Move the database's clock forward, or back if negative."""


def state_of(lease: Any) -> LeaseState:
    """Return the state of a lease. The leases of a reentrant lock have one state in common."""
    state = lease if isinstance(lease, LeaseState) else getattr(lease, "_state", None)
    state = getattr(state, "grant", state)
    if not isinstance(state, LeaseState):
        raise InvalidArgument(f"This verb takes a lease, which lock.acquire() returns; got {brief(lease)}.")
    return state


def check_sqlstate(sqlstate: str) -> None:
    """Raise InvalidArgument unless this is the SQLSTATE of an error."""
    if not isinstance(sqlstate, str) or not re.fullmatch("[0-9A-Z]{5}", sqlstate):
        raise InvalidArgument(
            f"A SQLSTATE is text of five digits and capital letters, such as '53300'; got {brief(sqlstate)}."
        )
    if sqlstate.startswith("00"):
        raise InvalidArgument(f"The SQLSTATE {sqlstate!r} means success. Give one of an error, such as '53300'.")


def check_delay(ms: float) -> None:
    """Raise InvalidArgument unless this is a delay in milliseconds."""
    if not isinstance(ms, (int, float)) or not 0 <= ms < math.inf:
        raise InvalidArgument(f"A call takes 0 ms longer or more, as a number; got {brief(ms)}.")
