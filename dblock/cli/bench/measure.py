"""Measure the speed of locks on a database, compared with what that database does without them.

Each figure is measured from the outside, as a program would see it. A bare round trip and a bare durable commit on the
same server are measured in the same run, so that the figures can be read as ratios, which separate the locks from the
database and the network. The benchmark uses its own locks and holds none at the end. Any role that may lock can run it.
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
from dblock.async_client import AsyncClient
from dblock.client import Client

if TYPE_CHECKING:
    from dblock.lease import AsyncLease
    from dblock.lock import AsyncLock

SHARES = {"round_trip": 0.1, "commit": 0.1, "pair": 0.3, "many": 0.25, "handoff": 0.25}
"""Each figure's part of the total time."""

COMMIT = "SELECT pg_logical_emit_message(true, 'dblock bench', '')"
"""Writes a few bytes to the WAL and nothing to any table, so that there is something to commit."""

PATIENCE = 5.0
"""Seconds that the server may take beyond the requested time."""

WARM_UP_CALLS = 3
"""Calls before the measurement starts, which open connections and prepare statements."""

FEWEST_SAMPLES = 10
"""A figure of fewer calls says little, so a slow server gets up to `PATIENCE` more seconds for each figure."""

TTL = 30.0

Progress = Callable[[str, float], None]
"""Receives the name of the figure that is measured and its progress, from 0 to 1."""


@dataclass
class Timing:
    """The durations of repeated calls, and the total time."""

    samples: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Calls per second."""
        return len(self.samples) / self.seconds if self.seconds else 0.0

    def quantile(self, part: float) -> float:
        """Return the quantile of the durations: 0.5 for the median."""
        if not self.samples:
            return 0.0
        ordered = sorted(self.samples)
        return ordered[max(math.ceil(part * len(ordered)) - 1, 0)]


Rounds = Callable[[str, Timing], Iterator[None]]
"""Iterates until the time of a figure is up and it has enough samples."""


@dataclass
class Results:
    """The measured figures; None for one that could not be measured."""

    prefix: str
    """The prefix of the locks' names."""
    clients: int
    fsync: bool = True
    """Whether the server waits for its disk."""
    round_trip: Timing | None = None
    commit: Timing | None = None
    pair: Timing | None = None
    many: Timing | None = None
    """Acquire and release by several clients at once, each on its own lock."""
    handoff: Timing | None = None
    """From a release to the next grant, with several waiters in the queue of one lock."""

    @property
    def waiters(self) -> int:
        """The waiters for one lock, besides its holder: at least two, so that the queue is never empty."""
        return max(self.clients, 2)

    @property
    def locks(self) -> int:
        """The number of locks that were used and now have rows in the database."""
        return self.waiters + 3

    def ratio(self, what: str) -> float | None:
        """Return the median of acquire and release in units of another figure's median."""
        unit: Timing | None = getattr(self, what)
        if self.pair is None or unit is None or not unit.quantile(0.5):
            return None
        return self.pair.quantile(0.5) / unit.quantile(0.5)


def measure(
    target: Target, schema: str, seconds: float, clients: int, progress: Progress = lambda what, part: None
) -> Results:
    """Measure all figures within this time, and return them."""
    results = Results(f"bench:{secrets.token_hex(4)}", clients)

    def during(what: str, timing: Timing) -> Iterator[None]:
        """Iterate until the time of this figure is up and it has enough samples."""
        began, lasts = time.monotonic(), seconds * SHARES[what]
        while (gone := time.monotonic() - began) < lasts or (
            len(timing.samples) < FEWEST_SAMPLES and gone < lasts + PATIENCE
        ):
            progress(what, min(gone / lasts, 1.0))
            yield
        progress(what, 1.0)

    # This comes first, so that a missing schema is reported at once.
    with Client(target.conninfo(), schema=schema, holder="dblock bench") as client:
        lock = client.lock(f"{results.prefix}:alone", ttl=TTL, timeout=TTL)
        lock.holder()
        _measure_server(target, schema, results, during, seconds)
        results.pair = _time_repeatedly("pair", during, lambda: lock.acquire().release())
    asyncio.run(_measure_concurrent(target, schema, results, during))
    return results


def _measure_server(target: Target, schema: str, results: Results, during: Rounds, seconds: float) -> None:
    """Measure the server without locks."""
    from psycopg.errors import InsufficientPrivilege

    with translated(schema):
        connection = target.connect()
    with bounded(connection, seconds + PATIENCE), translated(schema), connection:
        fsync = connection.execute("SHOW fsync").fetchone()
        results.fsync = fsync != ("off",)
        results.round_trip = _time_repeatedly(
            "round_trip", during, lambda: connection.execute("SELECT 1", prepare=True)
        )
        connection.execute("SET synchronous_commit TO on")
        with contextlib.suppress(InsufficientPrivilege):  # an operator has revoked it from PUBLIC
            results.commit = _time_repeatedly("commit", during, lambda: connection.execute(COMMIT, prepare=True))


async def _measure_concurrent(target: Target, schema: str, results: Results, during: Rounds) -> None:
    """Measure several clients at once: first each on its own lock, then all on one lock."""
    async with contextlib.AsyncExitStack() as opened:
        clients = [
            await opened.enter_async_context(
                AsyncClient(target.conninfo(), schema=schema, holder=f"dblock bench {number}", pool_size=1)
            )
            for number in range(results.waiters + 1)
        ]
        own = [client.lock(f"{results.prefix}:{number}", ttl=TTL) for number, client in enumerate(clients)]
        one = [client.lock(f"{results.prefix}:shared", ttl=TTL, timeout=TTL) for client in clients]
        for lock in own:
            await (await lock.acquire()).release()  # opens the connections
        results.many = await _run_concurrently("many", during, _acquire_and_release, own[: results.clients])
        results.handoff = await _run_concurrently("handoff", during, _hand_off, one)


class _SharedRun:
    """The state that concurrent clients share."""

    def __init__(self) -> None:
        self.timing = Timing()
        self.over = False
        self.released: float | None = None


async def _run_concurrently(
    what: str,
    during: Rounds,
    each: Callable[[AsyncLock[AsyncLease], _SharedRun], Coroutine[None, None, None]],
    locks: Sequence[AsyncLock[AsyncLease]],
) -> Timing:
    shared = _SharedRun()
    began = time.perf_counter()
    tasks = [asyncio.create_task(each(lock, shared)) for lock in locks]
    try:
        for _ in during(what, shared.timing):
            done, _ = await asyncio.wait(tasks, timeout=0.05, return_when=asyncio.FIRST_EXCEPTION)
            if done:
                break  # a task has failed; its error is raised below
        shared.timing.seconds, shared.over = time.perf_counter() - began, True
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return shared.timing


async def _acquire_and_release(lock: AsyncLock[AsyncLease], shared: _SharedRun) -> None:
    while not shared.over:
        began = time.perf_counter()
        await (await lock.acquire()).release()
        if not shared.over:
            shared.timing.samples.append(time.perf_counter() - began)


async def _hand_off(lock: AsyncLock[AsyncLease], shared: _SharedRun) -> None:
    while not shared.over:
        lease = await lock.acquire()
        now = time.perf_counter()
        if shared.released is not None and not shared.over:
            shared.timing.samples.append(now - shared.released)
        shared.released = time.perf_counter()
        await lease.release()


def _time_repeatedly(what: str, during: Rounds, act: Callable[[], object]) -> Timing:
    for _ in range(WARM_UP_CALLS):
        act()
    timing, clock = Timing(), time.perf_counter
    start = clock()
    for _ in during(what, timing):
        began = clock()
        act()
        timing.samples.append(clock() - began)
    timing.seconds = clock() - start
    return timing
