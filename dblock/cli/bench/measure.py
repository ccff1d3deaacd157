"""`dblock bench`: how quick the locks are on a given database, beside what that database does without them.

Each figure is taken from the outside, as a program would see it. What a bare round trip and a bare durable commit
take on the same server is measured in the same run, so that the figures can be read as ratios: they tell the
database and the network from the locks. It uses locks of its own and holds nothing at the end. Any role that may
lock can run it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dblock._runtime.error_mapping import translated
from dblock._runtime.socket_timeout import bounded
from dblock._runtime.target import Target
from dblock.client import AsyncClient, Client

if TYPE_CHECKING:
    from dblock.lease import AsyncLease
    from dblock.lock import AsyncLock

SHARES = {"round_trip": 0.1, "commit": 0.1, "pair": 0.3, "many": 0.25, "handoff": 0.25}
"""How much of the time each figure gets."""

COMMIT = "SELECT pg_logical_emit_message(true, 'dblock bench', '')"
"""Writes a few bytes to the log and nothing to any table, so that there is something to commit."""

PATIENCE = 5.0
"""Seconds that the server may take beyond the time that was given."""

WARM_UP = 3
"""How often a thing is done before it counts: connections are opened and statements prepared."""

TTL = 30.0

Progress = Callable[[str, float], None]
"""Is told which figure is being taken, and how far it is, from 0 to 1."""

During = Callable[[str], Iterator[None]]
"""Goes on for as long as a figure has."""


@dataclass
class Timed:
    """How long something took each time, and how often it was done in all that time."""

    samples: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """How often in a second."""
        return len(self.samples) / self.seconds if self.seconds else 0.0

    def quantile(self, part: float) -> float:
        """Return what this part of the times were no longer than: a half for the median."""
        if not self.samples:
            return 0.0
        ordered = sorted(self.samples)
        return ordered[max(math.ceil(part * len(ordered)) - 1, 0)]


@dataclass
class Measured:
    """The figures, as far as they were taken; None for one that could not be."""

    prefix: str
    """What the names of the locks begin with."""
    clients: int
    fsync: bool = True
    """Whether the server waits for its disk at all."""
    round_trip: Timed | None = None
    commit: Timed | None = None
    pair: Timed | None = None
    many: Timed | None = None
    """Pairs by several clients at once, each on a lock of its own."""
    handoff: Timed | None = None
    """From a release to the next grant, with several in line for one lock."""

    @property
    def waiters(self) -> int:
        """How many stand in line for one lock, beside its holder: two at least, so that there is always one."""
        return max(self.clients, 2)

    @property
    def locks(self) -> int:
        """How many locks were used, and are known to the database from now on."""
        return self.waiters + 3

    def times(self, what: str) -> float | None:
        """Return how many round trips, or commits, the median pair takes."""
        unit: Timed | None = getattr(self, what)
        if self.pair is None or unit is None or not unit.quantile(0.5):
            return None
        return self.pair.quantile(0.5) / unit.quantile(0.5)


def measure(
    target: Target, schema: str, seconds: float, clients: int, progress: Progress = lambda what, part: None
) -> Measured:
    """Take all figures, in this time, and return them."""
    measured = Measured(f"bench:{secrets.token_hex(4)}", clients)

    def during(what: str) -> Iterator[None]:
        """Go on for as long as this figure has."""
        began, lasts = time.monotonic(), seconds * SHARES[what]
        while (gone := time.monotonic() - began) < lasts:
            progress(what, gone / lasts)
            yield
        progress(what, 1.0)

    # First, so that a schema that is not there is said at once.
    with Client(target.conninfo(), schema=schema, holder="dblock bench") as client:
        lock = client.lock(f"{measured.prefix}:alone", ttl=TTL, timeout=TTL)
        lock.holder()
        _measure_server(target, schema, measured, during, seconds)
        measured.pair = _repeated(during("pair"), lambda: lock.acquire().release())
    asyncio.run(_measure_crowd(target, schema, measured, during))
    return measured


def _measure_server(target: Target, schema: str, measured: Measured, during: During, seconds: float) -> None:
    """Measure what the server does without locks."""
    from psycopg.errors import InsufficientPrivilege

    with translated(schema):
        connection = target.connect()
    with bounded(connection, seconds + PATIENCE), translated(schema), connection:
        fsync = connection.execute("SHOW fsync").fetchone()
        measured.fsync = fsync != ("off",)
        measured.round_trip = _repeated(during("round_trip"), lambda: connection.execute("SELECT 1", prepare=True))
        connection.execute("SET synchronous_commit TO on")
        with contextlib.suppress(InsufficientPrivilege):  # somebody has taken that right from everybody
            measured.commit = _repeated(during("commit"), lambda: connection.execute(COMMIT, prepare=True))


async def _measure_crowd(target: Target, schema: str, measured: Measured, during: During) -> None:
    """Measure several clients at once: each on a lock of its own, then all on one."""
    async with contextlib.AsyncExitStack() as opened:
        clients = [
            await opened.enter_async_context(
                AsyncClient(target.conninfo(), schema=schema, holder=f"dblock bench {number}", pool_size=1)
            )
            for number in range(measured.waiters + 1)
        ]
        own = [client.lock(f"{measured.prefix}:{number}", ttl=TTL) for number, client in enumerate(clients)]
        one = [client.lock(f"{measured.prefix}:shared", ttl=TTL, timeout=TTL) for client in clients]
        for lock in own:
            await (await lock.acquire()).release()  # opens what has to be opened
        measured.many = await _all_at_once(_pairs, own[: measured.clients], during("many"))
        measured.handoff = await _all_at_once(_turns, one, during("handoff"))


class _Crowd:
    """What those who are measured together share."""

    def __init__(self) -> None:
        self.timed = Timed()
        self.over = False
        self.released: float | None = None


async def _all_at_once(
    each: Callable[[AsyncLock[AsyncLease], _Crowd], Coroutine[None, None, None]],
    locks: Sequence[AsyncLock[AsyncLease]],
    during: Iterator[None],
) -> Timed:
    crowd = _Crowd()
    began = time.perf_counter()
    tasks = [asyncio.create_task(each(lock, crowd)) for lock in locks]
    try:
        for _ in during:
            done, _ = await asyncio.wait(tasks, timeout=0.05, return_when=asyncio.FIRST_EXCEPTION)
            if done:
                break  # by an error, which is raised below
        crowd.timed.seconds, crowd.over = time.perf_counter() - began, True
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return crowd.timed


async def _pairs(lock: AsyncLock[AsyncLease], crowd: _Crowd) -> None:
    while not crowd.over:
        began = time.perf_counter()
        await (await lock.acquire()).release()
        if not crowd.over:
            crowd.timed.samples.append(time.perf_counter() - began)


async def _turns(lock: AsyncLock[AsyncLease], crowd: _Crowd) -> None:
    while not crowd.over:
        lease = await lock.acquire()
        now = time.perf_counter()
        if crowd.released is not None and not crowd.over:
            crowd.timed.samples.append(now - crowd.released)
        crowd.released = time.perf_counter()
        await lease.release()


def _repeated(during: Iterator[None], act: Callable[[], object]) -> Timed:
    for _ in range(WARM_UP):
        act()
    timed, clock = Timed(), time.perf_counter
    start = clock()
    for _ in during:
        began = clock()
        act()
        timed.samples.append(clock() - began)
    timed.seconds = clock() - start
    return timed
