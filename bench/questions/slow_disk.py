"""What does a slow disk cost?

Each fsync of Postgres and of Redis takes a millisecond longer, by a library that is loaded before the C library. This
needs a C compiler.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import ExitStack
from functools import partial

from bench.harness import servers
from bench.harness.arena import ADVISORY, DBLOCK, REDIS, SKETCH
from bench.harness.contender import Contender
from bench.harness.question import Question, Run, pair_block, turn_block
from bench.harness.rounds import Block, Sample
from bench.harness.table import Column, Table
from bench.harness.workers import Team
from bench.peers import sketch

DELAY_US = 1000

COLUMNS = (
    Column("pair", "pair p50 µs", checked=0.15),
    Column("rate", "hand-offs/s, 8 processes", lower_is_better=False, checked=0.15),
)


def measure(run: Run) -> list[Table]:
    table = Table("slow_disk", "each fsync takes 1 ms more", "redis-py, fsync", COLUMNS)
    if shutil.which("cc") is None:
        print("slow_disk needs a C compiler: left out", file=sys.stderr)
        return []
    with ExitStack() as stack:
        postgres = stack.enter_context(servers.postgres(run.scratch, fsync_delay_us=DELAY_US))
        sketch.install(postgres.where)
        contenders = [
            Contender("dblock", f"{DBLOCK}:Dblock", postgres.where, postgres.pid),
            Contender("dblock, efficiency", f"{DBLOCK}:Dblock", postgres.where, postgres.pid, {"durable": False}),
            Contender(SKETCH, "bench.peers.sketch:Sketch", postgres.where, postgres.pid),
            Contender("pg_advisory_lock", f"{ADVISORY}:AdvisoryLock", postgres.where, postgres.pid),
        ]
        if run.arena.installed("redis-py") and (
            redis := stack.enter_context(servers.redis(run.scratch, fsync=True, fsync_delay_us=DELAY_US))
        ):
            contenders += [Contender("redis-py, fsync", f"{REDIS}:RedisPy", redis.where, redis.pid)]
            if run.arena.installed("python-redis-lock"):
                contenders += [
                    Contender("python-redis-lock, fsync", f"{REDIS}:PythonRedisLock", redis.where, redis.pid)
                ]
        blocks: dict[str, Block] = {}
        for one in contenders:
            if run.arena.wanted(one.name):
                alone = stack.enter_context(Team(one, 1))
                many = stack.enter_context(Team(one, run.pick(8, 2)))
                blocks[one.name] = partial(_both, run, alone, many)
        measured = run.interleave(blocks, 4)
    return [table.fill(measured)]


def _both(run: Run, alone: Team, many: Team) -> Sample:
    return {
        "pair": pair_block(alone, run.pick(0.5, 0.05))["p50"],
        "rate": turn_block(many, run.pick(2.0, 0.1), run.scratch)["rate"],
    }


QUESTION = Question("slow_disk", "What does a slow disk cost?", measure)
