"""Describe this machine, and measure how much of it other programs took while a block ran.

A block is disturbed if processes that do not belong to the benchmark, or the host of a virtual machine, took more than
a small part of the processors. This does not depend on how late anything was, because a benchmark that uses every
processor makes itself late.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from pathlib import Path

from bench.harness import usage

LIMIT = 0.05
"""The part of all processors that others may take in a block that counts as undisturbed."""

USER, NICE, SYSTEM, STEAL = 1, 2, 3, 8
"""Fields of a line of /proc/stat."""


class Watch:
    """Measures what others took since this began, as a part of all processors."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._busy, self._stolen = _totals()
        self._ours = usage.cpu(os.getpid())

    def disturbance(self) -> float:
        """Return the part, from 0 to 1."""
        busy, stolen = _totals()
        ours = usage.cpu(os.getpid()) - self._ours
        others = max(busy - self._busy - ours, 0.0) + stolen - self._stolen
        return others / max((time.monotonic() - self._began) * (os.cpu_count() or 1), 1e-9)


def _totals() -> tuple[float, float]:
    """Return the busy and the stolen seconds of all processors."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return 0.0, 0.0
    return sum(int(fields[part]) for part in (USER, NICE, SYSTEM)) * usage.TICK, int(fields[STEAL]) * usage.TICK


def describe() -> dict[str, str]:
    """Return what is worth knowing about this machine."""
    found = {"processors": str(os.cpu_count()), "architecture": platform.machine(), "kernel": platform.release()}
    try:
        models = [
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        if models:
            found["processor"] = models[0]
        total = Path("/proc/meminfo").read_text().split()[1]
        found["memory"] = f"{int(total) / 2**20:.0f} GB"
    except (OSError, IndexError, ValueError):
        pass
    found["python"] = platform.python_version()
    return found


def fsync_time(folder: Path, times: int = 50) -> float:
    """Return the median seconds that a write of 8 kB takes to reach the disk of this folder."""
    path, taken = folder / "fsync", []
    with open(path, "wb", buffering=0) as file:
        for _ in range(times):
            file.seek(0)
            file.write(b"x" * 8192)
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            taken.append(time.perf_counter() - began)
    path.unlink()
    return sorted(taken)[times // 2]


def pin(pids: set[int], core: int) -> None:
    """Let these processes run on one core only, if the machine has two or more. Their later children do too."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) > 1:
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended
                for task in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(task), {cores[core % len(cores)]})


def unpin(pids: set[int]) -> None:
    """Let these processes run on every core that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended
                for task in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(task), os.sched_getaffinity(0))
