"""Processes that go when whoever started them does, however that ends, and even while they are stopped."""

from __future__ import annotations

import ctypes
import signal
import sys


def die_with_parent() -> None:
    """Have the kernel kill this process as soon as the thread that started it is gone; on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
