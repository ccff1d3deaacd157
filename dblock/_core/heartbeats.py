"""Whether the heartbeats of a client's waiters get replies."""

from __future__ import annotations

import logging

from dblock._core.outage import Outage
from dblock._core.timings import Timings


class Heartbeats:
    """The outcomes of the heartbeats."""

    def __init__(self, timings: Timings) -> None:
        self._away_for = timings.away_for
        self._outage = Outage("listener: heartbeats succeed again", logging.INFO)
        self.reset()

    def reset(self) -> None:
        """Forget since when there has been no reply."""
        self._away_since: float | None = None

    def worked(self) -> None:
        """Record that a heartbeat got a reply."""
        self._outage.worked()
        self._away_since = None

    def are_away(self, error: Exception, now: float) -> bool:
        """Record that a heartbeat got no reply. Return whether there has been none for long."""
        self._outage.failed("listener: heartbeat of the waiters failed, will retry: %s", error)
        self._away_since = self._away_since or now
        if now - self._away_since < self._away_for:
            return False
        self._away_since = now
        return True
