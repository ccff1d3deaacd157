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

from bench.harness import machine, usage
from bench.harness.arena import SKETCH
from bench.harness.contender import Contender
from bench.harness.question import Question, Run, pair_block, turn_block
from bench.harness.rounds import Block, Sample
from bench.harness.table import Column, Table
from bench.harness.workers import Team
from bench.peers import pgbench

FLOORS = "bench.peers.floors"

PARTS = {
    "one round trip (SELECT 1)": f"{FLOORS}:RoundTrip",
    "two round trips": f"{FLOORS}:TwoRoundTrips",
    "two round trips, one durable commit": f"{FLOORS}:DurableCommit",
    "the two functions, by psycopg": f"{FLOORS}:TwoCalls",
}

PAIR = (
    Column("p50", "p50 µs"), Column("p99", "p99 µs"), Column("client", "client CPU µs"),
    Column("server", "server CPU µs"),
)  # fmt: skip
FUNCTIONS = (
    Column("self", "µs in it a hand-off, with waits"),
    Column("calls", "calls a hand-off", digits=2, drawn=False),
    Column("each", "µs a call, with what it calls", drawn=False),
)
ALL = "all functions"
ROWS = 13
"""The functions that take longest, and all together."""


def measure(run: Run) -> list[Table]:
    return [_pair(run), *_hand_offs(run)]


def _pair(run: Run) -> Table:
    postgres = run.arena.postgres
    contenders = [Contender(name, make, postgres.where, postgres.pid) for name, make in PARTS.items()]
    contenders += run.arena.contenders("dblock", "dblock, efficiency")
    with ExitStack() as stack:
        blocks: dict[str, Block] = {}
        for name, team in run.teams(stack, contenders, 1).items():
            machine.pin(team.pids, 0)
            blocks[name] = partial(pair_block, team, run.pick(0.25, 0.05))
        if pgbench.PROGRAM:
            blocks["the two functions, by pgbench"] = partial(
                pgbench.pair_block, postgres, run.scratch, 1, run.pick(1500, 30), core=0
            )
        machine.pin(usage.tree(postgres.pid), 1)
        measured = run.interleave(blocks, 8)
        machine.unpin(usage.tree(postgres.pid))
    table = Table("microseconds_pair", "the parts of a pair", "two round trips", PAIR, picture="in order")
    return table.fill(measured)


def _hand_offs(run: Run) -> Sequence[Table]:
    tables, postgres = [], run.arena.postgres
    with psycopg.connect(postgres.where, autocommit=True) as owner:
        owner.execute("ALTER ROLE postgres SET track_functions = 'all'")
        contenders = run.arena.contenders("dblock", SKETCH)
        blocks: dict[str, Block] = {one.name: partial(_counted, run, one) for one in contenders}
        measured = run.interleave(blocks, 2)
        owner.execute("ALTER ROLE postgres RESET track_functions")
    for one in contenders:
        title = f"{one.name}: the functions of a hand-off, {run.pick(8, 2)} processes"
        table = Table(f"microseconds_{one.name}", title, ALL, FUNCTIONS, picture="in order")
        table.fill(measured.part([one.name]).apart())
        table.cells = dict(sorted(table.cells.items(), key=lambda row: -row[1]["self"].value)[:ROWS])
        tables.append(table)
    return tables


def _counted(run: Run, contender: Contender) -> Sample:
    """Return the calls and the time of each function per hand-off."""
    with psycopg.connect(contender.where, autocommit=True) as owner:
        owner.execute("SELECT pg_stat_reset()")
        with Team(contender, run.pick(8, 2)) as team:
            turn_block(team, run.pick(4.0, 0.2), run.scratch)
        # Sessions report what they counted when they end.
        rows = owner.execute(
            "SELECT funcname::text, calls, self_time * 1000, total_time * 1000 FROM pg_stat_user_functions"
            " WHERE schemaname = %s AND calls > 0",
            [contender.name],
        ).fetchall()
    grants = max((calls for name, calls, _, _ in rows if name == "release"), default=1)
    found = {f"{ALL}|self": sum(row[2] for row in rows) / grants, f"{ALL}|calls": sum(row[1] for row in rows) / grants}
    for name, calls, within, total in rows:
        row = f"{name}()"
        found |= {f"{row}|self": within / grants, f"{row}|calls": calls / grants, f"{row}|each": total / calls}
    return found


QUESTION = Question("microseconds", "Where does the time of a pair and of a hand-off go?", measure)
