"""The clock of a client under test, which a verb of chaos and `prove_fenced` can stop."""

from __future__ import annotations

import threading

from dblock._core import clock

PAUSE = 10 * 365 * 86_400.0
"""Seconds that a pause lasts. Longer than any ttl."""


class ClientClock:
    """The process's clock, unless the client is frozen."""

    def __init__(self) -> None:
        self._stopped_at: float | None = None

    def __call__(self) -> float:
        """Return the seconds since a fixed moment in the past."""
        return clock.now() if self._stopped_at is None else self._stopped_at

    def stop(self) -> None:
        """Stop, as if the process did not run."""
        self._stopped_at = clock.now()

    def resume(self) -> None:
        """Continue with the real time, as after a pause that has lasted from `stop` until now."""
        self._stopped_at = None


def past_ttl() -> float:
    """Return the time for a lease whose holder was paused for longer than any ttl.

    The threads of dblock do not see the pause, so they neither call back nor cancel the holder's body. Every check that
    the holder makes itself finds the loss.
    """
    paused = 0.0 if threading.current_thread().name.startswith("dblock") else PAUSE
    return clock.now() + paused
