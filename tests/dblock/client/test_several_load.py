"""Tasks that take sets of locks, beside tasks that take two by hand in the opposite order: no cycle lasts."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import psycopg
import pytest

import dblock
from tests.support.machine import measured

EDGES = """
    SELECT substr(t.attempt::text, 1, 18), t.name, substr(l.attempt::text, 1, 18), l.token
    FROM lock_tickets AS t JOIN distributed_locks AS l ON l.name = t.name AND l.expires_at > clock_timestamp()
"""
"""Each wait: the thread or task that waits, for which lock, and the thread or task that holds it."""


class CycleObserver(threading.Thread):
    """Looks at the waits again and again, and records for how long a cycle of waits lasted at most."""

    def __init__(self, dsn: str) -> None:
        super().__init__()
        self._dsn = dsn
        self.ends = threading.Event()
        self.seen: dict[frozenset[tuple[Any, ...]], tuple[float, float]] = {}
        """When each cycle was first and last seen."""

    def run(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            connection.execute("SET search_path TO dblock")
            while not self.ends.wait(0.05):
                waits = {row[0]: row for row in connection.execute(EDGES.encode()).fetchall()}
                now = time.monotonic()
                for start in waits:
                    way: list[str] = []
                    at = start
                    while at in waits and at not in way:
                        way.append(at)
                        at = waits[at][2]
                    if at == start:
                        cycle = frozenset(waits[one] for one in way)
                        self.seen[cycle] = (self.seen.get(cycle, (now, now))[0], now)

    @property
    def longest(self) -> float:
        """The seconds that one cycle was seen at most."""
        return max((last - first for first, last in self.seen.values()), default=0.0)


async def play(dsn: str, tasks: int, by_hand: int, names: int, rounds: int) -> tuple[int, CycleObserver]:
    """Let tasks take sets of locks until there were so many rounds. Return how often two locks were taken by hand."""
    locks = [f"n{number}" for number in range(names)]
    inside: dict[str, object] = {}
    left, pairs = rounds, 0
    observer = CycleObserver(dsn)

    async def work(held: list[str]) -> None:
        me = object()
        for name in held:
            assert inside.setdefault(name, me) is me, "two holders"
        await asyncio.sleep(0)
        for name in held:
            del inside[name]

    async def take_sets(client: dblock.AsyncClient, choose: random.Random) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            wanted = choose.sample(locks, choose.randint(1, min(5, names)))
            async with client.lock_all(wanted, timeout=120) as held:
                assert sorted(held) == sorted(wanted)
                await work(wanted)

    async def take_pairs(client: dblock.AsyncClient, choose: random.Random) -> None:
        nonlocal pairs
        while left > 0:
            second, first = sorted(choose.sample(locks, 2))
            async with client.lock(first, timeout=60), client.lock(second, timeout=60):
                await work([first, second])
            pairs += 1
            await asyncio.sleep(0.02)

    observer.start()
    try:
        async with dblock.AsyncClient(dsn) as one, dblock.AsyncClient(dsn) as other:
            takers = [take_pairs] * by_hand + [take_sets] * (tasks - by_hand)
            await asyncio.gather(
                *(take((one, other)[number % 2], random.Random(number)) for number, take in enumerate(takers))
            )
    finally:
        observer.ends.set()
        observer.join()
    return pairs, observer


def nothing_is_left(owner: psycopg.Connection) -> bool:
    held = "SELECT count(*) FROM distributed_locks WHERE expires_at > clock_timestamp()"
    return owner.execute(f"SELECT ({held}), (SELECT count(*) FROM lock_tickets)".encode()).fetchone() == (0, 0)


@pytest.mark.second_stage
async def test_cycle_with_locks_taken_by_hand_ends_within_a_second(dsn: str, owner: psycopg.Connection) -> None:
    for _ in range(10):  # a play takes a second, and some plays have no cycle
        with measured() as lateness:
            pairs, observer = await play(dsn, tasks=16, by_hand=3, names=6, rounds=120)
            assert observer.longest < 1 + 3 * lateness()
        assert pairs > 0
        assert nothing_is_left(owner)
        if observer.seen:
            break
    else:
        pytest.fail("no cycle was seen: the test shows nothing")


@pytest.mark.nightly
@pytest.mark.parametrize("by_hand", [0, 4])
async def test_ten_thousand_sets_of_sixty_four_tasks(dsn: str, owner: psycopg.Connection, by_hand: int) -> None:
    with measured() as lateness:
        _, observer = await play(dsn, tasks=64, by_hand=by_hand, names=10, rounds=10_000)
        assert observer.longest < 1 + 3 * lateness()
    assert bool(observer.seen) == (by_hand > 0)
    assert nothing_is_left(owner)
