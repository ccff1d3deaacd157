"""How long is a lock free between two holders, on a machine that has nothing else to do?

Two processes take turns. Each holds the lock for 20 ms and releases it. It asks again up to 15 ms after the other has
got the lock, so that it waits when the other releases. The time is from the beginning of a release to the moment at
which the other process has the lock. A lock without a queue has no chance to grant to the same process again.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from bench.harness.arena import LEASED, SESSION, SKETCH
from bench.harness.question import Question, Run, turn_block
from bench.harness.rounds import Block
from bench.harness.table import Column, Goal, Table

HOLD, PAUSE = 0.02, 0.0075

COLUMNS = (
    Column("p50", "p50 ms", digits=2, checked=0.15),
    Column("p99", "p99 ms", digits=2),
    Column("server", "server CPU µs", drawn=False),
    Column("client", "client CPU µs", drawn=False),
)

GOALS = (
    Goal("dblock", "p50", "pg_advisory_lock", 3.0),
    *(Goal("dblock", column, peer, 1.0) for column in ("p50", "p99") for peer in LEASED),
)


def measure(run: Run) -> list[Table]:
    contenders = run.arena.contenders("dblock", "dblock, efficiency", "dblock, asyncio", SKETCH, *LEASED, *SESSION)
    seconds = run.pick(3.0, 0.1)
    with ExitStack() as stack:
        blocks: dict[str, Block] = {
            name: partial(turn_block, team, seconds, run.scratch, HOLD, PAUSE, alternate=True)
            for name, team in run.teams(stack, contenders, 2).items()
        }
        measured = run.interleave(blocks, 4)
    table = Table("hand_off_at_rest", "two processes, 20 ms holds", "pg_advisory_lock", COLUMNS)
    return [table.fill(measured, GOALS)]


QUESTION = Question("hand_off_at_rest", "How long is a lock free between two holders?", measure)
