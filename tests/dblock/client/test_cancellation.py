"""Truth 9: cancellation at any await leaves no lock held and no connection behind. Each await in turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import psycopg

import dblock

MOST = 60


class CancelledAt:
    """Runs a coroutine, and cancels it when it waits for the n-th time."""

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
    """Cancel what `make` makes at its first await, its second, and so on until it gets through; check after each."""
    for at in range(1, MOST):
        run = CancelledAt(make(at), at)
        try:
            await run
        except asyncio.CancelledError:
            await check(at)
            continue
        await check(at)
        assert run.waits < at
        return at - 1
    raise AssertionError("it never got through")


async def idle_again(client: dblock.AsyncClient, owner: psycopg.Connection) -> None:
    """Every connection that the client has open is at rest, and the server knows of no more."""
    runner = client._runner
    assert runner is not None
    pool = runner._pool
    assert len(pool._places) == len(pool._idle)
    deadline = time.monotonic() + 5
    backends = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'dblock'"
    )
    while True:
        row = owner.execute(backends).fetchone()
        assert row is not None
        if row[0] <= len(pool._idle) + 2:  # the keep-alive's and the listener's
            return
        assert time.monotonic() < deadline, f"{row[0]} connections for {len(pool._idle)}"
        await asyncio.sleep(0.01)


def holders(owner: psycopg.Connection) -> int:
    row = owner.execute("SELECT count(*) FROM distributed_locks WHERE expires_at > clock_timestamp()").fetchone()
    assert row is not None
    return int(row[0])


async def test_acquire_cancelled_at_each_await(dsn: str, owner: psycopg.Connection) -> None:
    async with dblock.AsyncClient(dsn) as client:
        await client.lock("warm").holder()

        async def acquire(at: int) -> None:
            assert client._runner is not None
            if at % 2:
                client._runner._pool.drop_idle()  # so that opening a connection has its turn too
            await (await client.lock(f"{at}", ttl=600).acquire()).release()

        async def check(at: int) -> None:
            deadline = time.monotonic() + 5
            while holders(owner):
                assert time.monotonic() < deadline, f"cancelled at await {at}, the lock stays held"
                await asyncio.sleep(0.01)
            await idle_again(client, owner)

        assert await each_await(acquire, check) >= 3


async def test_renew_cancelled_at_each_await(dsn: str, owner: psycopg.Connection) -> None:
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


async def test_release_cancelled_at_each_await(dsn: str, owner: psycopg.Connection) -> None:
    async with dblock.AsyncClient(dsn) as client:
        leases = [await client.lock(f"{number}", ttl=60).acquire() for number in range(MOST)]

        async def release(at: int) -> None:
            await leases[at].release()

        async def check(at: int) -> None:
            name = leases[at].name
            deadline = time.monotonic() + 5
            while owner.execute("SELECT 1 FROM holder(%s)", [name]).fetchone():
                assert time.monotonic() < deadline, f"cancelled at await {at}, the lock stays held"
                await asyncio.sleep(0.01)
            assert leases[at].remaining() == 0
            await idle_again(client, owner)

        assert await each_await(release, check) >= 1
