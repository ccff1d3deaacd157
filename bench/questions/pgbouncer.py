"""What does pgbouncer in transaction mode cost, and what does it save?

Calls go through the pooler. Wake-ups come over `listen_dsn`, which leads past it. Session locks such as
pg_advisory_lock do not work behind a pooler in transaction mode, so they are missing here. The processor time of the
server is that of the database and of the pooler.
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
    Column("p50", "pair p50 µs", checked=0.15),
    Column("p99", "pair p99 µs", drawn=False),
    Column("server", "server CPU µs a pair"),
    Column("client", "client CPU µs a pair", drawn=False),
    Column("many", "pairs/s, 8 processes", lower_is_better=False, checked=0.15),
    Column("rate", "hand-offs/s, 8 processes", lower_is_better=False, checked=0.2),
)


def measure(run: Run) -> list[Table]:
    pooler = run.arena.pgbouncer()
    direct = run.arena.postgres
    contenders = [Contender("dblock", f"{DBLOCK}:Dblock", direct.where, direct.pid)]
    if pooler is not None:
        name, options = "dblock, behind pgbouncer", {"listen_dsn": direct.where}
        contenders.append(Contender(name, f"{DBLOCK}:Dblock", pooler.where, direct.pid, options, also=(pooler.pid,)))
    with ExitStack() as stack:
        alone, many = run.teams(stack, contenders, 1), run.teams(stack, contenders, run.pick(8, 2))
        blocks: dict[str, Block] = {
            name: partial(_all, run, team, many[name]) for name, team in alone.items() if name in many
        }
        measured = run.interleave(blocks, 4)
    return [Table("pgbouncer", "through a pooler", "dblock", COLUMNS).fill(measured)]


def _all(run: Run, alone: Team, many: Team) -> Sample:
    return {
        **pair_block(alone, run.pick(0.5, 0.05)),
        "many": pair_block(many, run.pick(1.0, 0.05))["rate"],
        "rate": turn_block(many, run.pick(2.0, 0.1), run.scratch)["rate"],
    }


QUESTION = Question("pgbouncer", "What does a pooler cost?", measure)
