"""The clock of a client under test: a verb of chaos can stop it, and `prove_fenced` can let it skip a long pause."""

from __future__ import annotations

import threading

from dblock._core import clock

PAUSE = 10 * 365 * 86_400.0
"""Seconds that a pause lasts. Longer than any ttl."""


class ClientClock:
    """The process's clock, unless the client is frozen or has been paused."""

    def __init__(self) -> None:
        self._stopped_at: float | None = None
        self._paused = False

    def __call__(self) -> float:
        """Return the seconds since a fixed moment in the past."""
        if self._stopped_at is not None:
            return self._stopped_at
        now = clock.now()
        # The threads of dblock do not see the pause, so they neither call back nor cancel the holder's body. Every
        # check that the holder makes itself finds the loss.
        if self._paused and not threading.current_thread().name.startswith("dblock"):
            now += PAUSE
        return now

    def stop(self) -> None:
        """Stop, as if the process did not run."""
        self._stopped_at = clock.now()

    def resume(self) -> None:
        """Continue with the real time, as after a pause that has lasted from `stop` until now."""
        self._stopped_at = None

    def resume_past_ttl(self) -> None:
        """Continue as after a pause that was longer than any ttl."""
        self._stopped_at, self._paused = None, True
