"""Truth 4: a holder that was stopped past its lease knows of the loss before it can act as the holder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import psycopg
import pytest

import dblock
from tests.support.eventually import eventually
from tests.support.machine import UNSAFE
from tests.support.stages import first
from tests.support.warm_start import Program

AT_ONCE = 10
TTL = 1.2

HOLDER = """
import json, sys, time, dblock
client = dblock.Client(sys.argv[1])
with client.lock(f"warm {sys.argv[3]}"):
    # If it were stopped while the keep-alive is still connecting, the reason could be either of two.
    # The same holds while the first lease is being tied to its presence.
    while not (client._runtime.keepalive.flow.schedule._reached and client._runtime.flows.presence):
        time.sleep(0.01)
    time.sleep(0.1)
for line in sys.stdin:
    asked = time.monotonic()
    lease = client.lock(line.strip(), ttl=float(sys.argv[2])).acquire()
    print(json.dumps({"token": lease.token, "asked": asked}), flush=True)
    sys.stdin.readline()
    # It is stopped in the line above. This is the first line that runs afterwards.
    lost, left = lease.lost.is_set(), lease.remaining()
    report = {"lost": lost, "left": left, "reason": str(lease.lost.reason), "released": lease.release()}
    try:
        lease.renew()
    except dblock.LeaseLost as error:
        report["renew"] = error.reason
    print(json.dumps(report), flush=True)
"""


@contextmanager
def kill_on_failure(holder: subprocess.Popen[str]) -> Iterator[None]:
    """Kill the process if the block fails, because a stopped process would never exit."""
    try:
        yield
    except BaseException:
        holder.kill()
        raise


class Trial(NamedTuple):
    """One holder that was stopped past its lease."""

    report: dict[str, Any]
    token: int
    next_token: int
    before_first_renewal: bool
    """Whether the holder was stopped before its first renewal could begin."""


def trials(dsn: str, number: int, times: int) -> list[Trial]:
    """Stop one holder past its lease repeatedly."""
    reports = []
    with (
        Program(
            [sys.executable, "-c", HOLDER, dsn, str(TTL), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as holder,
        dblock.Client(dsn) as client,
    ):
        assert holder.stdin is not None
        assert holder.stdout is not None
        with kill_on_failure(holder):
            for trial in range(times):
                name = f"{number}:{trial}"
                holder.stdin.write(f"{name}\n")
                holder.stdin.flush()
                granted = json.loads(holder.stdout.readline())
                holder.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
                # A renewal is due after a third of the ttl. The keep-alive may take it along half as early.
                in_time = time.monotonic() < granted["asked"] + TTL / 6
                with client.lock(name, timeout=30) as lease:
                    holder.stdin.write("go on\n")
                    holder.stdin.flush()
                    holder.send_signal(signal.SIGCONT)
                    report = json.loads(holder.stdout.readline())
                    reports.append(Trial(report, granted["token"], lease.token, in_time))
                    current = client.lock(name).holder()
                    assert current is not None
                    assert current.token == lease.token, "the stopped holder has changed the next holder's lease"
            holder.stdin.close()
    return reports


@pytest.mark.second_stage
@pytest.mark.parametrize("times", [1, *first(0, [3]), pytest.param(20, marks=pytest.mark.nightly)])
def test_stopped_holder_finds_its_lease_lost_when_it_resumes(dsn: str, times: int) -> None:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        reports = [
            one for some in threads.map(lambda number: trials(dsn, number, times), range(AT_ONCE)) for one in some
        ]
    assert len(reports) == times * AT_ONCE
    for trial in reports:
        why = "expired"
        if not trial.before_first_renewal and trial.report["reason"] in ("unreachable", "superseded"):
            # The machine was late, and the holder was stopped while a renewal was under way, or about to be sent.
            why = trial.report["reason"]
        assert trial.report == {"lost": True, "left": 0.0, "reason": why, "released": False, "renew": why}
        assert trial.next_token > trial.token, UNSAFE


@pytest.mark.second_stage
def test_paused_holder_run_catches_a_trust_window_that_is_too_long(dsn: str, owner: psycopg.Connection) -> None:
    """The same holder with a trust window that is longer than the ttl. It must not lose its lease before it is stopped,
    so it does not renew it.
    """
    believing = HOLDER.replace("lease = ", "from dblock._core import acquire; acquire.TRUST = 60.0\n    lease = ")
    believing = believing.replace("ttl=float(sys.argv[2])", "ttl=float(sys.argv[2]), keep_alive=False")
    believing = believing.replace("    report = {", "    print(json.dumps({'lost': lost}), flush=True)\n    report = {")
    with Program(
        [sys.executable, "-c", believing, dsn, "0.5", "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        with kill_on_failure(holder):
            holder.stdin.write("a\n")
            holder.stdin.flush()
            holder.stdout.readline()
            holder.send_signal(signal.SIGSTOP)
            eventually(lambda: not owner.execute("SELECT 1 FROM holder('a')").fetchone(), "the end of the lease")
            with owner.transaction():
                # The keep-alive must not find out before the holder reports: its renewal waits for this table.
                owner.execute("LOCK TABLE distributed_locks")
                holder.stdin.write("go on\n")
                holder.stdin.flush()
                holder.send_signal(signal.SIGCONT)
                assert json.loads(holder.stdout.readline()) == {"lost": False}
            holder.stdin.close()
