"""Compare the cost of a pair of acquire and release: dblock, raw psycopg and redis-py, interleaved in one run.

    python bench/pairs.py [--pairs 3000]

Each contender acquires and releases one uncontended lock. They take turns, one pair each, so that other load on the
machine affects all of them alike. Read the ratios: the times mean little on another machine.

- psycopg: the naive lock, two prepared statements on a raw connection, both durable. It has no token order and no
  check for late replies: only the two statements.
- dblock: a durable grant with its token, through the public Client.
- efficiency: an efficiency lock, which does not wait for the disk and has no token.
- redis-py: its Lock, on a redis-server that never waits for its disk.

The program starts and stops the servers. If the machine has two cores, the clients run on one and the servers on the
other. Otherwise the scheduler's choice between one core and two would outweigh every measured difference.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

import dblock
from dblock._runtime.target import resolve
from dblock.admin import schema
from dblock.embedded import Server

LIMITS = {("dblock", "psycopg"): 1.25, ("dblock", "redis-py"): 1.30, ("efficiency", "redis-py"): 1.00}
"""The largest allowed ratio of the first contender's median to the second's."""

NAIVE_TABLE = "CREATE TABLE naive (name text PRIMARY KEY, token bigint, owner text, expires_at timestamptz)"
NAIVE_ACQUIRE = """
    INSERT INTO naive VALUES (%s, nextval('naive_token'), %s, clock_timestamp() + interval '30 s')
    ON CONFLICT (name) DO UPDATE
    SET token = excluded.token, owner = excluded.owner, expires_at = excluded.expires_at
    WHERE naive.expires_at <= clock_timestamp() RETURNING token
"""
NAIVE_RELEASE = "UPDATE naive SET expires_at = '-infinity' WHERE name = %s AND owner = %s"


def naive_pair(dsn: str) -> Callable[[], Any]:
    connection = psycopg.connect(dsn, autocommit=True, prepare_threshold=0)
    connection.execute(NAIVE_TABLE)
    connection.execute("CREATE SEQUENCE naive_token")

    def pair() -> None:
        assert connection.execute(NAIVE_ACQUIRE, ("a", "me")).fetchone()
        connection.execute(NAIVE_RELEASE, ("a", "me"))

    return pair


def dblock_pair(client: dblock.Client, name: str, durable: bool) -> Callable[[], Any]:
    lock: dblock.Lock[Any] = client.lock(name) if durable else client.efficiency_lock(name)

    def pair() -> None:
        lease = lock.try_acquire()
        assert lease is not None
        lease.release()

    return pair


def redis_pair(port: int) -> Callable[[], Any]:
    import redis

    client = redis.Redis(port=port)
    while True:
        try:
            client.ping()
            break
        except redis.ConnectionError:
            time.sleep(0.02)

    def pair() -> None:
        lock = client.lock("a", timeout=30)
        assert lock.acquire(blocking=False)
        lock.release()

    return pair


@contextmanager
def redis_server() -> Iterator[int | None]:
    """Yield the port of a Redis without persistence, or None if redis-server is not installed."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            program,
            "--bind",
            "127.0.0.1",
            "--port",
            str(port),
            "--dir",
            folder,
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield port
        finally:
            process.terminate()
            process.wait()


CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def move_to_core(number: int) -> None:
    """Pin this process, and every process that it starts from now on, to one core, if there are two."""
    if len(CORES) > 1:
        os.sched_setaffinity(0, {CORES[number]})


def measure(contenders: dict[str, Callable[[], Any]], pairs: int) -> dict[str, list[float]]:
    """Run the contenders in turns, and return the time of each pair."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for pair in contenders.values():
        for _ in range(200):
            pair()
    for number in range(pairs):
        if number % 250 == 0 and sys.stderr.isatty():
            print(f"\r{number} of {pairs} pairs per contender", end="", file=sys.stderr, flush=True)
        for name, pair in contenders.items():
            began = time.perf_counter()
            pair()
            times[name].append(time.perf_counter() - began)
    if sys.stderr.isatty():
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the cost of a pair of acquire and release.")
    parser.add_argument("--pairs", type=int, default=3000, help="pairs per contender (default: 3000)")
    pairs = parser.parse_args().pairs
    folder = Path(tempfile.gettempdir()) / f"dblock-bench-{os.getpid()}"
    server = Server(folder, dies_with_us=True)
    try:
        move_to_core(1)
        with redis_server() as port:
            server.start()
            schema.install(resolve(server.url))
            move_to_core(0)
            client = dblock.Client(server.url)
            contenders = {
                "psycopg": naive_pair(server.url),
                "dblock": dblock_pair(client, "a", durable=True),
                "efficiency": dblock_pair(client, "b", durable=False),
            }
            if port is None:
                print("redis-server is not installed: skipping redis-py (on Debian, run apt-get install redis-server)")
            else:
                contenders["redis-py"] = redis_pair(port)
            times = measure(contenders, pairs)
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return report(times)


def report(times: dict[str, list[float]]) -> int:
    """Print a table and the ratios, and return 1 if a ratio is over its limit."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{'':10} {'median':>9} {'p90':>9} {'p99':>9}")
    for name, values in times.items():
        quantiles = statistics.quantiles(values, n=100)
        shown = [medians[name], quantiles[89], quantiles[98]]
        print(f"{name:10}" + "".join(f" {seconds * 1e6:6.0f} µs" for seconds in shown))
    over = 0
    for (ours, theirs), limit in LIMITS.items():
        if theirs in medians:
            ratio = medians[ours] / medians[theirs]
            over += ratio > limit
            print(
                f"{ours} takes {ratio:.2f} times as long as {theirs} (at most {limit:.2f}){'  OVER' * (ratio > limit)}"
            )
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
