"""How much slower does a hot lock become while a transaction stays open elsewhere?

A report or a dump keeps every version of every row. One lock is acquired and released 10,000 times beside an open
snapshot, and the last tenth of these pairs is compared with the pairs before it. Then the snapshot ends.
"""

from __future__ import annotations

import psycopg

from bench.harness.arena import SKETCH
from bench.harness.question import Question, Run
from bench.harness.rounds import Measured, Sample, quantile
from bench.harness.table import Column, Goal, Table
from bench.harness.workers import Team

COLUMNS = (Column("p50", "p50 µs", checked=0.3), Column("p99", "p99 µs", drawn=False))


def measure(run: Run) -> list[Table]:
    cycles = run.pick(10_000, 100)
    tables = []
    for contender in run.arena.contenders("dblock", SKETCH):
        name, measured = contender.name, Measured()
        beside, after = f"{name}, after {cycles:,} cycles beside a snapshot", f"{name}, snapshot ended"
        with Team(contender, 1) as team:
            for number in range(run.rounds or run.pick(3, 1)):
                lock = f"hot {number}"
                team.run("cycles", number=cycles // 10, name=lock)
                measured.add(name, _cycles(team, cycles // 10, lock))
                with psycopg.connect(contender.where) as report:
                    report.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                    report.execute("SELECT count(*) FROM pg_class")
                    team.run("cycles", number=cycles * 9 // 10, name=lock)
                    measured.add(beside, _cycles(team, cycles // 10, lock))
                team.run("cycles", number=cycles // 10, name=lock)
                measured.add(after, _cycles(team, cycles // 10, lock))
        table = Table(f"snapshot_{name}", f"{name}: one lock, one client", name, COLUMNS)
        tables.append(table.fill(measured, [Goal(beside, "p50", name, 2.5)] if name == "dblock" else []))
    return tables


def _cycles(team: Team, number: int, name: str) -> Sample:
    (done,) = team.run("cycles", number=number, name=name)
    times = done.values[0]
    return {"p50": quantile(times, 0.5) * 1e6, "p99": quantile(times, 0.99) * 1e6}


QUESTION = Question("snapshot", "How much slower is a hot lock beside an open snapshot?", measure)
