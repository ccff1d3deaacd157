"""Compare how fast a contended lock changes hands: dblock and python-redis-lock, in one run.

    python bench/handoffs.py [--seconds 5] [--processes 8]
    python bench/handoffs.py --asyncio
    python bench/handoffs.py --slow-disk

Eight processes acquire and release one lock as fast as they can, for a few seconds. The contenders take turns. The
Jain index measures how evenly the processes were served: 1 if all got the same share, 1/8 if one got everything.

python-redis-lock also wakes its waiters by a push. It runs on a Redis that writes every command to its disk before it
replies, as a durable grant does. With --slow-disk each fsync of Postgres takes a millisecond longer, and dblock runs
against a variant of itself that sends the notification inside a synchronous commit. That needs a C compiler.

With --asyncio each process uses an AsyncClient. The program starts and stops the servers.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
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
from typing import Any, NamedTuple

import psycopg

import dblock
from dblock.admin import schema
from dblock.embedded import Server

SLOW_FSYNC = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
static int slowly(const char *name, int file) {
    int (*real)(int) = (int (*)(int)) dlsym(RTLD_NEXT, name);
    usleep(1000);
    return real(file);
}
int fsync(int file) { return slowly("fsync", file); }
int fdatasync(int file) { return slowly("fdatasync", file); }
"""

ROUNDS = 3

Lock = Callable[[], Any]


class Result(NamedTuple):
    """The result of one contender in one round."""

    rate: float
    jain: float
    longest: float


def dblock_lock(where: str) -> Lock:
    lock = dblock.Client(where).lock("hot")
    return lambda: lock


def dblock_async_lock(where: str) -> Lock:
    """Return a lock of an AsyncClient. The process runs its event loop only while it acquires or releases."""
    loop = asyncio.new_event_loop()
    lock = dblock.AsyncClient(where).lock("hot")

    @contextmanager
    def body() -> Iterator[None]:
        lease = loop.run_until_complete(lock.acquire())
        yield
        loop.run_until_complete(lease.release())

    return body


def redis_lock(where: str) -> Lock:
    import redis
    import redis_lock  # type: ignore[import-untyped]

    client = redis.Redis(port=int(where))
    return lambda: redis_lock.Lock(client, "hot", expire=30)


def work(make: Callable[[str], Lock], where: str, seconds: float, ready: Any, go: Any, told: Any) -> None:
    """Acquire and release the lock until the time is up, and report how often and the longest wait."""
    lock = make(where)
    with lock():
        pass
    ready.put(True)
    go.wait()
    count, longest = 0, 0.0
    # Not measured: at the start all processes join the queue at once.
    with lock():
        pass
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        with lock():
            longest = max(longest, time.monotonic() - began)
            count += 1
    told.put((count, longest))


def contend(make: Callable[[str], Lock], where: str, seconds: float, processes: int) -> Result:
    """Run this many processes that contend for one lock."""
    context = multiprocessing.get_context("fork")
    ready, go, told = context.Queue(), context.Event(), context.Queue()
    workers = [context.Process(target=work, args=(make, where, seconds, ready, go, told)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.get(timeout=60)
    time.sleep(0.5)
    go.set()
    answers = [told.get(timeout=seconds + 60) for _ in workers]
    for worker in workers:
        worker.join()
    counts = [count for count, _ in answers]
    jain = sum(counts) ** 2 / (len(counts) * sum(count**2 for count in counts))
    return Result(sum(counts) / seconds, jain, max(longest for _, longest in answers))


@contextmanager
def redis_server() -> Iterator[str | None]:
    """Yield the port of a Redis that writes every command to its disk, or None if it cannot be started."""
    program = shutil.which("redis-server")
    try:
        import redis_lock  # noqa: F401
    except ImportError:
        program = None
    if program is None:
        print("redis-server or python-redis-lock is not installed: skipping python-redis-lock")
        yield None
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        settings = {"bind": "127.0.0.1", "port": port, "dir": folder, "save": "", "appendonly": "yes"}
        settings["appendfsync"] = "always"
        command = [program, *(word for key, value in settings.items() for word in (f"--{key}", str(value)))]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            time.sleep(0.5)
            yield str(port)
        finally:
            process.terminate()
            process.wait()


def make_disk_slow(server: Server, folder: str) -> None:
    """Make each fsync of the server take a millisecond longer, from its next start on."""
    source, shim = Path(folder) / "slow.c", Path(folder) / "slow.so"
    source.write_text(SLOW_FSYNC)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    os.chmod(folder, 0o711)  # noqa: S103 - root's server runs under another account, which must reach the file
    server.environment["LD_PRELOAD"] = str(shim)


def notify_in_a_synchronous_commit(where: str) -> None:
    """Change the functions to send the notification inside a synchronous commit."""
    with psycopg.connect(where, autocommit=True) as owner:
        owner.execute("SET search_path TO dblock, pg_temp")
        for name, right, wrong in (
            ("release", "IF NOT release.durable AND", "IF false AND"),
            ("wake_next", "<> 'off'", "= 'off'"),
        ):
            row = owner.execute("SELECT pg_get_functiondef(%s::regproc)", [name]).fetchone()
            assert row is not None
            assert right in row[0]
            owner.execute(row[0].replace(right, wrong).encode())


def told(name: str, results: list[Result]) -> float:
    """Print the results of one contender, and return its median rate."""
    rate = statistics.median(result.rate for result in results)
    jain, longest = min(result.jain for result in results), max(result.longest for result in results)
    print(f"{name:28} {rate:7.0f} hand-offs/s   Jain {jain:.4f}   longest wait {longest * 1000:.0f} ms")
    return rate


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare how fast a contended lock changes hands.")
    parser.add_argument("--seconds", type=float, default=5, help="duration of each round (default: 5)")
    parser.add_argument("--processes", type=int, default=8, help="number of contending processes (default: 8)")
    parser.add_argument("--asyncio", action="store_true", help="use an AsyncClient in each process")
    parser.add_argument("--slow-disk", action="store_true", help="add 1 ms to each fsync, and vary the notification")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(tempfile.gettempdir()) / f"dblock-bench-{os.getpid()}"
        server = Server(folder, dies_with_us=True)
        if options.slow_disk:
            make_disk_slow(server, scratch)
        try:
            server.start()
            schema.install(server.url)
            return compare_disks(server, options) if options.slow_disk else compare_peers(server, options)
        finally:
            server.stop()
            shutil.rmtree(folder, ignore_errors=True)


def compare_peers(server: Server, options: argparse.Namespace) -> int:
    ours, theirs = [], []
    with redis_server() as port:
        for number in range(ROUNDS):
            print(f"round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
            make = dblock_async_lock if options.asyncio else dblock_lock
            ours.append(contend(make, server.url, options.seconds, options.processes))
            if port:
                theirs.append(contend(redis_lock, port, options.seconds, options.processes))
    rate = told("dblock", ours)
    if theirs:
        ratio = rate / told("python-redis-lock, fsync", theirs)
        print(f"dblock makes {ratio:.2f} times as many hand-offs")
    return 0


def compare_disks(server: Server, options: argparse.Namespace) -> int:
    results: dict[str, list[Result]] = {"unchanged": [], "notified in the commit": []}
    for number in range(ROUNDS):
        print(f"round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
        for name in results:
            schema.uninstall(server.url)
            schema.install(server.url)
            if name != "unchanged":
                notify_in_a_synchronous_commit(server.url)
            results[name].append(contend(dblock_lock, server.url, options.seconds, options.processes))
    rates = [told(name, found) for name, found in results.items()]
    ratio = rates[0] / rates[1]
    print(f"1 ms more for each fsync: {ratio:.2f} times as many hand-offs (at least 1.30){'  UNDER' * (ratio < 1.3)}")
    return 1 if ratio < 1.3 else 0


if __name__ == "__main__":
    sys.exit(main())
