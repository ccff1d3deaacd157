"""Clients behind pgbouncer in transaction mode, where each statement may run on another backend."""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psycopg
import pytest

import dblock
from dblock._core.effects import Call
from dblock._core.waiters import LocalWaiters
from dblock._runtime import target
from dblock.admin import schema
from tests.dblock.client.test_waiting import BOUND, wait_for_tickets
from tests.support.eventually import eventually, eventually_async
from tests.support.facade import Clients
from tests.support.pooler import needs_pgbouncer, pooled
from tests.support.stages import sync_first

pytestmark = [needs_pgbouncer]


@pytest.fixture
def pooled_dsn(dsn: str) -> Iterator[str]:
    """Return a DSN that leads to the test's database through a pooler."""
    with pooled(dsn) as through:
        yield through


@pytest.mark.second_stage
@sync_first
async def test_locking_works_through_a_transaction_pooler(clients: Clients, pooled_dsn: str) -> None:
    inside = 0
    tokens: list[int] = []

    async def work(number: int) -> None:
        nonlocal inside
        lock = clients(pooled_dsn).lock("a", timeout=30)
        for _ in range(10):
            async with lock as lease:
                inside += 1
                assert inside == 1
                await lease.renew()
                tokens.append(lease.token)
                inside -= 1
        assert await clients(pooled_dsn).lock(f"own {number}").holder() is None

    await asyncio.gather(*map(work, range(6)))
    assert len(tokens) == 60
    assert tokens == sorted(tokens)
    await clients.close()


def test_pooler_is_recognised_before_anything_is_prepared_behind_it(pooled_dsn: str, dsn: str) -> None:
    with dblock.Client(dsn) as direct, dblock.Client(pooled_dsn) as pooled:
        for client, prepares in ((direct, True), (pooled, False)):
            client.lock("a").holder()
            assert client._runtime.runner is not None
            assert client._runtime.runner.prepares is prepares


@sync_first
@pytest.mark.second_stage
async def test_waiters_are_served_through_a_pooler_that_drops_notifications(
    clients: Clients, pooled_dsn: str, owner: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    held = await clients(pooled_dsn).lock("a").acquire()
    client = clients(pooled_dsn)
    waiting = [asyncio.create_task(client.lock("a").acquire()) for _ in range(3)]
    await wait_for_tickets(owner, 3)
    await eventually_async(lambda: "notifications do not come through" in caplog.text, "the client has noticed")
    lease = held
    for _ in waiting:
        # The next waiter may be granted the lock before the reply to the release is here.
        left = [task for task in waiting if not task.done()]
        released = time.monotonic()
        await lease.release()
        done, _ = await asyncio.wait(left, timeout=10, return_when="FIRST_COMPLETED")
        assert done
        assert time.monotonic() - released < BOUND
        lease = done.pop().result()
    logged = [record for record in caplog.records if "notifications do not come through" in record.getMessage()]
    assert len(logged) == 1, "logged once, by the client that waits"
    assert owner.execute("SELECT count(*) FROM lock_presence").fetchone() == (0,), "a pooled session is no presence"


@pytest.mark.usefixtures("needs_presence")
async def test_listen_dsn_past_the_pooler_brings_notifications_and_presence(
    clients: Clients, pooled_dsn: str, owner: psycopg.Connection
) -> None:
    held = await clients(pooled_dsn).lock("a").acquire()
    client = clients(pooled_dsn, listen_dsn=clients.dsn)
    waiting = asyncio.create_task(client.lock("a").acquire())
    await wait_for_tickets(owner, 1)
    listener = getattr(client, "_inner", client)._runtime.listener
    await eventually_async(lambda: listener.waiters.notifications_work, "notifications")
    presences = "SELECT count(*) FROM lock_presence"
    await eventually_async(lambda: owner.execute(presences).fetchone() == (1,), "a presence")
    await held.release()
    assert (await asyncio.wait_for(waiting, 20)).token > held.token


def _notified_as(waiters: LocalWaiters, works: bool) -> bool:
    return waiters.notifications_work is works


def hand_over(
    giving: dblock.Client, taking: dblock.Client, owner: psycopg.Connection, ready: Callable[[], bool] = lambda: True
) -> float:
    """Return the seconds from a release to the grant of the one waiter. Release once the waiter has a ticket."""

    def take() -> float:
        with taking.lock("a", timeout=30):
            return time.monotonic()

    lease = giving.lock("a").acquire(timeout=30)
    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(take)
        eventually(lambda: owner.execute("SELECT count(*) FROM lock_tickets").fetchone() == (1,) and ready())
        time.sleep(0.03)
        released = time.monotonic()
        lease.release()
        return taken.result() - released


@pytest.mark.second_stage
def test_hand_offs_with_a_listen_dsn_are_many_times_faster_than_polling(
    pooled_dsn: str, dsn: str, owner: psycopg.Connection
) -> None:
    with (
        dblock.Client(pooled_dsn) as giving,
        dblock.Client(pooled_dsn) as polling,
        dblock.Client(pooled_dsn, listen_dsn=dsn) as listening,
    ):
        for client, works in ((polling, False), (listening, True)):
            client.lock("b").holder()
            listener = client._runtime.listener
            assert listener is not None
            hand_over(giving, client, owner, partial(_notified_as, listener.waiters, works))
        times: dict[dblock.Client, list[float]] = {polling: [], listening: []}
        for _ in range(15):
            for client, found in times.items():
                found.append(hand_over(giving, client, owner))
    assert statistics.median(times[polling]) > 4 * statistics.median(times[listening]), list(times.values())


async def test_listener_in_another_installation_is_not_used(
    clients: Clients, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dblock")
    schema.install(target.resolve(dsn), "other")
    client = clients()
    await client.lock("a").holder()
    listener = getattr(client, "_inner", client)._runtime.listener
    # Simulate a listen_dsn that names another database.
    listener.flow._statements.installation = Call(b"SELECT other.installation()", ())
    await client.lock("a").acquire()
    await eventually_async(lambda: "another installation" in caplog.text, "the client has noticed")
