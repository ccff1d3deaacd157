"""What does a lock over HTTP cost beside the same lock through a Client?

One `dblock serve`, without authentication, and clients that keep one connection open. Each client is a process with a
lock of its own. The empty requests are two requests that the server answers without the database: they show what HTTP
costs. One client shows the latency, four clients the throughput. The processor time of the server is that of the HTTP
server and of the database together.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from bench.harness.contender import Contender
from bench.harness.question import Question, Run, pair_block
from bench.harness.rounds import Block, Sample
from bench.harness.servers import DidNotStart, die_with_parent
from bench.harness.table import Column, Table
from bench.harness.workers import Team

COLUMNS = (
    Column("p50", "p50 µs, 1 client", checked=0.15),
    Column("p99", "p99 µs, 1 client", drawn=False),
    Column("rate", "pairs/s, 4 clients", lower_is_better=False, checked=0.15),
    Column("server", "server CPU µs, 1 client"),
    Column("client", "client CPU µs, 1 client", drawn=False),
)

PEERS = "bench.peers.http_locks"


def measure(run: Run) -> list[Table]:
    postgres = run.arena.postgres
    with ExitStack() as stack:
        address, pid = stack.enter_context(_serving(postgres.where))
        contenders = [
            *run.arena.contenders("dblock"),
            Contender("SELECT 1", "bench.peers.floors:RoundTrip", postgres.where, postgres.pid),
            Contender("two empty requests", f"{PEERS}:EmptyRequests", address, pid),
            Contender("dblock over HTTP", f"{PEERS}:Http", address, pid, also=(postgres.pid,)),
        ]
        contenders = [one for one in contenders if run.arena.wanted(one.name)]
        alone, many = run.teams(stack, contenders, 1), run.teams(stack, contenders, run.pick(4, 2))
        blocks: dict[str, Block] = {
            name: partial(_both, run, team, many[name]) for name, team in alone.items() if name in many
        }
        measured = run.interleave(blocks, 10)
    return [Table("http", "acquire and release", "dblock", COLUMNS).fill(measured)]


def _both(run: Run, alone: Team, many: Team) -> Sample:
    one = pair_block(alone, run.pick(0.4, 0.05))
    return one | {"rate": pair_block(many, run.pick(0.6, 0.05))["rate"]}


@contextmanager
def _serving(where: str) -> Iterator[tuple[str, int]]:
    """Run `dblock serve`, and yield its address and its process."""
    command = [sys.executable, "-m", "dblock", "serve", "--dsn", where, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=die_with_parent
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if found := re.search(r"serving at (http://\S+)", line):
                    yield found[1], process.pid
                    return
                print(line, end="", file=sys.stderr)
            raise DidNotStart("dblock serve did not start.")
        finally:
            process.terminate()


QUESTION = Question("http", "What does a lock over HTTP cost?", measure)
