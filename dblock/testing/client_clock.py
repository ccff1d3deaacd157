"""The clock of a client under test: it can stand still, or find that a long pause has passed."""

from __future__ import annotations

import threading

from dblock._core import clock

PAUSE = 10 * 365 * 86_400.0
"""Seconds that a pause lasts. Longer than any ttl."""


class ClientClock:
    """The process's clock, unless the client is frozen or has been paused."""

    def __init__(self) -> None:
        self._stands_at: float | None = None
        self._paused = False

    def __call__(self) -> float:
        """Return the seconds since a fixed moment in the past."""
        if self._stands_at is not None:
            return self._stands_at
        now = clock.now()
        # The threads of dblock learn of the pause later than the holder. So what would come to the holder by itself (a
        # callback, the cancellation of its body) does not come, while each check of its own finds the loss.
        if self._paused and not threading.current_thread().name.startswith("dblock"):
            now += PAUSE
        return now

    def stand(self) -> None:
        """Stand still, as in a process that does not run."""
        self._stands_at = clock.now()

    def run(self) -> None:
        """Run on, with the right time."""
        self._stands_at = None

    def pass_ttl(self) -> None:
        """Find that a pause has passed that was longer than any ttl."""
        self._stands_at, self._paused = None, True
