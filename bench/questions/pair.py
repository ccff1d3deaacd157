"""What does an acquire and its release cost, when no other client wants the lock?

One client per contender, each in a process of its own, pinned to one core. The servers run on another core, if the
machine has two: otherwise the scheduler's choice between one core and two would outweigh every measured difference.
The contenders take turns in blocks of a quarter of a second.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from bench.harness import machine, usage
from bench.harness.arena import LEASED, NAIVE, SESSION, SKETCH
from bench.harness.question import Question, Run, pair_block
from bench.harness.rounds import Block
from bench.harness.table import Column, Goal, Table
from bench.peers import pgbench

COLUMNS = (
    Column("p50", "p50 µs", checked=0.1),
    Column("p99", "p99 µs"),
    Column("client", "client CPU µs", checked=0.1),
    Column("server", "server CPU µs", checked=0.1),
)

OURS = (
    "dblock", "dblock, efficiency", "dblock, asyncio", "dblock, efficiency, asyncio",
    "dblock, socket", "dblock, efficiency, socket",
)  # fmt: skip
PEERS = (*LEASED, "redis-py, asyncio", "redis-py, fsync, asyncio", *SESSION, SKETCH, NAIVE)

GOALS = (
    Goal("dblock", "p50", "redis-py, fsync", 0.85),
    Goal("dblock", "p50", "redis-py", 1.4),
    Goal("dblock, socket", "p50", "redis-py", 1.0),
    Goal("dblock, efficiency", "p50", "redis-py", 1.0),
)


def measure(run: Run) -> list[Table]:
    contenders = run.arena.contenders(*OURS, *PEERS)
    seconds = run.pick(0.25, 0.05)
    with ExitStack() as stack:
        blocks: dict[str, Block] = {}
        for name, team in run.teams(stack, contenders, 1).items():
            machine.pin(team.pids, 0)
            blocks[name] = partial(pair_block, team, seconds)
        if run.arena.wanted("pgbench") and pgbench.PROGRAM:
            blocks["pgbench"] = partial(
                pgbench.pair_block, run.arena.postgres, run.scratch, 1, run.pick(1500, 30), core=0
            )
        for contender in contenders:
            machine.pin(usage.tree(contender.pid), 1)
        measured = run.interleave(blocks, 12)
        for contender in contenders:
            machine.unpin(usage.tree(contender.pid))
    table = Table("pair", "acquire and release, one client", "redis-py, fsync", COLUMNS)
    table.notes.append(
        "pgbench makes dblock's two calls in C. Contenders without “socket” use TCP on loopback. Without fsync, Redis "
        "and efficiency locks do not wait for a disk. Advisory locks write nothing."
    )
    return [table.fill(measured, GOALS)]


QUESTION = Question("pair", "What does an acquire and its release cost?", measure)
