"""Move the end of a lease's trust window, as no event of production does without a loss."""

from __future__ import annotations

from dblock._core.holds import HeldState
from dblock._core.lease_state import LeaseState

BOOK_KEEPING = ("dblock._core.observation", "dblock._core.holds")
"""The modules whose callbacks at the end of a lease tell nothing to its holder."""


def trust_for(state: LeaseState, seconds: float) -> None:
    """Let the holder believe in its lease for so many seconds from now, and no longer.

    With 0 seconds, the next check finds the lease lost, as in a process that was paused for longer than the ttl.
    """
    object.__setattr__(state, "_trusted_until", state.now() + seconds)


def keep_news(state: LeaseState) -> None:
    """Keep from the holder what would come to it by itself: callbacks, events, the cancellation of its body.

    They may come late in production, so that code must be safe without them. A check still finds the loss.
    """
    with state._lock:
        for ending in state._endings:
            held = getattr(ending, "__self__", None)
            if isinstance(held, HeldState):
                held._endings.clear()
        state._endings[:] = [one for one in state._endings if one.__module__ in BOOK_KEEPING]
