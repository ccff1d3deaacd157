"""Measure the cost of a fence: each fenced write next to the same write without one, pair by pair in one run.

    python bench/fences.py [--pairs 2000]

- put: FencedStore.put next to the same upsert through the same engine, without versions and with the last ten.
- update: UPDATE of one row in a transaction that carries a token, next to the same on a table without a fence, per row
  and per table.
- keys: a put among a million keys next to a put among a thousand.

Every commit is durable. The program starts and stops the server, on a separate core if the machine has two. Read the
ratios: the times mean little on another machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
from sqlalchemy import create_engine, text

import fenced_store
from dblock.embedded import Server

LIMITS = {
    ("put", "upsert"): 1.15,
    ("put, 10 versions", "upsert, 10 versions"): 1.15,
    ("update per row", "update"): 1.25,
    ("update per table", "update"): 1.25,
    ("put among 1,000,000", "put among 1,000"): 1.20,
}
"""The largest allowed ratio of the first contender's median to the second's."""

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


def contenders(dsn: str) -> dict[str, Callable[[int], object]]:
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
    for schema, keys in (("fenced_store", 1_000), ("many", 1_000_000)):
        print(f"inserting {keys:,} keys", file=sys.stderr)
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
        "put": lambda number: store.put(f"key {number % 1000 + 1}", value, fence=7),
        "upsert, 10 versions": upsert_keeping,
        "put, 10 versions": lambda number: keeping.put(f"kept {number % 100}", value, fence=7),
        "update": update("bare"),
        "update per row": update("by_row"),
        "update per table": update("by_table"),
        "put among 1,000": lambda number: store.put(f"key {number * 7919 % 1_000 + 1}", value, fence=7),
        "put among 1,000,000": lambda number: many.put(f"key {number * 7919 % 1_000_000 + 1}", value, fence=7),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2000, help="writes per contender (default: 2000)")
    pairs = parser.parse_args().pairs
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    folder = Path(tempfile.mkdtemp(prefix="dblock-bench-"))
    folder.chmod(0o755)  # root's server runs under another account
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[1]})
    server = Server(folder / "data", dies_with_us=True)
    try:
        server.start()
        if len(cores) > 1:
            os.sched_setaffinity(0, {cores[0]})
        runs = contenders(server.url)
        took: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(-200, pairs):
            if number % 500 == 0:
                print(f"{max(number, 0)} of {pairs} writes per contender", file=sys.stderr)
            for name, run in runs.items():
                started = time.perf_counter()
                run(number + 200)
                if number >= 0:
                    took[name].append(time.perf_counter() - started)
    finally:
        server.stop()
        shutil.rmtree(folder)
    print(f"{'':22}{'median':>10}{'p90':>10}")
    medians = {name: statistics.median(times) for name, times in took.items()}
    for name, times in took.items():
        print(f"{name:22}{medians[name] * 1e6:>7.0f} µs{sorted(times)[len(times) * 9 // 10] * 1e6:>7.0f} µs")
    over = False
    for (name, base), limit in LIMITS.items():
        ratio = medians[name] / medians[base]
        over |= ratio > limit
        verdict = "  OVER" if ratio > limit else ""
        print(f"{name} takes {ratio:.2f} times as long as {base} (at most {limit:.2f}){verdict}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
