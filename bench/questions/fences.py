"""What does a fence cost: each fenced write beside the same write without one.

- put: FencedStore.put beside the same upsert through the same engine, without versions and with the last ten.
- update: an UPDATE of one row in a transaction that carries a token, beside the same on a table without a fence.
- keys: a put among a million keys beside a put among a thousand.

Every commit is durable. The writes take turns in blocks, in this process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import psycopg
from sqlalchemy import create_engine, text

import fenced_store
from bench.harness.question import Question, Run
from bench.harness.rounds import Block, Cost, Sample, progress, quantile
from bench.harness.servers import Running
from bench.harness.table import Column, Goal, Table

COLUMNS = (
    Column("p50", "p50 µs", checked=0.15),
    Column("p99", "p99 µs", drawn=False),
    Column("server", "server CPU µs"),
    Column("client", "client CPU µs", drawn=False),
)

BESIDE = {
    "upsert": ["dblock: put"],
    "upsert, 10 versions": ["dblock: put, 10 versions"],
    "update": ["dblock: update, fenced per row", "dblock: update, fenced per table"],
    "dblock: put among 1,000 keys": ["dblock: put among 1,000,000 keys"],
}
"""For each write, those that are compared with it."""

LIMITS = {
    "dblock: put": 1.15,
    "dblock: put, 10 versions": 1.15,
    "dblock: update, fenced per row": 1.25,
    "dblock: update, fenced per table": 1.25,
    "dblock: put among 1,000,000 keys": 1.2,
}

TABLES = {
    "upsert": ("fences_put", "a put beside an upsert"),
    "upsert, 10 versions": ("fences_versions", "a put that keeps ten versions beside an upsert that does"),
    "update": ("fences_update", "an update of a fenced row beside one of a plain row"),
    "dblock: put among 1,000 keys": ("fences_keys", "a put among many keys"),
}
"""The name and the title of the table of each write."""

UPSERT = text(
    "INSERT INTO plain AS p (key, value, stored_at, stored_by)"
    " VALUES (:key, CAST(:value AS jsonb), clock_timestamp(), :who) ON CONFLICT (key) DO UPDATE"
    " SET value = excluded.value, stored_at = excluded.stored_at, stored_by = excluded.stored_by RETURNING stored_at"
)

UPSERT_KEEPING = text(
    "WITH stored AS (INSERT INTO kept AS k (key, value, stored_at, stored_by, version)"
    " VALUES (:key, CAST(:value AS jsonb), clock_timestamp(), :who, 1) ON CONFLICT (key) DO UPDATE SET"
    " value = excluded.value, stored_at = excluded.stored_at, stored_by = excluded.stored_by, version = k.version + 1"
    " RETURNING *), noted AS (INSERT INTO kept_versions SELECT * FROM stored),"
    " gone AS (DELETE FROM kept_versions AS v USING stored AS s WHERE v.key = s.key AND v.version <= s.version - 10)"
    " SELECT stored_at FROM stored"
)


def writes(dsn: str, many_keys: int) -> dict[str, Callable[[int], object]]:
    """Create the tables, and return the writes by name."""
    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    fenced_store.install(engine)
    fenced_store.install(engine, "many")
    raw = psycopg.connect(dsn)
    raw.execute("CREATE TABLE plain (key text PRIMARY KEY, value jsonb, stored_at timestamptz, stored_by text)")
    columns = "key text, value jsonb, stored_at timestamptz, stored_by text, version bigint"
    raw.execute(f"CREATE TABLE kept ({columns}, PRIMARY KEY (key))".encode())
    raw.execute(f"CREATE TABLE kept_versions ({columns}, PRIMARY KEY (key, version))".encode())
    for table in ("bare", "by_row", "by_table"):
        raw.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v int, w text)".encode())
        raw.execute(f"INSERT INTO {table} SELECT n, 0, repeat('x', 100) FROM generate_series(1, 1000) AS n".encode())
    for schema, keys in (("fenced_store", 1_000), ("many", many_keys)):
        progress(f"inserting {keys:,} keys")
        raw.execute(
            f"INSERT INTO {schema}.fences (resource, token, stored_at, version, value)"
            f" SELECT 'key ' || n, 1, now(), 1, '{{\"a\": 1}}' FROM generate_series(1, {keys}) AS n".encode()
        )
    raw.execute("INSERT INTO plain SELECT 'key ' || n, '{\"a\": 1}', now(), '' FROM generate_series(1, 1000) AS n")
    raw.commit()
    raw.autocommit = True
    raw.execute("VACUUM ANALYZE")
    raw.autocommit = False
    fenced_store.protect(engine, "by_row")
    fenced_store.protect(engine, "by_table", per="table")
    store = fenced_store.FencedStore(engine, history=0)
    keeping = fenced_store.FencedStore(engine)
    many = fenced_store.FencedStore(engine, schema="many", history=0)
    value = {"amount": 100, "currency": "EUR", "lines": [1, 2, 3]}

    def upsert(number: int) -> None:
        with autocommit.connect() as connection:
            values = {"key": f"key {number % 1000 + 1}", "value": json.dumps(value), "who": "me"}
            connection.execute(UPSERT, values).all()

    def upsert_keeping(number: int) -> None:
        with autocommit.connect() as connection:
            values = {"key": f"kept {number % 100}", "value": json.dumps(value), "who": "me"}
            connection.execute(UPSERT_KEEPING, values).all()

    def update(table: str) -> Callable[[int], None]:
        statement = f"UPDATE {table} SET v = v + 1 WHERE id = %s".encode()

        def run(number: int) -> None:
            with raw.transaction():
                raw.execute("SELECT set_config('fenced_store.token', '7', true)")
                raw.execute(statement, [number % 1000 + 1])

        return run

    return {
        "upsert": upsert,
        "dblock: put": lambda number: store.put(f"key {number % 1000 + 1}", value, fence=7),
        "upsert, 10 versions": upsert_keeping,
        "dblock: put, 10 versions": lambda number: keeping.put(f"kept {number % 100}", value, fence=7),
        "update": update("bare"),
        "dblock: update, fenced per row": update("by_row"),
        "dblock: update, fenced per table": update("by_table"),
        "dblock: put among 1,000 keys": lambda number: store.put(f"key {number * 7919 % 1_000 + 1}", value, fence=7),
        "dblock: put among 1,000,000 keys": lambda number: many.put(
            f"key {number * 7919 % many_keys + 1}", value, fence=7
        ),
    }


def measure(run: Run) -> list[Table]:
    postgres = run.arena.postgres
    acts = writes(postgres.where, run.pick(1_000_000, 2_000))
    numbers = count()
    for act in acts.values():
        for _ in range(run.pick(100, 10)):
            act(next(numbers))  # prepares statements and touches pages
    blocks: dict[str, Block] = {
        name: partial(_block, act, numbers, postgres, run.pick(0.25, 0.02)) for name, act in acts.items()
    }
    measured = run.interleave(blocks, 12)
    tables = []
    for base, compared in BESIDE.items():
        name, title = TABLES[base]
        table = Table(name, title, base, COLUMNS, picture="in order")
        goals = [Goal(name, "p50", base, LIMITS[name]) for name in compared]
        tables.append(table.fill(measured.part((base, *compared)), goals))
    return tables


def _block(act: Callable[[int], object], numbers: Iterator[int], postgres: Running, seconds: float) -> Sample:
    server, client = Cost([postgres.pid]), time.process_time()
    times, now = [], time.perf_counter()
    ends = now + seconds
    while now < ends:
        act(next(numbers))
        done = time.perf_counter()
        times.append(done - now)
        now = done
    return {
        "p50": quantile(times, 0.5) * 1e6,
        "p99": quantile(times, 0.99) * 1e6,
        "client": (time.process_time() - client) * 1e6 / len(times),
        "server": server.microseconds(len(times)),
    }


QUESTION = Question("fences", "What does a fence cost?", measure)
