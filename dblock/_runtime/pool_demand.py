"""Whether a pool needs another connection.

A round trip is short and a connection expensive. So a call that has to wait is no reason to open one, and neither is a
burst of calls, which one connection works off. A pool needs another connection in two cases:

- No connection comes back, because the server takes long over the calls that are under way. On a slow machine all
  calls take longer, so the limit is a multiple of the usual time between two returns.
- The queue lasts for a second, although several times as many calls as it ever held have been served: their callers
  come back at once.
"""

from __future__ import annotations

import math

GROW_AFTER = 0.2
"""Seconds for which calls wait, at least, before one of them opens another connection."""

LASTS_AFTER = 1.0
"""Seconds after which a queue counts as one that lasts. A crowd of waiters that is served takes less."""

STUCK_AFTER = 20
"""How many times the usual time between two returns has to pass without one. Then the connections seem to be stuck."""

STUCK_AT_LATEST = 1.0
"""Seconds after which they do, however long the usual time is."""

ROUNDS = 3
"""How often a queue has to be worked off, at its greatest length, before it counts as one that lasts."""

WEIGHT = 0.2
"""The weight of the last return in the usual time between two."""


class Demand:
    """What the queue of one pool has seen. Not safe for threads."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._queued_since = math.inf
        """Since when the queue has not been empty."""
        self._returned_at = -math.inf
        """When a connection last came back."""
        self._usual = 0.0
        """The usual seconds between two returns while calls wait."""
        self._longest = self._served = 0
        """The greatest length of the queue since then, and how many connections came back."""

    def waits(self, length: int, now: float) -> None:
        """Record that a call has joined the queue, which has this length now."""
        if length == 1:
            self._queued_since, self._longest, self._served = now, 0, 0
        self._longest = max(self._longest, length)

    def returned(self, now: float) -> None:
        """Record that a connection came back."""
        if self._queued_since < math.inf:
            self._usual += WEIGHT * (now - max(self._queued_since, self._returned_at) - self._usual)
            self._served += 1
        self._returned_at = now

    def over(self) -> None:
        """Record that no call waits any more."""
        self._queued_since = math.inf

    def is_unmet(self, now: float) -> bool:
        """Return whether to open another connection."""
        if now - self._queued_since >= LASTS_AFTER and self._served >= ROUNDS * self._longest:
            return True
        patience = min(max(GROW_AFTER, STUCK_AFTER * self._usual), STUCK_AT_LATEST)
        return now - max(self._queued_since, self._returned_at) >= patience
