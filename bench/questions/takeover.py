"""How long does a waiter wait for the lock of a holder that was killed, or frozen?

The holder has a lease of 5 s. A second after its grant its process gets SIGKILL, which closes its connections, or
SIGSTOP, which does not. A waiter that was there before, or one that asks right after the signal, gets the lock later.
The time is from the signal to the grant. A dash means: not within 9 s. The three run at the same time, because their
processes do nothing but wait.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from bench.harness.arena import SESSION
from bench.harness.contender import Contender
from bench.harness.question import Question, Run
from bench.harness.rounds import Block, Sample
from bench.harness.table import Column, Goal, Table
from bench.harness.workers import Team

COLUMNS = (
    Column("kill", "SIGKILL: a waiter gets the lock after s", digits=2, checked=0.5),
    Column("late", "SIGKILL, then a newcomer: after s", digits=2, drawn=False, checked=0.5),
    Column("stop", "SIGSTOP: a waiter gets the lock after s", digits=2),
)

LIMIT = 9.0
PEERS = ("redis-py", "python-redis-lock", "kazoo", "etcd v3lock", *SESSION)
"""Whether Redis waits for its disk makes no difference to a lease that has to expire."""

GOALS = (Goal("dblock", "kill", "", 0.3), Goal("dblock", "late", "", 0.3))


def measure(run: Run) -> list[Table]:
    ttl, before = run.pick(5.0, 1.0), run.pick(1.0, 0.2)
    limit = run.pick(LIMIT, 3.0)
    # A quick run has no time for leases that cannot be short.
    peers = run.pick(PEERS, ("redis-py", "pg_advisory_lock"))
    blocks: dict[str, Block] = {}
    for name in ("dblock", *peers):
        options = {} if name in SESSION else {"ttl": ttl}
        for one in run.arena.contenders(name, **options):
            blocks[name] = partial(_signals, one, before, limit)
    table = Table("takeover", "a holder with a lease of 5 s", "redis-py", COLUMNS)
    return [table.fill(run.interleave(blocks, 3), GOALS)]


def _signals(contender: Contender, before: float, limit: float) -> Sample:
    taken_over = partial(_taken_over, contender, before, limit)
    with ThreadPoolExecutor() as threads:
        found = {
            "kill": threads.submit(taken_over, signal.SIGKILL),
            "late": threads.submit(taken_over, signal.SIGKILL, late=True),
            "stop": threads.submit(taken_over, signal.SIGSTOP),
        }
        return {column: one.result() for column, one in found.items()}


def _taken_over(contender: Contender, before: float, limit: float, number: signal.Signals, late: bool = False) -> float:
    """Return the seconds from the signal to the next grant."""
    name = f"taken over {number.name} {late} {time.monotonic_ns()}"
    with Team(contender, 1) as waiter, Team(contender, 1) as holder:
        waiter.run("pairs", seconds=0.0)
        holder.run("hold", name=name)
        if not late:
            waiter.begin("get", name=name)
        time.sleep(before)
        (pid,) = holder.pids
        sent = time.monotonic()
        os.kill(pid, number)
        if late:
            waiter.begin("get", name=name)
        try:
            if not waiter.done_within(limit):
                for process in waiter.processes:
                    process.kill()
                return math.nan
            (done,) = waiter.collect()
            return float(done.values[0] - sent)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


QUESTION = Question("takeover", "How long does a killed or frozen holder keep its lock?", measure)
