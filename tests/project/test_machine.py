"""The measure of lateness, which decides whether a test may blame the machine."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.machine import measured


def children() -> set[int]:
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        # A thread of an earlier test may end at this moment.
        with suppress(FileNotFoundError, ProcessLookupError):
            found |= {int(pid) for pid in Path(f"/proc/self/task/{thread}/children").read_text().split()}
    return found


@pytest.mark.second_stage
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_nap_that_is_late_when_it_is_asked_about_counts() -> None:
    before = children()
    with measured() as lateness:
        (sleeper,) = children() - before
        os.kill(sleeper, signal.SIGSTOP)
        threading.Timer(0.4, os.kill, (sleeper, signal.SIGCONT)).start()
        assert lateness() > 0.3


@pytest.mark.second_stage
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_lateness_is_unknown_once_its_process_has_ended() -> None:
    others = children()
    with measured() as lateness:
        (sleeper,) = children() - others
        os.kill(sleeper, signal.SIGKILL)
        with pytest.raises(AssertionError, match="has ended"):
            eventually(lambda: lateness() < 0, within=20)
