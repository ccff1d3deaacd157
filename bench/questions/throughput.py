"""How many pairs of acquire and release per second do 1 to 64 clients make, each on a lock of its own?

The clients are processes with a client each, threads that share a client, or tasks that share a client for asyncio.
"""

from __future__ import annotations

from functools import partial

from bench.harness.arena import LEASED, SESSION
from bench.harness.contender import Contender
from bench.harness.question import Question, Run, pair_block
from bench.harness.rounds import Block, Measured, Sample
from bench.harness.table import Column, Goal, Table
from bench.harness.workers import Team
from bench.peers import pgbench

SIZES = (1, 4, 8, 16, 64)
CHECKED = (1, 8)
"""Sizes that are compared with the baseline, and so measured in more rounds."""
OURS = ("dblock", "dblock, efficiency")

DETAILS = {"p50": "p50 µs", "p99": "p99 µs", "client": "client CPU µs", "server": "server CPU µs"}

TASKS = (
    "dblock, asyncio", "dblock, efficiency, asyncio", "redis-py, asyncio", "redis-py, fsync, asyncio",
    "pg_advisory_lock, asyncio",
)  # fmt: skip


def measure(run: Run) -> list[Table]:
    return [table for kind in ("process", "thread", "task") for table in _as(run, kind)]


def _as(run: Run, kind: str) -> list[Table]:
    sizes = run.pick(SIZES, (2,))
    seconds = run.pick(0.8, 0.05)
    options = {"pool_size": 16} if kind != "process" else {}
    ours = TASKS[:2] if kind == "task" else OURS
    names = TASKS[2:] if kind == "task" else (*LEASED, *SESSION)
    contenders = run.arena.contenders(*ours, **options) + run.arena.contenders(*names)
    reference = "redis-py, fsync, asyncio" if kind == "task" else "redis-py, fsync"
    total = Measured()
    for size in sizes:
        blocks: dict[str, Block] = {one.name: partial(_rate, one, size, kind, seconds) for one in contenders}
        if kind == "process" and run.arena.wanted("pgbench") and pgbench.PROGRAM:
            blocks["pgbench"] = partial(_floor, run, size)
        total.join(run.interleave(blocks, 3 if size in CHECKED else 2))
    columns = [
        Column(str(size), f"{size} client{'s' * (size > 1)}", lower_is_better=False, checked=0.2 * (size in CHECKED))
        for size in sizes
    ]
    goals = [Goal("dblock", "8", "redis-py, fsync", 1.0)] if kind == "process" and 8 in sizes else []
    plural = {"process": "processes", "thread": "threads of a process", "task": "tasks of a process"}[kind]
    table = Table(f"throughput_{kind}", f"pairs/s, clients as {plural}", reference, columns, picture="lines")
    at = sizes[-1] if run.quick else 8
    details = [Column(f"{at} {key}", heading, drawn=key != "p99") for key, heading in DETAILS.items()]
    detailed = Table(f"throughput_{kind}_details", f"a pair, {at} {plural}", reference, details)
    return [table.fill(total, goals), detailed.fill(total)]


def _rate(contender: Contender, size: int, kind: str, seconds: float) -> Sample:
    # The team lives for one block, because the machine has no room for 64 processes of every contender.
    with Team(contender, size, kind) as team:
        return _named(pair_block(team, seconds), size)


def _named(sample: Sample, size: int) -> Sample:
    return {str(size): sample["rate"], **{f"{size} {key}": sample[key] for key in DETAILS}}


def _floor(run: Run, size: int) -> Sample:
    # Enough that the start of its sessions, which is within its block, does not count.
    transactions = max(run.pick(8000, 60) // size, 20)
    return _named(pgbench.pair_block(run.arena.postgres, run.scratch, size, transactions), size)


QUESTION = Question("throughput", "How many pairs per second do 1 to 64 clients make?", measure)
