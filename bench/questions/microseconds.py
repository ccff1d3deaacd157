"""Where does the time of a pair and of a hand-off go?

A pair is built up from its parts: two round trips, a commit that waits for the disk, the two functions called by
psycopg and by pgbench, and the whole through a Client. For a hand-off, Postgres counts the calls of each function and
the time inside it, without the functions that it calls. The counting itself takes some time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import psycopg

from bench.harness import machine, servers, usage
from bench.harness.arena import DBLOCK
from bench.harness.contender import Contender
from bench.harness.question import Question, Run, pair_block, teams, turn_block
from bench.harness.rounds import Block, Measured
from bench.harness.table import Column, Table
from bench.harness.workers import Team
from bench.peers import pgbench, sketch

FLOORS = "bench.peers.floors"

PARTS = {
    "one round trip (SELECT 1)": f"{FLOORS}:RoundTrip",
    "two round trips": f"{FLOORS}:TwoRoundTrips",
    "two round trips, one durable commit": f"{FLOORS}:DurableCommit",
    "the two functions, by psycopg": f"{FLOORS}:TwoCalls",
}

PAIR = (Column("p50", "p50 µs"), Column("client", "client CPU µs"), Column("server", "server CPU µs"))
FUNCTIONS = (
    Column("self", "µs in it a hand-off, with waits"),
    Column("calls", "calls a hand-off", digits=2, drawn=False),
    Column("each", "µs a call, with what it calls", drawn=False),
)
ALL = "all functions"


def measure(run: Run) -> list[Table]:
    return [_pair(run), *_hand_offs(run)]


def _pair(run: Run) -> Table:
    postgres = run.arena.postgres
    contenders = [Contender(name, make, postgres.where, postgres.pid) for name, make in PARTS.items()]
    contenders += run.arena.contenders("dblock", "dblock, efficiency")
    with ExitStack() as stack:
        blocks: dict[str, Block] = {}
        for name, team in teams(stack, contenders, 1).items():
            machine.pin(team.pids, 0)
            blocks[name] = partial(pair_block, team, run.pick(0.25, 0.05))
        if pgbench.PROGRAM:
            blocks["the two functions, by pgbench"] = partial(
                pgbench.pair_block, postgres, run.scratch, 1, run.pick(300, 30), core=0
            )
        machine.pin(usage.tree(postgres.pid), 1)
        measured = run.interleave(blocks, 8)
    return Table("microseconds_pair", "the parts of a pair", "two round trips", PAIR).fill(measured)


def _hand_offs(run: Run) -> Sequence[Table]:
    tables = []
    with servers.postgres(run.scratch, {"track_functions": "all"}) as postgres:
        sketch.install(postgres.where)
        for name, make in (("dblock", f"{DBLOCK}:Dblock"), ("sketch", "bench.peers.sketch:Sketch")):
            if run.arena.wanted(name):
                one = Contender(name, make, postgres.where, postgres.pid)
                measured = _counted(run, one)
                title = f"{name}: the functions of a hand-off, {run.pick(8, 2)} processes"
                tables.append(Table(f"microseconds_{name}", title, ALL, FUNCTIONS).fill(measured))
    return tables


def _counted(run: Run, contender: Contender) -> Measured:
    """Return the calls and the time of each function per hand-off, the longest first."""
    with psycopg.connect(contender.where, autocommit=True) as owner:
        owner.execute("SELECT pg_stat_reset()")
        with Team(contender, run.pick(8, 2)) as team:
            turn_block(team, run.pick(4.0, 0.2), run.scratch)
        # Sessions report what they counted when they end.
        rows = owner.execute(
            "SELECT funcname::text, calls, self_time * 1000, total_time * 1000 FROM pg_stat_user_functions"
            " WHERE schemaname = %s ORDER BY self_time DESC",
            [contender.name],
        ).fetchall()
    grants = max((calls for name, calls, _, _ in rows if name == "release"), default=1)
    measured = Measured(blocks=1)
    measured.add(ALL, {"self": sum(row[2] for row in rows) / grants, "calls": sum(row[1] for row in rows) / grants})
    for name, calls, within, total in rows[:16]:
        measured.add(f"{name}()", {"self": within / grants, "calls": calls / grants, "each": total / calls})
    return measured


QUESTION = Question("microseconds", "Where does the time of a pair and of a hand-off go?", measure)
