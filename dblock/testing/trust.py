"""Move the end of a lease's trust window, as no event of production does without a loss."""

from __future__ import annotations

from dblock._core.lease_state import LeaseState


def trust_for(state: LeaseState, seconds: float) -> None:
    """Let the holder believe in its lease for so many seconds from now, and no longer.

    With 0 seconds, the next check finds the lease lost, as in a process that was paused for longer than the ttl. What
    would come to the holder by itself (a callback, the cancellation of its body) still comes at its old time.
    """
    object.__setattr__(state, "_trusted_until", state.now() + seconds)
