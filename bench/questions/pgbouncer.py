"""What does pgbouncer in transaction mode cost, and what does it save?

Calls go through the pooler. Wake-ups come over `listen_dsn`, which leads past it. Session locks such as
pg_advisory_lock do not work behind a pooler in transaction mode, so they are missing here.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from bench.harness.arena import DBLOCK
from bench.harness.contender import Contender
from bench.harness.question import Question, Run, pair_block, turn_block
from bench.harness.rounds import Block, Sample
from bench.harness.table import Column, Table
from bench.harness.workers import Team

COLUMNS = (
    Column("pair", "pair p50 µs", checked=0.15),
    Column("many", "pairs/s, 8 processes", lower_is_better=False, checked=0.15),
    Column("rate", "hand-offs/s, 8 processes", lower_is_better=False, checked=0.2),
)


def measure(run: Run) -> list[Table]:
    pooler = run.arena.pgbouncer()
    direct = run.arena.postgres
    contenders = [Contender("dblock", f"{DBLOCK}:Dblock", direct.where, direct.pid)]
    if pooler is not None:
        options = {"listen_dsn": direct.where}
        contenders.append(Contender("dblock, behind pgbouncer", f"{DBLOCK}:Dblock", pooler.where, direct.pid, options))
    with ExitStack() as stack:
        blocks: dict[str, Block] = {}
        for one in contenders:
            alone = stack.enter_context(Team(one, 1))
            many = stack.enter_context(Team(one, run.pick(8, 2)))
            blocks[one.name] = partial(_all, run, alone, many)
        measured = run.interleave(blocks, 4)
    return [Table("pgbouncer", "through a pooler", "dblock", COLUMNS).fill(measured)]


def _all(run: Run, alone: Team, many: Team) -> Sample:
    return {
        "pair": pair_block(alone, run.pick(0.5, 0.05))["p50"],
        "many": pair_block(many, run.pick(1.0, 0.05))["rate"],
        "rate": turn_block(many, run.pick(2.0, 0.1), run.scratch)["rate"],
    }


QUESTION = Question("pgbouncer", "What does a pooler cost?", measure)
