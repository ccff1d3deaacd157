"""The pools, with fake connections: waiting in order, timeouts, cancelled callers, and closing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

import dblock
from dblock._runtime.pool import AsyncPool, Pool
from tests.support.eventually import eventually, eventually_async
from tests.support.timings import timings_with


class Connection:
    """A fake connection."""

    usable = True
    used_at = 0.0
    place: Any = None
    closed = False

    def close(self) -> None:
        self.closed = True


def pool(size: int = 1, patience: float = 5.0) -> tuple[Any, list[Connection]]:
    made: list[Connection] = []

    def connect() -> Any:
        made.append(Connection())
        return made[-1]

    return Pool(connect, size, patience), made


def async_pool(size: int = 1, patience: float = 5.0) -> tuple[Any, list[Connection]]:
    made: list[Connection] = []

    async def connect() -> Any:
        await asyncio.sleep(0)
        made.append(Connection())
        return made[-1]

    return AsyncPool(connect, size, patience), made


def test_sequential_calls_use_one_connection() -> None:
    shared, made = pool(4)
    for _ in range(5):
        shared.give(shared.take())
    assert len(made) == 1


def test_connections_of_a_burst_are_closed_when_unused() -> None:
    shared, made = pool(2)
    one, other = shared.take(), shared.take()
    shared.give(one)
    one.used_at = time.monotonic() - 2 * shared.idle_for
    shared.give(other)
    assert [wire.closed for wire in made] == [True, False]
    assert shared.take() is other


def test_connection_that_is_not_usable_is_closed_and_replaced() -> None:
    shared, _ = pool()
    wire = shared.take()
    wire.usable = False
    shared.give(wire)
    assert wire.closed
    assert shared.take() is not wire


def test_connection_that_cannot_be_opened_takes_no_slot() -> None:
    def refuse() -> Any:
        raise OSError

    shared = Pool(refuse, 1, 0.1)
    for _ in range(3):
        with pytest.raises(OSError):  # noqa: PT011 - the error that connect raised
            shared.take()


def test_pool_serves_waiting_threads_in_order() -> None:
    shared, _ = pool()
    wire = shared.take()
    served: list[int] = []

    def wait(number: int) -> None:
        mine = shared.take()
        served.append(number)
        shared.give(mine)

    threads = []
    for number in range(5):
        threads.append(threading.Thread(target=wait, args=[number]))
        threads[-1].start()
        eventually(lambda: len(shared._queue) == len(threads), "the thread waits")
    shared.give(wire)
    for thread in threads:
        thread.join(10)
    assert served == [0, 1, 2, 3, 4]


async def test_task_that_returns_at_once_does_not_overtake_waiting_tasks() -> None:
    shared, _ = async_pool()
    stop = False

    async def busy() -> None:
        while not stop:
            shared.give(await shared.take())
            await asyncio.sleep(0)

    others = [asyncio.ensure_future(busy()) for _ in range(3)]
    served = 0
    for _ in range(20):
        await asyncio.sleep(0)
        shared.give(await asyncio.wait_for(shared.take(), 60))
        served += 1
    stop = True
    await asyncio.gather(*others)
    assert served == 20


async def test_task_that_waits_too_long_gets_an_error_and_leaves_the_queue() -> None:
    shared, _ = async_pool(patience=0.05)
    wire = await shared.take()
    with pytest.raises(dblock.Unavailable, match="All 1 connections"):
        await shared.take()
    shared.give(wire)
    assert await shared.take() is wire


def test_thread_that_waits_too_long_gets_an_error_and_leaves_the_queue() -> None:
    shared, _ = pool(patience=0.05)
    wire = shared.take()
    with pytest.raises(dblock.Unavailable, match="All 1 connections"):
        shared.take()
    shared.give(wire)
    assert shared.take() is wire


@pytest.mark.parametrize("turns", range(6))
async def test_connection_for_a_cancelled_task_goes_to_the_next_task(turns: int) -> None:
    shared, made = async_pool()
    wire = await shared.take()
    leaving = asyncio.ensure_future(shared.take())
    await asyncio.sleep(0)
    staying = asyncio.ensure_future(shared.take())
    await asyncio.sleep(0)
    shared.give(wire)
    for _ in range(turns):
        await asyncio.sleep(0)
    leaving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        shared.give(await leaving)
    assert await asyncio.wait_for(staying, 60) is wire
    assert len(made) == 1


async def test_cancelled_opening_gives_its_slot_to_the_next_task() -> None:
    reachable = False

    async def connect() -> Any:
        while not reachable:
            await asyncio.sleep(0.01)
        return Connection()

    shared = AsyncPool(connect, 1, 5)
    opening = asyncio.ensure_future(shared.take())
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(shared.take())
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    reachable = True
    assert await asyncio.wait_for(waiting, 60)


async def test_waiting_task_gets_client_closed_when_the_pool_closes() -> None:
    shared, made = async_pool()
    busy = await shared.take()
    waiting = [asyncio.ensure_future(shared.take()) for _ in range(3)]
    await asyncio.sleep(0)
    shared.close()
    for waiter in waiting:
        with pytest.raises(dblock.ClientClosed):
            await waiter
    shared.give(busy)
    assert len(made) == 1
    assert len(shared._slots) == 0


def test_waiting_thread_gets_client_closed_when_the_pool_closes() -> None:
    shared, made = pool()
    busy = shared.take()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(shared.take)
        eventually(lambda: shared._queue, "the thread waits")
        shared.close()
        with pytest.raises(dblock.ClientClosed):
            waiting.result(10)
    shared.give(busy)
    assert len(made) == 1
    assert len(shared._slots) == 0


def test_closed_pool_closes_connections_that_are_given_back() -> None:
    shared, made = pool(2)
    busy = shared.take()
    shared.give(shared.take())
    shared.close()
    assert [wire.closed for wire in made] == [False, True]
    shared.give(busy)
    assert busy.closed
    with pytest.raises(dblock.ClientClosed):
        shared.take()


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
async def test_quiet_client_returns_to_one_connection_for_calls(
    dsn: str, owner: psycopg.Connection[Any], kind: str
) -> None:
    """No call comes after the burst, so no call closes the connections."""
    timings = timings_with(idle_for=0.2, ping_interval=0.1)
    count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'dblock'"

    def connections() -> int:
        row = owner.execute(count).fetchone()
        assert row
        return int(row[0])

    client: Any = (dblock.Client if kind == "threads" else dblock.AsyncClient)(dsn, timings=timings)
    lease = client.lock("a").acquire()
    lease = await lease if kind == "asyncio" else lease
    runner = client._runtime.runner
    borrowed = [runner._pool.take() for _ in range(1)]
    borrowed = [await one if kind == "asyncio" else one for one in borrowed]
    for _ in range(3):
        raw = runner._connect()
        raw = await raw if kind == "asyncio" else raw
        raw.slot = runner._pool._new_slot()
        borrowed.append(raw)
    # The keep-alive opens its connection in the background.
    await eventually_async(lambda: connections() >= 5, lambda: f"at least 5 connections, not {connections()}")
    for raw in borrowed:
        runner._pool.give(raw)
    await eventually_async(lambda: connections() <= 3, lambda: f"at most 3 connections, not {connections()}")
    done = lease.release()
    assert await done if kind == "asyncio" else done
    closed = client.close()
    if kind == "asyncio":
        await closed


def test_call_that_only_borrows_opens_no_connection_in_place_of_another() -> None:
    """Opening may take long, and a renewal that borrows has another connection to go over."""
    opens, openings = threading.Event(), []

    def fail() -> Any:
        openings.append(threading.current_thread())
        opens.wait(20)
        raise psycopg.OperationalError("unreachable")

    shared: Any = Pool(fail, 1, 5.0)
    with ThreadPoolExecutor() as threads:
        opening = threads.submit(shared.take)
        eventually(lambda: openings, "the opening")
        borrowing = threads.submit(shared.take, 0.2)
        eventually(lambda: shared._queue or borrowing.done(), "the borrower waits")
        opens.set()
        with pytest.raises(psycopg.OperationalError):
            opening.result()
        with pytest.raises(dblock.Unavailable):
            borrowing.result()
    assert len(openings) == 1
    assert shared.is_empty()


async def test_task_that_only_borrows_opens_no_connection_in_place_of_another() -> None:
    opens, openings = asyncio.Event(), 0

    async def fail() -> Any:
        nonlocal openings
        openings += 1
        await opens.wait()
        raise psycopg.OperationalError("unreachable")

    shared: Any = AsyncPool(fail, 1, 5.0)
    opening = asyncio.create_task(shared.take())
    await eventually_async(lambda: openings, "the opening")
    borrowing = asyncio.create_task(shared.take(0.2))
    await eventually_async(lambda: shared._queue or borrowing.done(), "the borrower waits")
    opens.set()
    with pytest.raises(psycopg.OperationalError):
        await opening
    with pytest.raises(dblock.Unavailable):
        await borrowing
    assert openings == 1
    assert shared.is_empty()
