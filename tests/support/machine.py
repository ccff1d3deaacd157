"""Measure how late this machine is, so that a claim about time is not judged by what other programs took.

A process that does nothing but sleep shows what the machine gave: it wakes late by as much as everything else did. A
virtual machine also reports the time that its host took from each processor.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

NAP = 0.005

_SLEEPER = f"""
import select, sys, time
worst = 0.0
began = time.monotonic()
while True:
    asked = select.select([sys.stdin], [], [], {NAP})[0]
    # A question may arrive before this process runs again: then this nap too was late.
    woken = time.monotonic()
    worst = max(worst, woken - began - {NAP})
    # The next nap begins here, so that no moment lies between two naps.
    began = woken
    if asked:
        if not sys.stdin.readline():
            break
        print(worst, flush=True)
"""


class Host:
    """Counts the seconds that the host of a virtual machine took from one of its processors, since this began."""

    def __init__(self) -> None:
        self._began = self._stolen()

    def took(self) -> float:
        """Return the seconds. It is the most that a program on one processor lost; 0 where they are not counted."""
        return max((now - began for now, began in zip(self._stolen(), self._began, strict=False)), default=0.0)

    @staticmethod
    def _stolen() -> list[float]:
        if not (counts := Path("/proc/stat")).exists():
            return []
        lines = [line.split() for line in counts.read_text().splitlines()]
        processors = [line for line in lines if line[0].startswith("cpu") and line[0] != "cpu"]
        return [int(line[8]) / os.sysconf("SC_CLK_TCK") for line in processors]


def too_late_to_renew(lateness: float, ttl: float) -> bool:
    """Return whether a lease may have been lost only because the machine was late.

    A renewal is due after a third of the ttl. Then three processes wake up one after another: the client, the server
    that renews, and the client that reads the reply.
    """
    return 3 * lateness > ttl * 2 / 3


@contextmanager
def soon(within: float) -> Iterator[None]:
    """Fail if the body takes longer, apart from the time by which this machine was late."""
    with measured() as lateness:
        began = time.monotonic()
        yield
        took = time.monotonic() - began
        assert took < within + lateness(), f"took {took:.2f} s"


@contextmanager
def before_long(within: float) -> Iterator[None]:
    """Fail if the body takes longer by more seconds than a machine stands still.

    It catches a body that waits for something that does not end by itself. Where a shorter wait counts too, another
    test uses `soon`.
    """
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < within + 8, f"took {took:.2f} s"


@contextmanager
def measured() -> Iterator[Callable[[], float]]:
    """Yield a function that returns by how many seconds this machine was late, since this began.

    It adds what a sleeping process was late at most, and what the host took in sum: that delays each of many steps.
    Enter it before you acquire a lease that has to be renewed: on a busy machine the process takes long to start, and
    an event loop does nothing else until then.
    """
    sleeper = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _SLEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert sleeper.stdin is not None
    assert sleeper.stdout is not None
    asks, hears = sleeper.stdin, sleeper.stdout

    host = Host()

    def lateness() -> float:
        asks.write("\n")
        asks.flush()
        return float(hears.readline()) + host.took()

    try:
        lateness()  # it sleeps by now
        yield lateness
    finally:
        with asks, hears:
            asks.close()
            sleeper.wait()
