"""The duration of a short command."""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import pytest

from tests.support.shell import Shell

pytestmark = pytest.mark.second_stage


def slowdown() -> float:
    """Return the ratio of wall time to processor time of a program that only computes, on this machine, now."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-I", "-S", "-c", "sum(range(2_000_000))"], check=True)
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took / (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


@pytest.mark.alone
def test_ls_starts_quickly(shell: Shell) -> None:
    """From start to end, against a running database. The fastest run counts, as if the machine were idle."""

    def took() -> float:
        began = time.perf_counter()
        assert shell.run_process("ls", cold=True).code == 0
        return time.perf_counter() - began

    times = [took() / max(slowdown(), 1.0) for _ in range(15)]
    assert min(times) <= 0.35, times
