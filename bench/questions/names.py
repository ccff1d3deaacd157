"""Does a lock cost more among a million names than among a thousand?

Each size has a database of its own on the same server, filled with copies of the row that a grant and its release
leave behind. Each pair takes one of the names at random.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import psycopg
from psycopg import conninfo, sql

import dblock
from bench.harness.contender import Contender
from bench.harness.loads import WARM_UP
from bench.harness.question import Question, Run
from bench.harness.rounds import Block, Cost, Sample, quantile
from bench.harness.table import Column, Table
from bench.harness.workers import Team
from dblock.admin import schema

COLUMNS = (
    Column("p50", "p50 µs", checked=0.15),
    Column("p99", "p99 µs"),
    Column("server", "server CPU µs"),
    Column("client", "client CPU µs"),
    Column("bytes", "bytes a name", drawn=False),
)


def measure(run: Run) -> list[Table]:
    sizes = run.pick((1_000, 10_000, 100_000, 1_000_000), (1_000,))
    with ExitStack() as stack:
        blocks: dict[str, Block] = {}
        for contender in run.arena.contenders("dblock"):
            for size in sizes:
                where, each = _filled(contender.where, size)
                one = Contender(f"dblock, {size:,} names", contender.make, where, contender.pid)
                for name, team in run.teams(stack, [one], 1).items():
                    blocks[name] = partial(_pairs, team, size, run.pick(1.0, 0.1), each)
        measured = run.interleave(blocks, 6)
    table = Table(
        "names", "acquire and release, one client", f"dblock, {sizes[0]:,} names", COLUMNS, picture="in order"
    )
    return [table.fill(measured)]


def _pairs(team: Team, size: int, seconds: float, each: float) -> Sample:
    cost = Cost(team.contender.servers)
    (done,) = team.run("pairs_among", seconds=seconds, names=size)
    times = done.values[0].times
    return {
        "p50": quantile(times, 0.5) * 1e6,
        "p99": quantile(times, 0.99) * 1e6,
        "server": cost.microseconds(len(times) + WARM_UP),
        "client": done.cpu * 1e6 / (len(times) + WARM_UP),
        "bytes": each,
    }


def _filled(where: str, size: int) -> tuple[str, float]:
    """Create a database with this number of used locks, and return its address and the bytes of a name."""
    name = f"names_{size}"
    with psycopg.connect(where, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    there = conninfo.make_conninfo(where, dbname=name)
    schema.install(there)
    with dblock.Client(there) as client:
        client.lock("name 0").acquire().release()
    with psycopg.connect(there, autocommit=True) as owner:
        columns = [
            column
            for (column,) in owner.execute(
                "SELECT attname::text FROM pg_attribute WHERE attrelid = 'dblock.distributed_locks'::regclass"
                " AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
            )
        ]
        made = {"name": "'name ' || n", "token": "nextval('dblock.token_sequence')"}
        values = ", ".join(made.get(column, f"l.{column}") for column in columns)
        owner.execute(
            f"INSERT INTO dblock.distributed_locks ({', '.join(columns)}) SELECT {values}"
            f" FROM dblock.distributed_locks AS l, generate_series(1, {size - 1}) AS n WHERE l.name = 'name 0'".encode()
        )
        owner.execute("VACUUM ANALYZE dblock.distributed_locks")
        owner.execute("CHECKPOINT")
        row = owner.execute("SELECT pg_total_relation_size('dblock.distributed_locks')").fetchone()
    assert row is not None
    return there, row[0] / size


QUESTION = Question("names", "Does a lock cost more among a million names?", measure)
