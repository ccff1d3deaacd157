"""The whole Postgres: killed, crashed by one of its own, stopped for a while, restarted in good order.

What is not waited for stays in the server's memory for long, so that a grant that was answered too early goes with it.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import psycopg

from dblock.embedded import Server
from dblock.embedded.processes import pids_working_in
from tests.robustness.faults import Fault

if TYPE_CHECKING:
    from tests.robustness.traffic.stage import Stage

LAZY = {"wal_writer_delay": "10s", "wal_writer_flush_after": "1GB", "commit_delay": "0", "fsync": "off"}
"""What was written to the kernel outlives every process: to wait for the disk too would only make recoveries slow."""

LONGEST_TTL = 2.0


def tell(pids: Iterable[int], what: signal.Signals) -> int:
    """Send a signal to all of these; the result is how many were there to get it."""
    told = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, what)
            told += 1
    return told


def kill_everything(server: Server) -> int:
    """End the server as a failure of its machine would, but for the disk; the result is how many processes it had."""
    killed: set[int] = set()
    # Once more for those that were being forked meanwhile.
    while pids := pids_working_in(server.data):
        if new := pids - killed:
            tell(new, signal.SIGKILL)
            killed |= new
        else:
            time.sleep(0.005)
    return len(killed)


class Crash(Fault):
    """Every process of the server is killed at once; then it is started again, and recovers."""

    name = "crash"
    effect = "killed"
    settings = LAZY

    def strike(self, stage: Stage, dice: random.Random) -> dict[str, object]:
        killed = kill_everything(stage.server)
        time.sleep(dice.choice([0, 0, dice.uniform(0, 0.3)]))
        stage.server.stop()  # there is nothing to stop; but our child should be buried
        stage.server.start()
        return {"killed": killed}


class CrashOne(Fault):
    """One session's process is killed; the server ends all the others, and recovers."""

    name = "crash-one"
    effect = "killed"
    settings = LAZY

    def strike(self, stage: Stage, dice: random.Random) -> dict[str, object]:
        with psycopg.connect(stage.direct, autocommit=True) as owner:
            found = owner.execute("SELECT pid FROM pg_stat_activity WHERE application_name = 'dblock'").fetchall()
            if not found:
                return {"killed": 0}
            os.kill(dice.choice(sorted(found))[0], signal.SIGKILL)
            with suppress(psycopg.OperationalError):
                while True:  # until this session is ended with the others
                    owner.execute("SELECT pg_sleep(5)")
        deadline = time.monotonic() + 30
        while not stage.server.answers():
            assert time.monotonic() < deadline, "the server did not recover"
            time.sleep(0.01)
        return {"killed": 1}


class StopServer(Fault):
    """All processes of the server are stopped, for less or more than leases last, and go on."""

    name = "stop-server"
    effect = "stopped"

    def strike(self, stage: Stage, dice: random.Random) -> dict[str, object]:
        pids = pids_working_in(stage.server.data)
        seconds = dice.choice([0.1, 0.5, 1.3]) * LONGEST_TTL * dice.uniform(0.8, 1.2)
        try:
            tell(pids, signal.SIGSTOP)
            time.sleep(seconds)
        finally:
            # What the postmaster was forking at that moment is not among those.
            tell(pids | pids_working_in(stage.server.data), signal.SIGCONT)
        return {"stopped": len(pids), "seconds": seconds}


class Restart(Fault):
    """The server is restarted in good order, ending its sessions."""

    name = "restart"

    def strike(self, stage: Stage, dice: random.Random) -> dict[str, object]:
        stage.server.stop()
        stage.server.start()
        return {}
