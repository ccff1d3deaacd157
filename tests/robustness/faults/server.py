"""Strike the whole Postgres: kill it, crash it by one of its processes, stop it for a while, restart it in order.

A commit that was not waited for stays in the server's memory for long, so that a grant that was acknowledged too early
is lost with the server.
"""

from __future__ import annotations

import random
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psycopg

from dblock.embedded import Server
from dblock.embedded.processes import pids_working_in
from tests.robustness.faults import Fault
from tests.support.eventually import eventually
from tests.support.frozen import frozen, send_signal

if TYPE_CHECKING:
    from tests.robustness.traffic.environment import Environment

LAZY = {"wal_writer_delay": "10s", "wal_writer_flush_after": "1GB", "commit_delay": "0", "fsync": "off"}
"""What was written to the kernel outlives every process, so waiting for the disk would only slow down recoveries."""

LONGEST_TTL = 2.0

SESSIONS = "SELECT pid FROM pg_stat_activity WHERE application_name = 'dblock'"


def kill_all_processes(server: Server) -> int:
    """Kill the server as a failure of its machine would, except for the disk; return its number of processes."""
    killed: set[int] = set()
    # Again for processes that were being forked at the time.
    while pids := pids_working_in(server.data):
        if new := pids - killed:
            send_signal(new, signal.SIGKILL)
            killed |= new
        else:
            time.sleep(0.005)
    return len(killed)


class Crash(Fault):
    """Kill every process of the server at once, then start it again, so that it recovers."""

    name = "crash"
    effect = "killed"
    settings = LAZY

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        killed = kill_all_processes(env.server)
        time.sleep(rng.choice([0, 0, rng.uniform(0, 0.3)]))
        env.server.stop()  # reaps the dead child process
        env.server.start()
        return {"killed": killed}


class CrashOne(Fault):
    """Kill the process of one session, so that the server ends all others and recovers."""

    name = "crash-one"
    effect = "killed"
    settings = LAZY

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        killed = 0
        with psycopg.connect(env.direct, autocommit=True) as owner, suppress(psycopg.OperationalError):
            # Until the server ends this session too: the chosen one may have ended by itself.
            while found := owner.execute(SESSIONS).fetchall():
                killed = send_signal([rng.choice(sorted(found))[0]], signal.SIGKILL)
                owner.execute("SELECT pg_sleep(%s)", [5 * killed])
            return {"killed": 0}
        eventually(env.server.answers, "the server has recovered")
        return {"killed": killed}


class StopServer(Fault):
    """Stop all processes of the server for less or more than leases last, and then let them continue."""

    name = "stop-server"
    effect = "stopped"

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        seconds = rng.choice([0.1, 0.5, 1.3]) * LONGEST_TTL * rng.uniform(0.8, 1.2)
        with frozen(env.server.data) as stopped:
            time.sleep(seconds)
        return {"stopped": stopped, "seconds": seconds}


class Restart(Fault):
    """Restart the server in order, which ends its sessions."""

    name = "restart"

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        env.server.stop()
        env.server.start()
        return {}
