"""Tie a process to its parent: the kernel kills it when the parent ends in any way, even while it is stopped."""

from __future__ import annotations

import ctypes
import signal
import sys


def die_with_parent() -> None:
    """Ask the kernel to kill this process as soon as the thread that started it ends (only on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
