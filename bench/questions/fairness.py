"""Does each of eight clients get its turn, and how long does the unluckiest wait?

Each client holds the lock for a millisecond, releases it and asks again at once. The Jain index is 1 if all got the
same share, and 1/8 if one got everything.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from bench.harness.arena import LEASED, SESSION, SKETCH
from bench.harness.question import Question, Run, turn_block
from bench.harness.rounds import Block
from bench.harness.table import Column, Table

HOLD = 0.001

COLUMNS = (
    Column("jain", "Jain index", lower_is_better=False, digits=3, checked=0.05),
    Column("longest", "longest wait ms"),
    Column("typical wait", "p50 wait ms", drawn=False),
    Column("wait", "p99 wait ms", drawn=False),
    Column("grants", "grants/s", lower_is_better=False, drawn=False),
    Column("server", "server CPU µs a grant", drawn=False),
    Column("client", "client CPU µs a grant", drawn=False),
)


def measure(run: Run) -> list[Table]:
    contenders = run.arena.contenders("dblock", "dblock, efficiency", SKETCH, *LEASED, *SESSION)
    with ExitStack() as stack:
        blocks: dict[str, Block] = {
            name: partial(turn_block, team, run.pick(2.0, 0.2), run.scratch, HOLD)
            for name, team in run.teams(stack, contenders, run.pick(8, 2)).items()
        }
        measured = run.interleave(blocks, 3)
    table = Table("fairness", "8 processes, 1 ms holds", "pg_advisory_lock", COLUMNS)
    return [table.fill(measured)]


QUESTION = Question("fairness", "Does each client get its turn?", measure)
