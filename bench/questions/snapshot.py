"""How much slower does a hot lock become while a transaction stays open elsewhere?

A report or a dump keeps every version of every row. One lock is acquired and released 10,000 times beside an open
snapshot, and the last tenth of these pairs is compared with the pairs before it. Then the snapshot ends.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial

import psycopg

from bench.harness.arena import SKETCH
from bench.harness.question import Question, Run
from bench.harness.rounds import Block, Cost, Sample, quantile
from bench.harness.table import Column, Goal, Table
from bench.harness.workers import Team

COLUMNS = (
    Column("p50", "p50 µs", checked=0.3),
    Column("p99", "p99 µs", drawn=False),
    Column("server", "server CPU µs"),
    Column("client", "client CPU µs", drawn=False),
)


def measure(run: Run) -> list[Table]:
    number = run.pick(10_000, 100)
    with ExitStack() as stack:
        teams = run.teams(stack, run.arena.contenders("dblock", SKETCH), 1)
        blocks: dict[str, Block] = {name: partial(_phases, team, number) for name, team in teams.items()}
        measured = run.interleave(blocks, 3).apart()
    tables = []
    for name in teams:
        beside, *_ = phases = _rows(name)
        title = f"one lock, before, after {number:,} pairs beside a snapshot, and after its end"
        table = Table(f"snapshot_{name}", title, name, COLUMNS, picture="in order")
        goals = [Goal(beside, "p50", name, 2.5)] if name == "dblock" else []
        tables.append(table.fill(measured.part((name, *phases)), goals))
    return tables


def _rows(name: str) -> tuple[str, str]:
    return f"{name}, beside a snapshot", f"{name}, after its end"


def _phases(team: Team, number: int) -> Sample:
    """Measure one lock before a snapshot, at its end and after it."""
    name, tenth, lock = team.contender.name, number // 10, f"hot {time.monotonic_ns()}"
    beside, after = _rows(name)
    team.run("cycles", number=tenth, name=lock)
    found = _cycles(team, tenth, lock, name)
    with psycopg.connect(team.contender.where) as report:
        report.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        report.execute("SELECT count(*) FROM pg_class")
        team.run("cycles", number=number - tenth, name=lock)
        found |= _cycles(team, tenth, lock, beside)
    team.run("cycles", number=tenth, name=lock)
    return found | _cycles(team, tenth, lock, after)


def _cycles(team: Team, number: int, name: str, row: str) -> Sample:
    cost = Cost(team.contender.servers)
    (done,) = team.run("cycles", number=number, name=name)
    times = done.values[0]
    return {
        f"{row}|p50": quantile(times, 0.5) * 1e6,
        f"{row}|p99": quantile(times, 0.99) * 1e6,
        f"{row}|server": cost.microseconds(number),
        f"{row}|client": done.cpu * 1e6 / number,
    }


QUESTION = Question("snapshot", "How much slower is a hot lock beside an open snapshot?", measure)
