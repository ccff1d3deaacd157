"""Freeze a whole Postgres: it accepts connections, and answers nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dblock.embedded.processes import pids_working_in
from tests.support.eventually import eventually


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
        eventually(lambda: _state_of(postmaster) == "T", lambda: f"a stop, in state {_state_of(postmaster)}")
        yield send_signal(pids_working_in(data), signal.SIGSTOP)
    finally:
        send_signal(pids_working_in(data), signal.SIGCONT)


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
