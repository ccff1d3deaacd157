"""Move the end of a lease's trust window, as no event of production does without a loss."""

from __future__ import annotations

from dblock._core.lease_state import LeaseState


def trust_for(state: LeaseState, seconds: float) -> None:
    """Let the holder believe in its lease for so many seconds from now, and no longer."""
    object.__setattr__(state, "_trusted_until", state.now() + seconds)
