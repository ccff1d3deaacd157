"""Freeze a whole Postgres: it accepts connections, and answers nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dblock.embedded.processes import pids_working_in


def send_signal(pids: Iterable[int], what: signal.Signals) -> int:
    """Send a signal to these processes; return how many received it."""
    signalled = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, what)
            signalled += 1
    return signalled


@contextmanager
def frozen(data: Path) -> Iterator[int]:
    """Stop all processes of the server with this data folder; yield their number.

    The postmaster comes first: once it is stopped, no process joins the server.
    """
    postmaster = int((data / "postmaster.pid").read_text().splitlines()[0])
    try:
        os.kill(postmaster, signal.SIGSTOP)
        _wait_until_stopped(postmaster)
        yield send_signal(pids_working_in(data), signal.SIGSTOP)
    finally:
        send_signal(pids_working_in(data), signal.SIGCONT)


def _wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + 20
    while (state := Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]) != "T":
        assert time.monotonic() < deadline, f"process {pid} is in state {state}"
        time.sleep(0.001)
