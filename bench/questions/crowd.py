"""How fast is a crowd of waiters for one lock served, and what does it cost while it waits?

All waiters wait for one lock, in four processes with one client each. When it is released, each waiter acquires it and
releases it at once. The times are from the beginning of that release to the grant of a waiter. The connections and the
memory are those of the client processes while all wait.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial

import psycopg

from bench.harness import usage
from bench.harness.arena import LEASED, SESSION, SKETCH
from bench.harness.contender import PATIENCE, Contender
from bench.harness.question import Question, Run
from bench.harness.rounds import Block, Cost, Sample, quantile
from bench.harness.table import Column, Goal, Table
from bench.harness.workers import Team

COLUMNS = (
    Column("seconds", "all served within s", digits=2, checked=0.3),
    Column("connections", "connections", checked=0.01),
    Column("memory", "kB a waiter", drawn=False),
    Column("p50", "p50 s", digits=2, drawn=False),
    Column("p99", "p99 s", digits=2, drawn=False),
    Column("rate", "waiters served/s", lower_is_better=False, drawn=False),
    Column("server", "server CPU µs a waiter", drawn=False),
    Column("client", "client CPU µs a waiter", drawn=False),
)


def measure(run: Run) -> list[Table]:
    few, many, processes = run.pick(200, 4), run.pick(10_000, 8), run.pick(4, 2)
    contenders = run.arena.contenders("dblock", "dblock, asyncio", SKETCH, *LEASED, *SESSION)
    blocks: dict[str, Block] = {
        one.name: partial(_serve, one, few, processes, run.pick(2.0, 0.1)) for one in contenders
    }
    small = Table("crowd", f"{few} waiters in {processes} processes", "python-redis-lock, fsync", COLUMNS)
    small.fill(
        run.interleave(blocks, 3), [Goal("dblock", "connections", "", 8), Goal("dblock, asyncio", "connections", "", 8)]
    )
    contenders = run.arena.contenders("dblock, asyncio")
    blocks = {
        f"{one.name}, {size:,} waiters": partial(_serve, one, size, processes, run.pick(2.0, 0.1))
        for one in contenders
        for size in (few, many)
    }
    title, reference = f"a crowd in {processes} processes", f"dblock, asyncio, {few:,} waiters"
    large = Table("crowd_large", title, reference, COLUMNS, picture="in order")
    if contenders:
        large.fill(run.interleave(blocks, 1))
    return [small, large]


def _serve(contender: Contender, waiters: int, processes: int, settling: float) -> Sample:
    kind = "task" if contender.is_async else "thread"
    name = f"crowd {time.monotonic_ns()}"
    with ExitStack() as stack:
        holder = stack.enter_context(Team(contender, 1))
        teams = [stack.enter_context(Team(contender, waiters // processes, kind)) for _ in range(processes)]
        holder.run("hold", name=name)
        pids = {pid for team in teams for pid in team.pids}
        before = usage.memory(pids)
        for team in teams:
            team.begin("get", name=name)
        time.sleep(settling)
        _wait_for_tickets(contender, teams, name, waiters)
        memory = (usage.memory(pids) - before) / waiters
        connections = sum(usage.connections(pid) for pid in pids)
        server, client = Cost(contender.servers), Cost(pids)
        (began,) = holder.run("let_go")[0].values
        times = [value - began for team in teams for done in team.collect() for value in done.values]
        used, used_too = server.microseconds(waiters), client.microseconds(waiters)
    return {
        "seconds": max(times),
        "connections": connections,
        "memory": memory / 1024,
        "p50": quantile(times, 0.5),
        "p99": quantile(times, 0.99),
        "rate": waiters / max(times),
        "server": used,
        "client": used_too,
    }


def _wait_for_tickets(contender: Contender, teams: list[Team], name: str, waiters: int) -> None:
    """Wait until all waiters of dblock are in the queue. The other contenders got time to settle."""
    if not contender.name.startswith("dblock"):
        return
    deadline = time.monotonic() + PATIENCE
    with psycopg.connect(contender.where, autocommit=True) as owner:
        while time.monotonic() < deadline:
            row = owner.execute("SELECT count(*) FROM dblock.lock_tickets WHERE name = %s", [name]).fetchone()
            if row is not None and row[0] >= waiters:
                return
            for team in teams:
                if team.done_within(0):
                    team.collect()  # raises the error of a waiter that failed
            time.sleep(0.05)
    raise TimeoutError(f"only {row} of {waiters} waiters are in the queue")


QUESTION = Question("crowd", "How fast is a crowd of waiters served?", measure)
