"""Measure many names: a lock costs as much among a million as among a thousand; reading all of them takes longer."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time
from statistics import median

import psycopg
from psycopg import conninfo, sql

import dblock
from dblock._runtime.target import resolve
from dblock.admin import schema
from dblock.admin.inspect import overview
from dblock.admin.reaper import Reaper
from tests.robustness.limits import Failure, Measured, Progress, in_background, in_turns, ms, server_with, timed

HELD = 10


def measure(
    many: int = 1_000_000,
    few: int = 1_000,
    pairs: int = 2_000,
    durable: bool = True,
    progress: Progress = lambda _: None,
) -> Measured:
    """Compare a database with many names and one with few, alternately on the same server."""
    found = Measured(f"{many:,} lock names")
    with server_with(durable) as server:
        dsns = [_filled(server.url, f"names_{size}", size, progress) for size in (few, many)]
        with dblock.Client(dsns[0]) as of_few, dblock.Client(dsns[1]) as of_many:
            progress("pairs of acquire and release")
            rng, new = random.Random(1), itertools.count()

            def pair(client: dblock.Client, size: int) -> None:
                client.lock(f"name {rng.randrange(size)}").acquire().release()

            def first(client: dblock.Client) -> None:
                client.lock(f"new {next(new)}").acquire().release()

            before, after = in_turns(pairs, lambda: pair(of_few, few), lambda: pair(of_many, many))
            new_before, new_after = in_turns(pairs // 4, lambda: first(of_few), lambda: first(of_many))
            _pairs(found, before, after, new_before, new_after)
            _sizes(found, dsns[1], many)
            progress("lists")
            leases = [of_many.lock(f"held {number}").acquire() for number in range(HELD)]
            _lists(found, dsns)
            progress("the reaper, with pairs at the same time")
            _reap(found, dsns[1], of_many, many)
            found.claims["the reaper deleted no held lock"] = not any(lease.lost.is_set() for lease in leases)
            for lease in leases:
                lease.release()
    return found


def _filled(server: str, name: str, size: int, progress: Progress) -> str:
    """Create a database with this number of used locks, as copies of the row that a real grant and release left."""
    progress(f"{size:,} names")
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    dsn = conninfo.make_conninfo(server, dbname=name)
    schema.install(dsn)
    with dblock.Client(dsn) as client:
        client.lock("name 0").acquire().release()
    with psycopg.connect(dsn, autocommit=True) as owner:
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
    return dsn


def _pairs(found: Measured, before: float, after: float, new_before: float, new_after: float) -> None:
    found.numbers |= {"pair": after / before, "new": new_after / new_before}
    found.figures["a pair on a known name, compared with few names"] = (
        f"{after / before:.2f} times as long ({ms(before)} → {ms(after)})"
    )
    found.figures["a pair on a new name, compared with few names"] = (
        f"{new_after / new_before:.2f} times as long ({ms(new_before)} → {ms(new_after)})"
    )


def _sizes(found: Measured, dsn: str, many: int) -> None:
    with psycopg.connect(dsn) as owner:
        row = owner.execute(
            "SELECT pg_table_size('dblock.distributed_locks'), pg_indexes_size('dblock.distributed_locks')"
        ).fetchone()
    assert row is not None
    found.numbers["bytes"] = sum(row) / many
    found.figures["the table and its index"] = (
        f"{row[0] / 2**20:.0f} MB and {row[1] / 2**20:.0f} MB, {sum(row) / many:.0f} bytes per name"
    )


def _lists(found: Measured, dsns: list[str]) -> None:
    with overview(resolve(dsns[0])) as of_few, overview(resolve(dsns[1])) as of_many:
        few, many = in_turns(5, of_few.locks, of_many.locks)
        few_all, many_all = in_turns(
            5, lambda: of_few.locks(include_free=True), lambda: of_many.locks(include_free=True)
        )
        found.claims[f"the list of held locks has all {HELD}"] = len(of_many.locks()) == HELD
        found.claims["the list of all stops at its limit"] = len(of_many.locks(include_free=True, limit=100)) == 100
    found.figures["list_locks: held locks"] = f"{ms(many)} ({ms(few)} among few): it reads the whole table"
    found.figures["list_locks: the first 1000 of all locks"] = f"{ms(many_all)} ({ms(few_all)} among few)"
    command = [sys.executable, "-m", "dblock", "--dsn", dsns[1], "ls"]
    taken = timed(lambda: subprocess.run(command, check=True, capture_output=True))
    found.figures["dblock ls, the whole command"] = ms(taken)
    found.failures.append(
        Failure(
            "names that are never reaped", "grants stay fast, but `dblock ls` and the reaper read all names", "none"
        )
    )


def _reap(found: Measured, dsn: str, client: dblock.Client, many: int) -> None:
    lock = client.lock("in use", ttl=30)

    def pair() -> None:
        lock.acquire().release()

    quiet = [timed(pair) for _ in range(500)]
    time.sleep(1.1)  # so that the locks used above are idle for long enough to be reaped
    gone = 0

    def reap() -> None:
        nonlocal gone
        gone = Reaper(dsn, idle=1).once()

    with in_background(pair) as busy:
        seconds = timed(reap)
    found.numbers |= {"reaped": gone, "reap": seconds, "longest": max(busy, default=0.0)}
    found.claims["the reaper deleted all idle locks"] = gone >= many
    found.figures["the reaper, all names"] = (
        f"{seconds:.1f} s in batches of 1000: {ms(seconds / max(gone / 1000, 1))} per batch"
    )
    if busy:
        found.figures["a pair while the reaper runs, compared with before"] = (
            f"{median(busy) / median(quiet):.2f} times as long; the longest took {ms(max(busy))} "
            f"(before: {ms(max(quiet))})"
        )
