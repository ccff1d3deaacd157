"""The notification that a client sends to itself, to learn whether notifications come through."""

from __future__ import annotations

import math

from dblock._core.timings import Timings

LOST = (
    "listener: notifications do not come through, perhaps because of a pooler in transaction mode. Waiters poll "
    "several times a second instead, so a lock changes hands only some ten times a second. Set listen_dsn to a DSN "
    "that leads past the pooler."
)


class NotificationProbe:
    """Waits for the notification. The thread that reads the connection may be another one."""

    def __init__(self, timings: Timings) -> None:
        self._within = timings.probe_within
        self._sent_at: float | None = None

    def sent(self, now: float) -> None:
        """Expect the notification from now on."""
        self._sent_at = now

    def came(self) -> None:
        """Mark that a notification came, whichever it was."""
        self._sent_at = None

    def due_at(self) -> float:
        """Return when it is lost; never, if none is expected."""
        sent_at = self._sent_at  # read once, because another thread may receive the notification
        return math.inf if sent_at is None else sent_at + self._within

    def is_lost(self, now: float) -> bool:
        """Return whether the notification has not come in time. Do not expect it any longer."""
        if now < self.due_at():
            return False
        self._sent_at = None
        return True
