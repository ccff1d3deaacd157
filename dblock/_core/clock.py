"""The clock on which trust windows are counted. It never jumps. On Linux it runs on while the machine sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]

if hasattr(time, "CLOCK_BOOTTIME"):

    def now() -> float:
        """Return the seconds since a fixed moment in the past."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:
    now = time.monotonic


def wall(clock: Clock, moment: float) -> float:
    """Return a moment of a clock in seconds since 1970: by the clock's own calendar, or else by the machine's."""
    calendar: Callable[[float], float] | None = getattr(clock, "calendar", None)
    return time.time() - (clock() - moment) if calendar is None else calendar(moment)


def monotonic() -> float:
    """Return the time on dblock's monotonic clock, in seconds. Compare it with `lease.trusted_until`.

    It is CLOCK_BOOTTIME on Linux, so it runs on while the machine sleeps, and `time.monotonic()` elsewhere.
    """
    return now()
