"""The clock of a memory client: the test's clock, which stops for a client that is frozen."""

from __future__ import annotations

from dblock.testing.clock import Clock


class MemoryClientClock:
    """Counts the trust windows of one client."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        """The clock that the test moves."""
        self._stopped_at: float | None = None
        self.calendar = clock.calendar

    def __call__(self) -> float:
        """Return the seconds since the start of the test's clock."""
        return self.clock._now if self._stopped_at is None else self._stopped_at

    @property
    def least_pause(self) -> float:
        """Seconds between two checks at least. After `stop`, a check finds the same time left again."""
        return 0.0 if self._stopped_at is None else 1.0

    def stop(self) -> None:
        """Stop, as if the process did not run."""
        self._stopped_at = self()

    def resume(self) -> None:
        """Continue with the time of the test, as after a pause that has lasted from `stop` until now."""
        self._stopped_at = None
