"""Truth 9: cancellation at any await leaves no lock held and leaks no connection. Each await is cancelled in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import psycopg

import dblock
from tests.support.eventually import eventually_async

MAX_AWAITS = 60


class CancelledAt:
    """Runs a coroutine, and cancels it at its n-th wait."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: int) -> None:
        self._coroutine = coroutine
        self._at = at
        self.waits = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        error: BaseException | None = None
        while True:
            try:
                waiting = self._coroutine.send(None) if error is None else self._coroutine.throw(error)
            except StopIteration as done:
                return done.value
            error = None
            self.waits += 1
            if self.waits == self._at:
                if waiting is not None:
                    waiting._asyncio_future_blocking = False
                    waiting.cancel()
                error = asyncio.CancelledError()
                continue
            try:
                yield waiting
            except BaseException as raised:
                error = raised


async def each_await(
    make: Callable[[int], Coroutine[Any, Any, Any]], check: Callable[[int], Coroutine[Any, Any, None]]
) -> int:
    """Run a new coroutine of `make` for each await: cancel it at its first await, at its second, until one completes.

    Call `check` after each run. Return the number of awaits.
    """
    for at in range(1, MAX_AWAITS):
        run = CancelledAt(make(at), at)
        try:
            await run
        except asyncio.CancelledError:
            await check(at)
            continue
        await check(at)
        assert run.waits < at
        return at - 1
    raise AssertionError("the coroutine never completed")


async def idle_again(client: dblock.AsyncClient, owner: psycopg.Connection) -> None:
    """Wait until every open connection of the client is idle, and until the server has no others.

    The keep-alive may open a connection of the pool in the background. One that was leaked never becomes idle.
    """
    runner = client._runtime.runner
    assert runner is not None
    pool = runner._pool
    await eventually_async(lambda: len(pool._slots) == len(pool._idle), "every connection is idle")
    backends = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'dblock'"
    )

    def no_others() -> bool:
        row = owner.execute(backends).fetchone()
        assert row is not None
        return bool(row[0] <= len(pool._idle) + 2)  # plus the connections of the keep-alive and the listener

    await eventually_async(no_others, "the server has no connection that is not in the pool")


def holders(owner: psycopg.Connection) -> int:
    row = owner.execute("SELECT count(*) FROM distributed_locks WHERE expires_at > clock_timestamp()").fetchone()
    assert row is not None
    return int(row[0])


async def test_acquire_cancelled_at_any_await_leaves_no_lock_and_no_connection(
    dsn: str, owner: psycopg.Connection
) -> None:
    async with dblock.AsyncClient(dsn) as client:
        await client.lock("warm").holder()

        async def acquire(at: int) -> None:
            assert client._runtime.runner is not None
            if at % 2:
                client._runtime.runner._pool.drop_idle()  # so that the opening of a connection is cancelled too
            await (await client.lock(f"{at}", ttl=600).acquire()).release()

        async def check(at: int) -> None:
            await eventually_async(lambda: not holders(owner), f"the lock is free, cancelled at await {at}")
            await idle_again(client, owner)

        assert await each_await(acquire, check) >= 3


async def test_renew_cancelled_at_any_await_keeps_the_lease(dsn: str, owner: psycopg.Connection) -> None:
    async with dblock.AsyncClient(dsn) as client:
        lease = await client.lock("a", ttl=60).acquire()

        async def renew(at: int) -> None:
            await lease.renew()

        async def check(at: int) -> None:
            assert lease.remaining() > 50
            assert holders(owner) == 1
            await idle_again(client, owner)

        assert await each_await(renew, check) >= 1
        assert await lease.release() is True


async def test_release_cancelled_at_any_await_still_frees_the_lock(dsn: str, owner: psycopg.Connection) -> None:
    async with dblock.AsyncClient(dsn) as client:
        leases = [await client.lock(f"{number}", ttl=600).acquire() for number in range(MAX_AWAITS)]

        async def release(at: int) -> None:
            await leases[at].release()

        async def check(at: int) -> None:
            name = leases[at].name
            holder = "SELECT 1 FROM holder(%s)"
            await eventually_async(
                lambda: not owner.execute(holder, [name]).fetchone(), f"the lock is free, cancelled at await {at}"
            )
            assert leases[at].remaining() == 0
            await idle_again(client, owner)

        assert await each_await(release, check) >= 1
