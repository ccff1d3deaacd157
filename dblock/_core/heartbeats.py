"""Whether the heartbeats of a client's waiters get replies."""

from __future__ import annotations

import logging

from dblock._core.outage import Outage

AWAY_FOR = 5.0
"""Seconds without a heartbeat after which the waiters are woken, so that each sees that the database is away."""


class Heartbeats:
    """The outcomes of the heartbeats."""

    def __init__(self) -> None:
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
        if now - self._away_since < AWAY_FOR:
            return False
        self._away_since = now
        return True
