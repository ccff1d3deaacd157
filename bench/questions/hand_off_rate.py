"""How fast does a contended lock change hands, and what does each hand-off cost the server?

Eight processes acquire and release one lock as fast as they can. A hand-off is a grant to another process than the last
one. Grants to the same process again are counted too: a lock without a queue makes many of them, while others starve.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from bench.harness.arena import LEASED, SESSION, SKETCH
from bench.harness.question import Question, Run, turn_block
from bench.harness.rounds import Block
from bench.harness.table import Column, Goal, Table

COLUMNS = (
    Column("rate", "hand-offs/s", lower_is_better=False, checked=0.15),
    Column("grants", "grants/s", lower_is_better=False, drawn=False),
    Column("server", "server CPU µs a grant", checked=0.15),
    Column("client", "client CPU µs a grant", drawn=False),
    Column("p50", "p50 ms", digits=2, drawn=False),
    Column("p99", "p99 ms", digits=2, drawn=False),
    Column("longest", "longest wait ms", drawn=False),
)

OURS = ("dblock", "dblock, efficiency", "dblock, kept lock", "dblock, asyncio")

GOALS = (
    Goal("dblock", "server", SKETCH, 1.15),
    Goal("dblock", "rate", SKETCH, 0.9),
    Goal("dblock", "rate", "python-redis-lock, fsync", 0.8),
    Goal("dblock", "rate", "kazoo", 2.5),
    Goal("dblock", "rate", "etcd v3lock", 6.0),
)


def measure(run: Run) -> list[Table]:
    processes, seconds = run.pick(8, 2), run.pick(2.0, 0.2)
    contenders = run.arena.contenders(*OURS, SKETCH, *LEASED, *SESSION)
    with ExitStack() as stack:
        blocks: dict[str, Block] = {
            name: partial(turn_block, team, seconds, run.scratch)
            for name, team in run.teams(stack, contenders, processes).items()
        }
        measured = run.interleave(blocks, 5)
    table = Table("hand_off_rate", f"{processes} processes, one lock", SKETCH, COLUMNS)
    return [table.fill(measured, GOALS)]


QUESTION = Question("hand_off_rate", "How fast does a contended lock change hands?", measure)
