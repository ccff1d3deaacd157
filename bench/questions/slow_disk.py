"""What does a slow disk cost?

Each fsync of Postgres and of Redis takes a millisecond longer, by a library that is loaded before the C library. This
needs a C compiler.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import ExitStack
from functools import partial

from bench.harness.arena import SKETCH
from bench.harness.question import Question, Run, pair_block, turn_block
from bench.harness.rounds import Block, Sample
from bench.harness.table import Column, Table
from bench.harness.workers import Team

COLUMNS = (
    Column("p50", "pair p50 µs", checked=0.15),
    Column("p99", "pair p99 µs", drawn=False),
    Column("rate", "hand-offs/s, 8 processes", lower_is_better=False, checked=0.15),
    Column("hand-off p50", "hand-off p50 ms", digits=2, drawn=False),
    Column("hand-off p99", "hand-off p99 ms", digits=2, drawn=False),
    Column("server", "server CPU µs a pair", drawn=False),
    Column("client", "client CPU µs a pair", drawn=False),
)

CONTENDERS = (
    "dblock", "dblock, efficiency", SKETCH, "pg_advisory_lock", "redis-py, fsync", "python-redis-lock, fsync",
)  # fmt: skip


def measure(run: Run) -> list[Table]:
    table = Table("slow_disk", "each fsync takes 1 ms more", "redis-py, fsync", COLUMNS)
    if shutil.which("cc") is None:
        print("slow_disk needs a C compiler: left out", file=sys.stderr)
        return []
    delay = run.pick(1000, 1)
    with ExitStack() as stack:
        arena = stack.enter_context(run.arena.with_slow_disk(delay))
        contenders = arena.contenders(*CONTENDERS)
        alone, many = run.teams(stack, contenders, 1), run.teams(stack, contenders, run.pick(8, 2))
        blocks: dict[str, Block] = {
            name: partial(_both, run, team, many[name]) for name, team in alone.items() if name in many
        }
        measured = run.interleave(blocks, 4)
    return [table.fill(measured)]


def _both(run: Run, alone: Team, many: Team) -> Sample:
    turns = turn_block(many, run.pick(2.0, 0.1), run.scratch)
    hand_offs = {"rate": turns["rate"], "hand-off p50": turns["p50"], "hand-off p99": turns["p99"]}
    return pair_block(alone, run.pick(0.5, 0.05)) | hand_offs


QUESTION = Question("slow_disk", "What does a slow disk cost?", measure)
