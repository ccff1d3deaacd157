"""Measure how late this machine is, so that a claim about time is not judged by what other programs took.

A process that hardly does anything but sleep shows what the machine gave: it wakes late by as much as everything else
did, and its little work takes as much longer. A virtual machine also reports the time that its host took from each
processor.
"""

from __future__ import annotations

import math
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

NAP = 0.02
WORK = 0.0005
"""Seconds of processor time that the sleeper uses after each nap, to see what share of a processor it gets."""

SLOW = 6
"""A machine counts as late by a second if, for a second, it gives a process less than 1/SLOW of a processor."""

_SLEEPER = f"""
import os, select, socket, sys, time
given, parent = socket.socket(fileno=0), os.getppid()
listening = [given] if sys.argv[1] == "shared" else []
now = time.monotonic()
askers = {{}} if listening else {{given: [0.0, 0.0, 0, now]}}
began = now
while os.getppid() == parent and (listening or askers):
    asked = select.select([*listening, *askers], [], [], {NAP})[0]
    # A question may arrive before this process runs again: then this nap too was late.
    woken = time.monotonic()
    until = time.thread_time() + {WORK}
    while time.thread_time() < until:
        pass
    # The next nap begins here, so that no moment lies between two naps.
    now = time.monotonic()
    late = max(woken - began - {NAP}, now - woken - {WORK})
    for asker, (worst, taken, naps, since) in askers.items():
        worst, taken, naps = max(worst, late), taken + now - woken, naps + 1
        if now - since > 1:
            worst = max(worst, 1.0 if taken > {SLOW * WORK} * naps else 0.0)
            taken, naps, since = 0.0, 0, now
        askers[asker] = [worst, taken, naps, since]
    began = now
    for one in asked:
        if one in listening:
            askers[one.accept()[0]] = [0.0, 0.0, 0, now]
            continue
        try:
            question = one.recv(1)
            one.send(b"%24.9f" % askers[one][0])
        except OSError:
            question = b""
        if question == b"r":
            askers[one] = [0.0, 0.0, 0, now]
        elif not question:
            del askers[one]
            one.close()
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
        counts = Path("/proc/stat")
        stolen = re.findall(r"^cpu\d+(?: \d+){7} (\d+)", counts.read_text() if counts.exists() else "", re.MULTILINE)
        return [int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in stolen]


NOT_JUDGED = "not judged: the machine was"

UNSAFE = "wrong on any machine"
"""In the message of a failure that no lateness excuses, such as two holders of one lock."""


def not_judged(to: str) -> NoReturn:
    """End a test of which the machine was too late to do its part."""
    error = sys.exc_info()[1]
    pytest.skip(f"{NOT_JUDGED} too late {to}" + (f": {error!r}" if error else ""))


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
    """Fail if the body takes more than 8 s longer: it waits for something that does not end by itself.

    No machine stands still for so long. To claim speed, use `soon`.
    """
    measuring()
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < within + 8, f"took {took:.2f} s"


def measuring() -> None:
    """Do nothing: the first stage notices this call, and refuses a test that measures a duration."""


@contextmanager
def measured() -> Iterator[Callable[[], float]]:
    """Yield a function that returns by how many seconds this machine was late, since this began.

    It adds what a sleeping process was late at most, and what the host took in sum: that delays each of many steps.
    Enter it before you acquire a lease that has to be renewed: on a busy machine the process takes long to start, and
    an event loop does nothing else until then.
    """
    measuring()
    host = Host()

    def lateness() -> float:
        late = sleeper.worst()
        assert late < math.inf, "the process that measures the lateness of the machine has ended"
        return late + host.took()

    with Sleeper() as sleeper:
        yield lateness


class Sleeper:
    """A process that hardly does anything but sleep, and says by how many seconds the machine was late."""

    def __init__(self, shared: str | None = None) -> None:
        """`shared` is the address of one that others ask too; see share."""
        self._shared = shared

    def __enter__(self) -> Sleeper:
        if self._shared is None:
            self._asks, end = socket.socketpair()
            with end:
                self._process = _start(end, "own")
        else:
            self._asks = socket.socket(socket.AF_UNIX)
            self._asks.connect(self._shared)
        self.worst()  # it sleeps by now
        return self

    def worst(self, reset: bool = False) -> float:
        """Return by how much it was late at most. With `reset`, the next answer counts from now on."""
        try:
            self._asks.send(b"r" if reset else b"a")
            return float(self._asks.recv(24, socket.MSG_WAITALL))
        except (OSError, ValueError):
            return math.inf  # it was killed

    def __exit__(self, *_: object) -> None:
        self._asks.close()
        if self._shared is None:
            self._process.terminate()  # a child that the body has forked may have the socket open
            self._process.wait()


@contextmanager
def share(address: str) -> Iterator[None]:
    """Start a sleeper for several processes: each costs 3 % of a processor."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        process = _start(listening, "shared")
    yield
    process.terminate()
    process.wait()


def _start(stdin: socket.socket, kind: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", _SLEEPER, kind], stdin=stdin.fileno())
