"""Barriers, latches, elections and schedules of the memory clients, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

import dblock
from dblock.testing import AsyncMemoryClient, Clock, MemoryClient, WaitsForever


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def client(clock: Clock) -> Iterator[MemoryClient]:
    with MemoryClient(clock=clock) as client:
        yield client


@pytest.fixture
def other(client: MemoryClient) -> Iterator[MemoryClient]:
    with MemoryClient(client.database) as other:
        yield other


@pytest.fixture
async def tasks(client: MemoryClient) -> AsyncIterator[AsyncMemoryClient]:
    """A client for tasks."""
    async with AsyncMemoryClient(client.database, holder="tasks") as tasks:
        yield tasks


@pytest.fixture
async def others(client: MemoryClient) -> AsyncIterator[AsyncMemoryClient]:
    """Another client for tasks."""
    async with AsyncMemoryClient(client.database, holder="others") as others:
        yield others


# Barriers and latches.


async def test_barrier_trips_when_the_last_party_arrives(
    tasks: AsyncMemoryClient, others: AsyncMemoryClient, clock: Clock
) -> None:
    first = [asyncio.create_task(one.barrier("b", parties=3).wait()) for one in (tasks, others)]
    await clock.async_tick(3600)
    assert not any(one.done() for one in first)
    assert await others.barrier("b", parties=3).wait(0) == 2
    await clock.async_tick()
    assert [one.result() for one in first] == [0, 1]


def test_barrier_is_left_when_its_timeout_has_passed(client: MemoryClient, other: MemoryClient, clock: Clock) -> None:
    with pytest.raises(dblock.WaitTimeout, match="did not trip within 3600 s"):
        client.barrier("b", parties=2).wait(3600)
    assert clock() == 3600
    with pytest.raises(dblock.WaitTimeout):
        other.barrier("b", parties=2).wait(0)


def test_latch_that_no_other_thread_can_open_is_not_waited_for(client: MemoryClient, other: MemoryClient) -> None:
    latch = client.latch("l", count=2)
    with pytest.raises(WaitsForever):
        latch.wait()
    assert not client.database.store.barriers.waiters
    assert (latch.count_down(), other.latch("l", count=2).count_down()) == (1, 0)
    latch.wait()


def test_threads_meet_at_a_barrier_on_a_clock_that_waits_do_not_move() -> None:
    with MemoryClient(clock=Clock(auto=False)) as client:
        barrier, numbers = client.barrier("b", parties=3), []
        threads = [threading.Thread(target=lambda: numbers.append(barrier.wait(60))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(numbers) == [0, 1, 2]
        assert client.clock() == 0
