"""The notification that a client sends to itself, to learn whether notifications come through."""

from __future__ import annotations

import math

PROBE_WITHIN = 2.0
"""Seconds after which a notification that the client sent to itself is taken to be lost."""

LOST = (
    "listener: notifications do not come through, perhaps because of a pooler in transaction mode. Waiters poll "
    "several times a second instead, so a lock changes hands only some ten times a second. Set listen_dsn to a DSN "
    "that leads past the pooler."
)


class NotificationProbe:
    """Waits for the notification. The thread that reads the connection may be another one."""

    def __init__(self) -> None:
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
        return math.inf if sent_at is None else sent_at + PROBE_WITHIN

    def is_lost(self, now: float) -> bool:
        """Return whether the notification has not come in time. Do not expect it any longer."""
        if now < self.due_at():
            return False
        self._sent_at = None
        return True
