"""What do read-write locks, semaphores and sets of locks cost beside a plain lock?

First one client on names of its own. Then eight processes on one name: readers that never wait for each other, writers,
and a semaphore of four permits.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from bench.harness.contender import Contender
from bench.harness.question import Question, Run, pair_block, turn_block
from bench.harness.rounds import Block
from bench.harness.table import Column, Table

DBLOCK, KAZOO = "bench.peers.dblock_recipes", "bench.peers.kazoo_lock"

OURS = {
    "dblock: read lock": f"{DBLOCK}:ReadLock",
    "dblock: write lock": f"{DBLOCK}:WriteLock",
    "dblock: semaphore": f"{DBLOCK}:Semaphore",
}
SET = {"dblock: three locks at once": f"{DBLOCK}:LockAll"}
THEIRS = {
    "kazoo: read lock": f"{KAZOO}:KazooReadLock",
    "kazoo: write lock": f"{KAZOO}:KazooWriteLock",
    "kazoo: semaphore": f"{KAZOO}:KazooSemaphore",
}

ALONE = (
    Column("p50", "p50 µs", checked=0.15),
    Column("p99", "p99 µs", drawn=False),
    Column("server", "server CPU µs", checked=0.15),
    Column("client", "client CPU µs", drawn=False),
)
TOGETHER = (
    Column("grants", "grants/s", lower_is_better=False, checked=0.2),
    Column("server", "server CPU µs a grant", checked=0.2),
    Column("client", "client CPU µs a grant", drawn=False),
    Column("typical wait", "p50 wait ms", digits=1, drawn=False),
    Column("wait", "p99 wait ms", digits=1, drawn=False),
)


def measure(run: Run) -> list[Table]:
    plain = run.arena.contenders("dblock", "kazoo")
    ours, theirs = run.arena.recipes("dblock", OURS), run.arena.recipes("kazoo", THEIRS)
    tables = [_alone(run, [*plain, *ours, *run.arena.recipes("dblock", SET), *theirs])]
    with ExitStack() as stack:
        blocks: dict[str, Block] = {
            name: partial(turn_block, team, run.pick(2.0, 0.1), run.scratch)
            for name, team in run.teams(stack, [*plain, *ours, *theirs], run.pick(8, 2)).items()
        }
        measured = run.interleave(blocks, 4)
    tables.append(Table("shared_together", f"{run.pick(8, 2)} processes, one name", "dblock", TOGETHER).fill(measured))
    return tables


def _alone(run: Run, contenders: list[Contender]) -> Table:
    with ExitStack() as stack:
        blocks: dict[str, Block] = {
            name: partial(pair_block, team, run.pick(0.4, 0.05))
            for name, team in run.teams(stack, contenders, 1).items()
        }
        measured = run.interleave(blocks, 8)
    return Table("shared", "acquire and release, one client", "dblock", ALONE).fill(measured)


QUESTION = Question("shared", "What do read-write locks and semaphores cost?", measure)
