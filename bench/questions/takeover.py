"""How long does a waiter wait for the lock of a holder that was killed, or frozen?

The holder has a lease of 5 s. A second after its grant its process gets SIGKILL, which closes its connections, or
SIGSTOP, which does not. A waiter that was there before, or one that asks right after the signal, gets the lock later.
The time is from the signal to the grant. A dash means: not within 12 s.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from functools import partial

from bench.harness.arena import LEASED, SESSION
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

LIMIT = 12.0
GOALS = (Goal("dblock", "kill", "", 0.3), Goal("dblock", "late", "", 0.3))


def measure(run: Run) -> list[Table]:
    ttl, before = run.pick(5.0, 1.0), run.pick(1.0, 0.2)
    limit = run.pick(LIMIT, 3.0)
    # A quick run has no time for leases that cannot be short.
    peers = run.pick((*LEASED, *SESSION), ("redis-py", "pg_advisory_lock"))
    blocks: dict[str, Block] = {}
    for name in ("dblock", *peers):
        options = {} if name in SESSION else {"ttl": ttl}
        for one in run.arena.contenders(name, **options):
            blocks[name] = partial(_signals, one, before, limit)
    table = Table("takeover", "a holder with a lease of 5 s", "redis-py", COLUMNS)
    return [table.fill(run.interleave(blocks, 3), GOALS)]


def _signals(contender: Contender, before: float, limit: float) -> Sample:
    return {
        "kill": _taken_over(contender, signal.SIGKILL, before, limit),
        "late": _taken_over(contender, signal.SIGKILL, before, limit, late=True),
        "stop": _taken_over(contender, signal.SIGSTOP, before, limit),
    }


def _taken_over(contender: Contender, number: signal.Signals, before: float, limit: float, late: bool = False) -> float:
    """Return the seconds from the signal to the next grant."""
    name = f"taken over {time.monotonic_ns()}"
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
