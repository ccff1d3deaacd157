"""Compare a pair of acquire and release over HTTP with the same pair through a Client, in one run.

    python bench/http_pairs.py [--seconds 60] [--clients 4]

Each client is a process of its own, with its own lock, so no client waits for another. The contenders take turns in
blocks of a tenth of a second, and the order rotates from round to round:

- round trip: SELECT 1, prepared, over psycopg. It is the least that any call of the database takes.
- Client: a durable grant with its token and its release, through the public Client.
- empty requests: two requests to /healthz, which the server answers without the database. They show what HTTP costs.
- HTTP: POST /v1/locks/{name} and DELETE /v1/leases/{lease} at `dblock serve`, over one connection that is kept open.

First one client is measured alone, for the latency, and then all clients together, for the throughput. A ratio is
computed within each round, from blocks that follow one another. Read the medians of the ratios and their quartiles:
the times mean little on another machine.

The program starts and stops Postgres and one `dblock serve`, without authentication. It pins no process to a core.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import psycopg

import dblock
from dblock._runtime.target import resolve
from dblock.admin import schema
from dblock.embedded import Server

BLOCK = 0.1
"""Seconds for which one contender runs before the next has its turn."""

WARM_UP = 50
"""Calls of each contender before the first round, which open connections and prepare statements."""

CONTENDERS = ("round trip", "Client", "empty requests", "HTTP")

RATIOS = (("Client", "round trip"), ("HTTP", "round trip"), ("HTTP", "empty requests"), ("HTTP", "Client"))

Act = Callable[[], object]


class Block(NamedTuple):
    """What the clients did in one block."""

    times: list[float]
    rate: float
    """Calls per second, of all clients together."""


def acts(dsn: str, address: str, name: str) -> dict[str, Act]:
    """Return what a client of each contender repeats."""
    raw = psycopg.connect(dsn, autocommit=True)
    lock = dblock.Client(dsn).lock(name)
    web = http.client.HTTPConnection(address.removeprefix("http://"))
    headers = {"Content-Type": "application/json"}

    def ask(method: str, path: str, status: int, body: bytes | None = None) -> bytes:
        web.request(method, path, body, headers if body else {})
        reply = web.getresponse()
        content = reply.read()
        assert reply.status == status, (reply.status, content)
        return content

    def client_pair() -> None:
        lease = lock.try_acquire()
        assert lease is not None
        lease.release()

    def empty_requests() -> None:
        ask("GET", "/healthz", 200)
        ask("GET", "/healthz", 200)

    def http_pair() -> None:
        lease = json.loads(ask("POST", f"/v1/locks/{name}", 200, b'{"ttl": 30}'))["lease"]
        ask("DELETE", f"/v1/leases/{lease}", 204)

    found = (lambda: raw.execute("SELECT 1", prepare=True), client_pair, empty_requests, http_pair)
    return dict(zip(CONTENDERS, found, strict=True))


def work(dsn: str, address: str, name: str, orders: Connection) -> None:
    """Be one client: run a block of a contender each time that its name arrives, until None does."""
    repeated = acts(dsn, address, name)
    for act in repeated.values():
        for _ in range(WARM_UP):
            act()
    orders.send(None)
    while (contender := orders.recv()) is not None:
        act, times = repeated[contender], []
        began = now = time.perf_counter()
        while now - began < BLOCK:
            act()
            ended = time.perf_counter()
            times.append(ended - now)
            now = ended
        orders.send(Block(times, len(times) / (now - began)))


def run_block(clients: list[Connection], contender: str) -> Block:
    """Let these clients run one block at the same time."""
    for client in clients:
        client.send(contender)
    done: list[Block] = [client.recv() for client in clients]
    return Block([seconds for block in done for seconds in block.times], sum(block.rate for block in done))


@contextmanager
def serving(dsn: str) -> Iterator[str]:
    """Run `dblock serve`, and yield its address."""
    command = [sys.executable, "-m", "dblock", "serve", "--dsn", dsn, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if found := re.search(r"serving at (http://\S+)", line):
                    yield found[1]
                    return
                print(line, end="", file=sys.stderr)
            raise SystemExit("dblock serve did not start.")
        finally:
            process.terminate()


@contextmanager
def running_clients(dsn: str, address: str, number: int) -> Iterator[list[Connection]]:
    """Start the client processes, and yield the pipes to them once all are warm."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for which in range(number):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=work, args=(dsn, address, f"pair{which}", theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()
        yield pipes
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            process.terminate()


def measure(clients: list[Connection], seconds: float) -> dict[int, dict[str, list[Block]]]:
    """Let the contenders take turns for this time. Return the blocks by the number of clients and by contender."""
    blocks: dict[int, dict[str, list[Block]]] = {1: defaultdict(list), len(clients): defaultdict(list)}
    ends, turn = time.monotonic() + seconds, 0
    while time.monotonic() < ends or turn < len(CONTENDERS):
        first = turn % len(CONTENDERS)
        for number, found in blocks.items():
            for contender in CONTENDERS[first:] + CONTENDERS[:first]:
                found[contender].append(run_block(clients[:number], contender))
        turn += 1
    return blocks


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:6.2f}  ({low:.2f} to {high:.2f})"


def report(blocks: dict[int, dict[str, list[Block]]]) -> None:
    """Print the times and the rates, and the ratios within the rounds."""
    for number, found in blocks.items():
        print(f"\n{number} client{'s' * (number > 1)}, {len(found[CONTENDERS[0]])} rounds")
        print(f"{'':16}{'median':>10}{'p99':>10}{'a second':>10}")
        for contender in CONTENDERS:
            times = sorted(seconds for block in found[contender] for seconds in block.times)
            rate = statistics.median(block.rate for block in found[contender])
            shown = [statistics.median(times), times[len(times) * 99 // 100]]
            print(f"{contender:16}" + "".join(f"{seconds * 1e6:7.0f} µs" for seconds in shown) + f"{rate:10.0f}")
        for ours, theirs in RATIOS:
            rounds = list(zip(found[ours], found[theirs], strict=True))
            longer = [statistics.median(a.times) / statistics.median(b.times) for a, b in rounds]
            rates = [a.rate / b.rate for a, b in rounds]
            name = f"{ours} to {theirs}"
            print(f"{name:24} time {quartiles(longer):24} rate {quartiles(rates)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare locks over HTTP with locks through a Client.")
    parser.add_argument("--seconds", type=float, default=60, help="time to measure for (default: 60)")
    parser.add_argument("--clients", type=int, default=4, help="clients of the second part, at least 2 (default: 4)")
    options = parser.parse_args()
    if options.clients < 2:
        parser.error("--clients takes 2 or more.")
    folder = Path(tempfile.gettempdir()) / f"dblock-bench-{os.getpid()}"
    server = Server(folder, dies_with_us=True)
    try:
        server.start()
        schema.install(resolve(server.url))
        with serving(server.url) as address, running_clients(server.url, address, options.clients) as clients:
            blocks = measure(clients, options.seconds)
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    report(blocks)


if __name__ == "__main__":
    main()
