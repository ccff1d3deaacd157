"""The measure of lateness, which decides whether a test may blame the machine."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from tests.support.machine import measured


def children() -> set[int]:
    return {int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_nap_that_is_late_when_it_is_asked_about_counts() -> None:
    before = children()
    with measured() as lateness:
        (sleeper,) = children() - before
        os.kill(sleeper, signal.SIGSTOP)
        threading.Timer(0.4, os.kill, (sleeper, signal.SIGCONT)).start()
        assert lateness() > 0.3
