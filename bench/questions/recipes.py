"""What does a term of an election cost, how fast does leadership change, and what does a run-once job cost?

A term is a campaign with no other candidate and its resignation. The change of leaders is measured with two candidates
that lead for 20 ms. A job that is due is registered, claimed, run and recorded. A job that is not due is refused.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from bench.harness.question import Question, Run, pair_block, turn_block
from bench.harness.rounds import Block
from bench.harness.table import Column, Table

DBLOCK = "bench.peers.dblock_recipes"
ELECTION, KAZOO = "dblock: a term", "kazoo: a term"

COSTS = (
    Column("p50", "p50 µs", checked=0.15),
    Column("p99", "p99 µs", drawn=False),
    Column("server", "server CPU µs", checked=0.15),
    Column("client", "client CPU µs", drawn=False),
)
CHANGES = (
    Column("p50", "p50 ms", digits=2, checked=0.2),
    Column("p99", "p99 ms", digits=2),
    Column("server", "server CPU µs a change", drawn=False),
    Column("client", "client CPU µs a change", drawn=False),
)


def measure(run: Run) -> list[Table]:
    plain = run.arena.contenders("dblock", "kazoo")
    elections = run.arena.recipes("dblock", {ELECTION: f"{DBLOCK}:Election"})
    elections += run.arena.recipes("kazoo", {KAZOO: "bench.peers.kazoo_lock:KazooElection"})
    jobs = run.arena.recipes(
        "dblock",
        {"dblock: a job that is due": f"{DBLOCK}:OnceDue", "dblock: a job that is not": f"{DBLOCK}:OnceSkipped"},
    )
    with ExitStack() as stack:
        blocks: dict[str, Block] = {
            name: partial(pair_block, team, run.pick(0.4, 0.05))
            for name, team in run.teams(stack, [*plain, *elections, *jobs], 1).items()
        }
        costs = run.interleave(blocks, 8)
    with ExitStack() as stack:
        blocks = {
            name: partial(turn_block, team, run.pick(2.0, 0.15), run.scratch, 0.02, 0.0075, alternate=True)
            for name, team in run.teams(stack, [*plain, *elections], 2).items()
        }
        changes = run.interleave(blocks, 4)
    return [
        Table("recipes", "one client", "dblock", COSTS).fill(costs),
        Table("leadership", "two candidates, 20 ms terms", "dblock", CHANGES).fill(changes),
    ]


QUESTION = Question("recipes", "What do elections and run-once jobs cost?", measure)
