"""What does it cost to keep 1 to 10,000 leases alive?

One process holds the leases, with a ttl of 3 s. dblock renews all of them in one statement each second. The cost is
the processor time of the client and of the server, in milliseconds per second of holding. python-redis-lock renews
each lock in a thread of its own. kazoo holds any number with one session, which is kept alive by a ping.
"""

from __future__ import annotations

import time
from functools import partial

import psycopg

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
    seconds = run.pick(5.0, 0.3)
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
    table = Table("renewal", "leases of 3 s", _row("dblock", run.pick(1_000, 10)), COLUMNS, picture="in order")
    table.noisy = [_row("dblock", size) for size in sizes if size < 1_000]
    return [table.fill(run.interleave(blocks, 2))]


def _row(name: str, leases: int) -> str:
    return f"{name}, {leases:,} lease{'s' * (leases > 1)}"


def _hold(contender: Contender, leases: int, seconds: float) -> Sample:
    with Team(contender, 1) as team:
        name = f"many {time.monotonic_ns()}"
        team.run("hold_many", name=name, number=leases)
        time.sleep(min(TTL / 2, seconds))
        of_client, of_server, began = Cost(team.pids), Cost(contender.servers), time.monotonic()
        time.sleep(seconds)
        lasted = time.monotonic() - began
        client, server = of_client.seconds() / lasted, of_server.seconds() / lasted
        _check_that_all_are_held(contender, name, leases)
        for process in team.processes:
            process.kill()  # to release ten thousand locks would take long
    return {
        "client": client * 1e3,
        "server": server * 1e3,
        "client each": client * 1e6 / leases,
        "server each": server * 1e6 / leases,
    }


def _check_that_all_are_held(contender: Contender, name: str, leases: int) -> None:
    """Raise an error if the client of dblock was too slow to renew every lease, because then it had less to do."""
    if not contender.name.startswith("dblock"):
        return
    with psycopg.connect(contender.where, autocommit=True) as owner:
        row = owner.execute(
            "SELECT count(*) FROM dblock.distributed_locks WHERE name LIKE %s AND expires_at > clock_timestamp()",
            [f"{name} %"],
        ).fetchone()
    if row is None or row[0] < leases:
        raise RuntimeError(f"only {row and row[0]} of {leases} leases are still held: this machine is too slow")


QUESTION = Question("renewal", "What does it cost to keep leases alive?", measure)
