"""The API as a user types it. mypy checks this file with the rest of the tree; nothing imports or runs it.

Each `assert_type` states what a user's editor shows. A signature that starts to return `Any`, or a lease that loses its
kind, makes mypy fail here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta

import psycopg
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine
from typing_extensions import assert_type

import dblock
import fenced_store


def clients(engine: Engine, async_engine: AsyncEngine) -> None:
    dblock.Client()
    dblock.Client("postgresql://app@db.example/app", holder="billing", pool_size=2, patience=timedelta(seconds=3))
    dblock.Client(engine, schema="locks", presence=None, listen_dsn="postgresql://app@direct.example/app")
    dblock.AsyncClient(async_engine)


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


def errors() -> None:
    try:
        raise dblock.LeaseLost("a", "expired", datetime.now(), 41)
    except dblock.LockTimeout as error:
        assert_type(error.name, str)
    except dblock.LeaseLost as error:
        assert_type(error.token, "int | None")
    except dblock.DblockError:
        pass
