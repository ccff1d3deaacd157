"""What does it cost to keep 1 to 10,000 leases alive?

One process holds the leases, with a ttl of 3 s. dblock renews all of them in one statement each second. The cost is
the processor time of the client and of the server, in milliseconds per second of holding. python-redis-lock renews
each lock in a thread of its own. kazoo holds any number with one session, which is kept alive by a ping.
"""

from __future__ import annotations

import time
from functools import partial

from bench.harness.contender import Contender
from bench.harness.question import Question, Run
from bench.harness.rounds import Block, Cost, Sample
from bench.harness.table import Column, Table
from bench.harness.workers import Team

TTL = 3.0

COLUMNS = (
    Column("client", "client CPU ms/s", digits=2),
    Column("server", "server CPU ms/s", digits=2),
    Column("client each", "client CPU µs a lease and s", digits=1, drawn=False, checked=0.3),
    Column("server each", "server CPU µs a lease and s", digits=1, drawn=False, checked=0.3),
)


def measure(run: Run) -> list[Table]:
    sizes = run.pick((1, 10, 100, 1_000, 10_000), (1, 10))
    seconds = run.pick(6.0, 0.3)
    blocks: dict[str, Block] = {}
    for one in run.arena.contenders("dblock", ttl=TTL):
        for size in sizes:
            blocks[_row("dblock", size)] = partial(_hold, one, size, seconds)
    for one in run.arena.contenders("python-redis-lock", ttl=TTL, renewed=True):
        for size in sizes[:3]:
            blocks[_row("python-redis-lock", size)] = partial(_hold, one, size, seconds)
    for one in run.arena.contenders("kazoo", ttl=TTL):
        for size in sizes[:4]:
            blocks[_row("kazoo", size)] = partial(_hold, one, size, seconds)
    table = Table("renewal", "leases of 3 s", _row("dblock", run.pick(1_000, 10)), COLUMNS)
    table.noisy = [_row("dblock", size) for size in sizes if size < 1_000]
    return [table.fill(run.interleave(blocks, 2))]


def _row(name: str, leases: int) -> str:
    return f"{name}, {leases:,} lease{'s' * (leases > 1)}"


def _hold(contender: Contender, leases: int, seconds: float) -> Sample:
    with Team(contender, 1) as team:
        team.run("hold_many", name=f"many {time.monotonic_ns()}", number=leases)
        time.sleep(min(TTL / 2, seconds))
        of_client, of_server, began = Cost(team.pids), Cost(contender.servers), time.monotonic()
        time.sleep(seconds)
        lasted = time.monotonic() - began
        client, server = of_client.seconds() / lasted, of_server.seconds() / lasted
        for process in team.processes:
            process.kill()  # to release ten thousand locks would take long
    return {
        "client": client * 1e3,
        "server": server * 1e3,
        "client each": client * 1e6 / leases,
        "server each": server * 1e6 / leases,
    }


QUESTION = Question("renewal", "What does it cost to keep leases alive?", measure)
