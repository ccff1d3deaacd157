"""Waiting in the queue: served in order, woken by the release, and no ticket left by a waiter that gives up."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import psycopg
import pytest

import dblock
from dblock._core import waiters
from dblock._runtime.listener import Listener
from tests.support import mutants
from tests.support.eventually import eventually, eventually_async
from tests.support.facade import Clients
from tests.support.proxy import Proxy
from tests.support.stages import sync_first
from tests.support.timings import polls_every, timings_with

pytestmark = pytest.mark.usefixtures("patient")

BOUND = 5.0
"""Seconds within which a waiter finds a free lock by polling, even if its notification is lost.

It takes about one, and a machine may stand still for two. A waiter that did not poll would wait for the lease's end.
"""

SLOW = 20.0
"""Seconds between two checks of a waiter that is to wait for its notification."""


async def wait_for_tickets(owner: psycopg.Connection, number: int) -> None:
    """Return when this many tickets are in the queue."""
    count = "SELECT count(*) FROM lock_tickets"
    await eventually_async(lambda: owner.execute(count).fetchone() == (number,), f"a queue of {number} tickets")


async def wait_for_tickets_issued(owner: psycopg.Connection, number: int) -> None:
    """Return when this many tickets of the lock have been issued, whether or not they are still in the queue."""
    last = "SELECT max(last_ticket) FROM lock_queues"
    await eventually_async(lambda: owner.execute(last).fetchone() == (number,), f"the issue of {number} tickets")


def keep_waiters(owner: psycopg.Connection) -> None:
    """Keep the tickets of waiters that send no heartbeat in the next seconds."""
    owner.execute("UPDATE lock_clients SET seen_until = clock_timestamp() + interval '1 minute'")


async def settled(client: Any) -> None:
    """Return when the client receives notifications and its waiters have done the check that follows."""
    runtime = getattr(client, "_inner", client)._runtime
    await eventually_async(lambda: runtime.listener and runtime.listener.waiters.notifications_work)
    await asyncio.sleep(0.3)


async def granted(held: Any, waiting: asyncio.Task[Any]) -> Any:
    """Release the lock, and return the lease of the waiter."""
    await held.release()
    return await asyncio.wait_for(waiting, 60)


async def granted_in_time(held: Any, waiting: asyncio.Task[Any]) -> Any:
    """Release the lock, and return the lease of the waiter, which comes within the bound."""
    released = time.monotonic()
    lease = await granted(held, waiting)
    assert time.monotonic() - released < BOUND
    return lease


async def acquired(client: Any, name: str = "a", **options: Any) -> tuple[Any, float]:
    """Acquire the lock, and return the lease and the time of its grant."""
    lease = await client.lock(name, **options).acquire()
    return lease, time.monotonic()


@pytest.fixture
def slow_polling(clients: Clients) -> None:
    """Slow down polling, so that only a notification can wake a waiter in time."""
    clients.timings = polls_every(SLOW)


@pytest.mark.second_stage
@pytest.mark.usefixtures("slow_polling")
async def test_release_wakes_the_next_waiter(clients: Clients, owner: psycopg.Connection) -> None:
    held = await clients().lock("a").acquire()
    waiter = clients(presence=None)
    waiting = asyncio.create_task(acquired(waiter))
    await wait_for_tickets(owner, 1)
    keep_waiters(owner)
    await settled(waiter)
    released = time.monotonic()
    assert await held.release()
    lease, came = await waiting
    assert came - released < SLOW / 4
    assert lease.token > held.token


async def test_waiters_of_several_clients_are_served_in_order(clients: Clients, owner: psycopg.Connection) -> None:
    held = await clients().lock("a").acquire()
    tasks, order = [], []
    several = [clients() for _ in range(4)]

    async def wait(number: int) -> None:
        async with several[number % 4].lock("a") as lease:
            order.append((number, lease.token))

    for number in range(12):
        tasks.append(asyncio.create_task(wait(number)))
        await wait_for_tickets(owner, number + 1)
    await held.release()
    await asyncio.gather(*tasks)
    assert [number for number, _ in order] == list(range(12))
    assert [token for _, token in order] == sorted(token for _, token in order)
    await wait_for_tickets(owner, 0)


@pytest.mark.second_stage
@pytest.mark.usefixtures("slow_polling")
async def test_fair_try_does_not_jump_the_queue_and_an_unfair_try_does(
    clients: Clients, owner: psycopg.Connection
) -> None:
    held = await clients(presence=None).lock("a").acquire()
    waiter = clients()
    waiting = asyncio.create_task(waiter.lock("a").acquire())
    await wait_for_tickets(owner, 1)
    keep_waiters(owner)
    await settled(waiter)
    # The lock is free, and its waiter does not know yet.
    owner.execute("SELECT release('a', %s, durable => true)", [held.token])
    assert await clients().lock("a").try_acquire() is None
    jumped = await clients().lock("a", fair=False).try_acquire()
    assert jumped is not None
    await jumped.release()
    assert (await asyncio.wait_for(waiting, 30)).token > jumped.token


async def test_queue_lists_the_waiters_in_order(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients(holder="the holder")
    assert await client.lock("a").queue() == []
    held = await client.lock("a").acquire()
    waiting = []
    for number in range(3):
        waiting.append(asyncio.create_task(clients(holder=f"waiter {number}").lock("a").acquire()))
        await wait_for_tickets(owner, number + 1)
    queue = await client.lock("a").queue()
    assert [waiter.holder for waiter in queue] == ["waiter 0", "waiter 1", "waiter 2"]
    assert [waiter.since for waiter in queue] == sorted(waiter.since for waiter in queue)
    assert abs(queue[0].since.timestamp() - time.time()) < 60
    await held.release()
    for task in waiting:
        await (await task).release()


@pytest.mark.second_stage
async def test_wait_that_times_out_leaves_no_ticket(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients()
    held = await client.lock("a").acquire()
    for timeout in (0, 0.2):
        started = time.monotonic()
        with pytest.raises(dblock.LockTimeout):
            await client.lock("a").acquire(timeout=timeout)
        assert timeout <= time.monotonic() - started < timeout + 10, "not when the lease ends"
        assert owner.execute("SELECT count(*) FROM lock_tickets").fetchone() == (0,)
    await held.release()
    assert await client.lock("a").try_acquire()


async def test_timeout_of_zero_is_a_try(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients()
    lock = client.lock("a")
    await (await lock.acquire(timeout=0)).release()
    held = await lock.acquire()
    with pytest.raises(dblock.LockTimeout):
        # The previous call found the lock contended. A timeout of zero must still not join the queue.
        await lock.acquire(timeout=0.1)
    with pytest.raises(dblock.LockTimeout):
        await lock.acquire(timeout=0)
    assert owner.execute("SELECT count(*) FROM lock_tickets").fetchone() == (0,)
    await held.release()


@sync_first
@pytest.mark.second_stage
async def test_second_waiter_is_served_when_the_first_gives_up(clients: Clients, owner: psycopg.Connection) -> None:
    held = await clients().lock("a").acquire()
    giving_up = asyncio.create_task(clients().lock("a").acquire(timeout=2))  # after the second has queued
    await wait_for_tickets_issued(owner, 1)
    waiting = asyncio.create_task(clients().lock("a").acquire())
    await wait_for_tickets_issued(owner, 2)
    with pytest.raises(dblock.LockTimeout):
        await giving_up
    assert (await granted_in_time(held, waiting)).token > held.token


@pytest.mark.second_stage
async def test_lost_notification_costs_a_bounded_delay(
    clients: Clients, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await clients().lock("a").acquire()
    waiting = asyncio.create_task(acquired(clients(presence=None)))
    await wait_for_tickets(owner, 1)
    await asyncio.sleep(0.3)
    monkeypatch.setattr(waiters.LocalWaiters, "notified", lambda self, attempt: None)
    released = time.monotonic()
    await held.release()
    _, came = await asyncio.wait_for(waiting, 20)
    assert came - released < BOUND


@pytest.mark.second_stage
async def test_listener_that_is_cut_off_costs_a_bounded_delay(clients: Clients, owner: psycopg.Connection) -> None:
    held = await clients().lock("a").acquire()
    with Proxy(clients.dsn) as proxy:
        client = clients(listen_dsn=proxy.dsn)
        waiting = [asyncio.create_task(acquired(client, timeout=30)) for _ in range(3)]
        await wait_for_tickets(owner, 3)
        proxy.close()  # for the rest of the test, while all three wait
        released = time.monotonic()
        await held.release()
        left = set(waiting)
        while left:
            # Also a waiter that was granted the lock before the reply to the release was here.
            done, left = await asyncio.wait(left, timeout=10, return_when="FIRST_COMPLETED")
            assert done, "no waiter was served"
            for task in done:
                lease, came = task.result()
                assert came - released < BOUND
                released = time.monotonic()
                await lease.release()
    await client.close()


async def test_many_waiters_share_one_connection(clients: Clients, owner: psycopg.Connection) -> None:
    held = await clients().lock("a").acquire()
    client = clients(pool_size=1)  # a larger pool opens more connections when a busy machine replies slowly
    waiting = [asyncio.create_task(client.lock("a").acquire()) for _ in range(30)]
    await wait_for_tickets(owner, 30)
    sessions = owner.execute(
        "SELECT state, xact_start FROM pg_stat_activity WHERE application_name = 'dblock' AND datname = %s"
        " AND state IS NOT NULL",  # it is NULL until a new session is ready
        [owner.info.dbname],
    ).fetchall()
    assert len(sessions) <= 3 + 2, "the holder's three, and the waiters' two"
    assert {session for session in sessions if session[0] != "active"} == {("idle", None)}
    await held.release()
    left = set(waiting)
    while left:
        # The next waiter may be granted the lock before the release returns.
        done, left = await asyncio.wait(left, timeout=20, return_when="FIRST_COMPLETED")
        assert done, "no waiter was granted the lock"
        for task in done:
            await task.result().release()


async def test_waiter_of_a_closed_client_gets_an_error_and_leaves_no_ticket(
    clients: Clients, owner: psycopg.Connection
) -> None:
    held = await clients().lock("a").acquire()
    client = clients()
    waiting = [asyncio.create_task(client.lock("a").acquire()) for _ in range(3)]
    await wait_for_tickets(owner, 3)
    await client.close()
    for task in waiting:
        with pytest.raises(dblock.ClientClosed):
            await asyncio.wait_for(task, 20)
    await wait_for_tickets(owner, 0)
    assert owner.execute("SELECT count(*) FROM lock_clients").fetchone() in ((0,), (1,))
    await held.release()


async def test_client_closed_as_its_first_waiter_begins_to_wait_leaves_no_ticket(
    dsn: str, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiter comes after the listener was closed, and gets its ticket before the pool is."""
    join_queue, join = Listener.join_queue, Listener.join
    arrived = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait_for_close(self: Listener, name: str, attempt: str) -> Any:
        loop.call_soon_threadsafe(arrived.set)
        eventually(lambda: self.flow.closed, "the listener is closed")
        return join_queue(self, name, attempt)

    def wait_for_ticket(self: Listener, timeout: float) -> None:
        if self is client._runtime.listener:
            asyncio.run(wait_for_tickets(owner, 1))
        join(self, timeout)

    monkeypatch.setattr(Listener, "join_queue", wait_for_close)
    monkeypatch.setattr(Listener, "join", wait_for_ticket)
    with dblock.Client(dsn) as other, dblock.Client(dsn, presence=None) as client:
        held = other.lock("a").acquire()
        waiting = asyncio.ensure_future(asyncio.to_thread(client.lock("a").acquire))
        await arrived.wait()
        await asyncio.to_thread(client.close)
        with pytest.raises(dblock.ClientClosed):
            await waiting
        assert owner.execute("SELECT count(*) FROM lock_tickets").fetchone() == (0,)
        held.release()


async def test_waiter_whose_ticket_was_deleted_takes_a_new_one(
    clients: Clients, owner: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    held = await clients().lock("a").acquire()
    waiting = asyncio.create_task(clients().lock("a").acquire())
    await wait_for_tickets(owner, 1)
    with owner.transaction():
        owner.execute("UPDATE distributed_locks SET last_served_ticket = 7")
        owner.execute("DELETE FROM lock_tickets")  # as if the client had sent no heartbeat for too long
    await wait_for_tickets(owner, 1)
    await eventually_async(lambda: "ticket replaced" in caplog.text, "the replacement is logged")
    assert (await granted(held, waiting)).token > held.token


async def test_waiter_gets_an_error_when_the_database_is_unreachable(
    clients: Clients, owner: psycopg.Connection
) -> None:
    held = await clients().lock("a").acquire()
    with Proxy(clients.dsn) as proxy:
        client = clients(proxy.dsn, timings=timings_with(away_for=0.5))
        waiting = asyncio.create_task(client.lock("a").acquire())
        await wait_for_tickets(owner, 1)
        proxy.close()
        with pytest.raises(dblock.Unavailable):
            await asyncio.wait_for(waiting, 20)
    await held.release()
    await client.close()


async def test_waiter_of_an_efficiency_lock_is_served(clients: Clients, owner: psycopg.Connection) -> None:
    held = await clients().efficiency_lock("a").acquire()
    waiting = asyncio.create_task(clients().efficiency_lock("a").acquire())
    await wait_for_tickets(owner, 1)
    lease = await granted(held, waiting)
    with pytest.raises(dblock.NoFencingToken):
        _ = lease.token


@pytest.mark.second_stage
async def test_waiter_notices_a_release_in_the_users_transaction(clients: Clients, owner: psycopg.Connection) -> None:
    with dblock.Client(clients.dsn) as holder, psycopg.connect(clients.dsn) as connection:
        held = holder.lock("a").acquire()
        waiting = asyncio.create_task(acquired(clients()))
        await wait_for_tickets(owner, 1)
        held.release_in(connection)
        await asyncio.sleep(0.5)
        assert not waiting.done(), "the release is not committed yet"
        committed = time.monotonic()
        connection.commit()
        _, came = await asyncio.wait_for(waiting, 20)
        assert came - committed < BOUND


async def test_ticket_without_a_waiter_blocks_no_other_waiter(clients: Clients, owner: psycopg.Connection) -> None:
    """An interrupt right after the reply can leave such a ticket, and the client's heartbeats keep it alive."""
    held = await clients().lock("a").acquire()
    client = clients()
    waiting = asyncio.create_task(client.lock("a").acquire())
    await wait_for_tickets(owner, 1)
    owner.execute(
        "INSERT INTO lock_tickets (name, number, attempt, client, holder, since)"
        " SELECT name, number - 1, gen_random_uuid(), client, holder, since FROM lock_tickets"
    )
    await held.release()
    assert (await asyncio.wait_for(waiting, 20)).token > held.token


@pytest.mark.usefixtures("needs_presence")
@sync_first
@pytest.mark.second_stage
async def test_wait_logs_no_warning(
    clients: Clients, owner: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dblock")
    held = await clients().lock("a").acquire()
    waiting = asyncio.create_task(clients().lock("a").acquire())
    await wait_for_tickets(owner, 1)
    await asyncio.sleep(2.5)
    await held.release()
    await (await waiting).release()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_listen_dsn_is_checked(clients: Clients) -> None:
    with pytest.raises(dblock.InvalidArgument, match="DSN"):
        clients(listen_dsn="")
    for presence in (0.01, 100, -1, float("nan"), "1"):
        with pytest.raises(dblock.InvalidArgument, match="presence"):
            clients(presence=presence)
    with pytest.raises(dblock.InvalidArgument, match="fair"):
        clients().lock("a", fair="no")


@sync_first
@pytest.mark.second_stage
async def test_ticket_that_could_not_be_abandoned_is_abandoned_later(
    clients: Clients, owner: psycopg.Connection
) -> None:
    """The client also waits for another lock, so its heartbeats keep all its tickets alive."""
    one, other = clients(), clients()
    held, elsewhere = await one.lock("a").acquire(), await one.lock("b").acquire()
    waiting_elsewhere = asyncio.create_task(other.lock("b").acquire())
    giving_up = asyncio.create_task(other.lock("a").acquire(timeout=3.5))  # after its row is locked
    await wait_for_tickets(owner, 2)
    with psycopg.connect(clients.dsn) as user:
        user.execute("SET search_path TO dblock")
        user.execute("SELECT FROM lock_tickets WHERE name = 'a' FOR KEY SHARE")
        with pytest.raises(dblock.LockTimeout):
            await asyncio.wait_for(giving_up, 20)
        assert owner.execute("SELECT count(*) FROM lock_tickets WHERE name = 'a'").fetchone() == (1,)
        user.rollback()
    await wait_for_tickets(owner, 1)
    await held.release()
    assert await clients().lock("a").acquire(timeout=20)
    await elsewhere.release()
    await waiting_elsewhere


@sync_first
@pytest.mark.second_stage
async def test_tickets_without_a_waiter_are_abandoned_though_the_client_waits_for_another_lock(
    clients: Clients, owner: psycopg.Connection
) -> None:
    one, other = clients(), clients()
    await one.lock("a").acquire()
    waiting = asyncio.create_task(other.lock("a").acquire())
    await wait_for_tickets(owner, 1)
    owner.execute(
        "INSERT INTO lock_tickets (name, number, attempt, client, holder, since)"
        " SELECT 'b', 1, gen_random_uuid(), client, holder, since FROM lock_tickets"
    )
    await wait_for_tickets(owner, 1)
    assert owner.execute("SELECT name FROM lock_tickets").fetchone() == ("a",)
    waiting.cancel()


async def test_repeated_closing_leaves_the_queue_empty(clients: Clients, owner: psycopg.Connection) -> None:
    held = await clients().lock("a").acquire()
    for _ in range(8):
        client = clients()
        waiting = [asyncio.create_task(client.lock("a").acquire()) for _ in range(3)]
        await wait_for_tickets(owner, 3)
        await client.close()
        assert owner.execute("SELECT count(*) FROM lock_tickets").fetchone() == (0,)
        for task in waiting:
            with pytest.raises(dblock.ClientClosed):
                await asyncio.wait_for(task, 20)
    assert owner.execute("SELECT count(*) FROM lock_tickets").fetchone() == (0,)
    await held.release()


@pytest.mark.second_stage
async def test_request_that_outlasts_the_close_of_its_client_leaves_no_ticket(
    clients: Clients, owner: psycopg.Connection
) -> None:
    """The close waits for it, but not for long. Its ticket then comes after the client has left all queues."""
    slow = "    ready boolean;\n"
    pause = "    paused text := pg_sleep(CASE WHEN acquire.had_ticket THEN 1.6 ELSE 0 END);\n"
    mutants.replace(owner, mutants.altered("11_acquire.sql", slow, slow + pause))
    held = await clients().lock("a").acquire()
    client = clients()
    waiting = asyncio.create_task(client.lock("a").acquire())
    await wait_for_tickets(owner, 1)
    runtime = getattr(client, "_inner", client)._runtime
    await eventually_async(lambda: runtime.listener.waiters.wake_all() or requested(owner), "the waiter's request")
    await client.close()
    with pytest.raises(dblock.ClientClosed):
        await asyncio.wait_for(waiting, 20)
    assert owner.execute("SELECT count(*) FROM lock_tickets").fetchone() == (0,)
    await held.release()


def requested(owner: psycopg.Connection) -> bool:
    """Return whether a request of a waiter is under way, and sleeps."""
    found = owner.execute("SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep'").fetchone()
    return found is not None


async def test_client_without_waiters_does_not_listen(clients: Clients, owner: psycopg.Connection) -> None:
    """Every notification wakes the sessions of all listeners in the whole database."""
    clients.timings = timings_with(listen_for=0.3, ping_interval=0.2)
    one, other = clients(), clients()
    held = await one.lock("a").acquire()
    waiting = asyncio.create_task(other.lock("a").acquire())
    await settled(other)
    listeners = [getattr(client, "_inner", client)._runtime.listener for client in (one, other)]
    assert [listener.flow.listens for listener in listeners] == [False, True]
    await held.release()
    await waiting
    await eventually_async(lambda: not listeners[1].flow.listens, "the listener has stopped listening")
