"""The API as a user types it. mypy checks this file with the rest of the tree; nothing imports or runs it.

Each `assert_type` states what a user's editor shows. A signature that starts to return `Any`, or a lease that loses its
kind, makes mypy fail here.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime, timedelta

import psycopg
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine
from typing_extensions import assert_type

import dblock
import fenced_store
from dblock.observability.opentelemetry import OpenTelemetryObserver
from dblock.observability.prometheus import PrometheusObserver


def clients(engine: Engine, async_engine: AsyncEngine) -> None:
    dblock.Client()
    dblock.Client("postgresql://app@db.example/app", holder="billing", pool_size=2, patience=timedelta(seconds=3))
    dblock.Client(engine, schema="locks", presence=None, listen_dsn="postgresql://app@direct.example/app")
    dblock.AsyncClient(async_engine)
    dblock.Client(engine, observers=[PrometheusObserver(), OpenTelemetryObserver()])


def locks(client: dblock.Client, store: fenced_store.FencedStore) -> None:
    lock = client.lock("a", ttl=30, timeout=timedelta(seconds=5), meta={"job": 7}, claims=["invoice:42"])
    assert_type(lock, dblock.Lock[dblock.Lease])
    assert_type(lock.try_acquire(), "dblock.Lease | None")
    assert_type(lock.acquire(timeout=2), dblock.Lease)
    assert_type(lock.holder(), "dblock.Holder | None")
    assert_type(lock.queue(), list[dblock.Waiter])
    with lock as lease:
        assert_type(lease, dblock.Lease)
        assert_type(lease.token, int)
        store.put("invoice:42", b"paid", fence=lease)
    client.lock("b", claims=[store.claims("invoice:42")])


def efficiency_locks(client: dblock.Client) -> None:
    lock = client.efficiency_lock("cache", ttl=5)
    assert_type(lock, dblock.Lock[dblock.EfficiencyLease])
    assert_type(lock.acquire(), dblock.EfficiencyLease)


def shared_locks(client: dblock.Client, store: fenced_store.FencedStore) -> None:
    assert_type(client.read_lock("a", ttl=5).acquire(), dblock.ReadLease)
    writing = client.write_lock("a", claims=["r"])
    assert_type(writing, dblock.SharedLock[dblock.WriteLease])
    assert_type(writing.try_acquire(), "dblock.WriteLease | None")
    assert_type(writing.holders(), list[dblock.Holder])
    with writing as writer:
        store.put("r", 1, fence=writer)
        assert_type(writer.downgrade(), dblock.ReadLease)
    semaphore = client.semaphore("gpus", permits=4, claims=["gpu:{permit}"])
    assert_type(semaphore, dblock.Semaphore)
    assert_type(semaphore.available(), int)
    with semaphore as lease:
        assert_type(lease, dblock.PermitLease)
        assert_type(lease.permit, int)
    semaphore.resize(5)


async def async_shared_locks(client: dblock.AsyncClient) -> None:
    assert_type(await client.read_lock("a").acquire(), dblock.AsyncReadLease)
    async with client.write_lock("a") as writer:
        assert_type(await writer.downgrade(), dblock.AsyncReadLease)
    semaphore = client.semaphore("gpus")
    assert_type(await semaphore.available(), int)
    async with semaphore as lease:
        assert_type(lease, dblock.AsyncPermitLease)


def leases(lease: dblock.Lease, connection: psycopg.Connection) -> None:
    assert_type(lease.name, str)
    assert_type(lease.ttl, float)
    assert_type(lease.trusted_until - dblock.monotonic(), float)
    assert_type(lease.remaining(), float)
    assert_type(lease.expires_at, datetime)
    assert_type(lease.lost.is_set(), bool)
    assert_type(lease.lost.wait(1), bool)
    assert_type(lease.lost.reason, "dblock.Reason | None")
    lease.raise_if_lost()
    lease.renew(60)
    lease.assert_held(connection)
    lease.bind(connection)
    lease.release_in(connection)
    assert_type(lease.release(), bool)


def callbacks(lease: dblock.Lease, stop: Callable[[], object]) -> None:
    lease.on_lost(lambda reason: stop())
    lease.on_danger(lambda remaining: stop(), before=5)


async def tasks(client: dblock.AsyncClient, store: fenced_store.AsyncFencedStore) -> None:
    lock = client.lock("a")
    assert_type(lock, dblock.AsyncLock[dblock.AsyncLease])
    assert_type(await lock.try_acquire(), "dblock.AsyncLease | None")
    async with lock as lease:
        assert_type(lease, dblock.AsyncLease)
        await store.put("invoice:42", b"paid", fence=lease)
        assert_type(await lease.lost.wait(), bool)
    assert_type(await client.efficiency_lock("b").acquire(), dblock.AsyncEfficiencyLease)


def schedules(client: dblock.Client, stop: threading.Event) -> None:
    @client.once("nightly", cron="30 2 * * *", tz="Europe/Berlin", catch_up="latest")
    def nightly(day: int) -> str:
        assert_type(dblock.current_run().token, int)
        assert_type(dblock.current_run().slot, datetime)
        return str(day)

    result = nightly(1)
    if result is not dblock.SKIPPED:
        assert_type(result, str)
    nightly.run(stop, 1)


def locked_functions(client: dblock.Client) -> None:
    @client.locked("user:{user_id}", timeout=5, reentrant=True)
    def close(user_id: int, *, force: bool = False) -> str:
        assert_type(dblock.current_lease(), "dblock.Lease | dblock.AsyncLease")
        assert_type(dblock.current_lease().token, int)
        return str(user_id)

    assert_type(close(1, force=True), str)
    close("1")  # type: ignore[arg-type]
    close(1, forced=True)  # type: ignore[call-arg]

    @client.locked("user:{user_id}", on_busy="skip")
    def refresh(user_id: int) -> str:
        return str(user_id)

    result = refresh(1)
    if result is not dblock.SKIPPED:
        assert_type(result, str)

    class Account:
        number = 7

        @client.locked("account:{self.number}", on_busy="raise")
        def close(self, reason: str) -> int:
            return self.number

        @classmethod
        @client.locked("accounts:{n}")
        def count(cls, n: int) -> float:
            return 1.0

    @client.locked("rows:{n}")
    def rows(n: int) -> Iterator[str]:
        yield str(n)

    assert_type(list(rows(1)), list[str])
    assert_type(Account().close("now"), int)
    assert_type(Account.count(1), float)
    dblock.assert_locked("user:1")
    client.locked("a", on_busy="run")  # type: ignore[call-overload]


async def locked_coroutines(client: dblock.AsyncClient) -> None:
    @client.locked("user:{user_id}")
    async def close(user_id: int) -> str:
        return str(user_id)

    assert_type(await close(1), str)

    @client.locked("user:{user_id}", on_busy="skip")
    async def refresh(user_id: int) -> str:
        return str(user_id)

    result = await refresh(1)
    if result is not dblock.SKIPPED:
        assert_type(result, str)

    @client.locked("rows:{n}")
    async def rows(n: int) -> AsyncIterator[str]:
        yield str(n)

    assert_type([row async for row in rows(1)], list[str])

    @client.locked("a")  # type: ignore[arg-type]
    def plain() -> None: ...


def errors() -> None:
    try:
        raise dblock.LeaseLost("a", "expired", datetime.now(), 41)
    except dblock.DeadlockDetected as deadlock:
        assert_type(deadlock.cycle[0].lock, "str | None")
    except dblock.LockTimeout as error:
        assert_type(error.name, str)
    except dblock.LeaseLost as error:
        assert_type(error.token, "int | None")
    except dblock.DblockError:
        pass
