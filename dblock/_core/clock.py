"""The clock that trust windows are counted on: it never jumps, and on Linux it goes on while the machine sleeps."""

from __future__ import annotations

import time

if hasattr(time, "CLOCK_BOOTTIME"):

    def now() -> float:
        """Return the seconds since some moment in the past."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:
    now = time.monotonic
