"""Barriers and latches: parties return together, none counts that has left or died, and no reply is lost for good."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Awaitable
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

import dblock
from tests.support.eventually import eventually_async
from tests.support.facade import Clients
from tests.support.proxy import Proxy
from tests.support.servers import private_server
from tests.support.stages import sync_first
from tests.support.timings import polls_every, timings_with

PATIENCE = 60.0
"""Seconds after which a wait that should be over has failed."""


async def wait_until(owner: psycopg.Connection, count: str, number: int) -> None:
    """Return when a query counts so many rows."""
    await eventually_async(lambda: owner.execute(count.encode()).fetchone() == (number,), f"{number}: {count}")


async def wait_for_waiters(owner: psycopg.Connection, number: int) -> None:
    """Return when so many attempts wait at barriers and latches."""
    await wait_until(owner, "SELECT count(*) FROM barrier_waiters WHERE NOT over", number)


async def ended(task: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(task, PATIENCE)


def arrive(owner: psycopg.Connection, parties: int = 2, attempt: UUID | None = None) -> tuple[Any, ...]:
    """Arrive from SQL, or ask again with the same attempt, and notify no client of a trip."""
    row = owner.execute(
        "SELECT tripped, number FROM arrive_barrier('b', %s, %s, %s)", [parties, attempt or uuid4(), uuid4()]
    ).fetchone()
    assert row is not None
    return row


async def test_all_parties_return_together_and_again(clients: Clients, owner: psycopg.Connection) -> None:
    barriers = [clients().barrier("b", parties=3) for _ in range(2)]
    for _ in range(2):
        early = [asyncio.create_task(barriers[index].wait()) for index in (0, 1)]
        await wait_for_waiters(owner, 2)
        assert not any(task.done() for task in early)
        last = await ended(barriers[0].wait(PATIENCE))
        assert last == 2
        assert sorted(await ended(asyncio.gather(*early))) == [0, 1]
    assert owner.execute("SELECT count(*) FROM barrier_waiters").fetchone() == (0,)


@sync_first
async def test_barrier_of_one_party_never_waits(clients: Clients) -> None:
    barrier = clients().barrier("b", parties=1)
    assert [await barrier.wait(0) for _ in range(3)] == [0, 0, 0]
    assert (barrier.name, barrier.parties) == ("b", 1)
    assert "'b', 1 parties" in repr(barrier)


async def test_party_that_times_out_does_not_count(clients: Clients, owner: psycopg.Connection) -> None:
    barrier = clients().barrier("b", parties=2)
    with pytest.raises(dblock.WaitTimeout, match="Barrier 'b' did not trip within 0.01 s") as late:
        await barrier.wait(0.01)
    assert (late.value.kind, late.value.name, late.value.timeout) == ("barrier", "b", 0.01)
    assert owner.execute("SELECT count(*) FROM barrier_waiters").fetchone() == (0,)
    assert arrive(owner) == (False, None)


@sync_first
async def test_clients_that_disagree_are_told_both_numbers(clients: Clients) -> None:
    client = clients()
    await client.barrier("b", parties=1).wait()
    with pytest.raises(dblock.CountsDiffer, match="Barrier 'b' has 1 parties, and this client gave 2") as refused:
        await client.barrier("b", parties=2).wait()
    assert (refused.value.kind, refused.value.count, refused.value.asked) == ("barrier", 1, 2)
    await client.latch("l", count=2).count_down()
    for call in ("count_down", "remaining", "wait"):
        with pytest.raises(dblock.CountsDiffer, match="Latch 'l' has a count of 2, and this client gave 3"):
            await getattr(client.latch("l", count=3), call)()


@sync_first
async def test_bad_arguments_are_refused_before_anything_is_sent(clients: Clients) -> None:
    client = clients("host=nowhere.invalid")
    limits = "number of parties of barrier 'b' is a whole number from 1 to 10000"
    for number in (0, -1, 10_001, True, "2", 2.0):
        with pytest.raises(dblock.InvalidArgument, match=limits):
            client.barrier("b", parties=number)
    with pytest.raises(dblock.InvalidArgument, match="count of latch 'l'"):
        client.latch("l", count=0)
    with pytest.raises(dblock.InvalidArgument, match="A latch's name takes 1 to 512 bytes"):
        client.latch("", count=1)
    for timeout in (-1, "5"):
        with pytest.raises(dblock.InvalidArgument, match="timeout of barrier 'b'"):
            await client.barrier("b", parties=2).wait(timeout)


@pytest.mark.parametrize("by", [0, -1, True, 1.5])
async def test_latch_refuses_a_count_of_less_than_one(dsn: str, by: Any) -> None:
    async with dblock.AsyncClient(dsn) as client:
        with pytest.raises(dblock.InvalidArgument, match="counted down by 1 to"):
            await client.latch("l", count=2).count_down(by)


async def test_party_without_a_notification_finds_out_by_itself(clients: Clients, owner: psycopg.Connection) -> None:
    waiting = asyncio.create_task(clients().barrier("b", parties=2).wait())
    await wait_for_waiters(owner, 1)
    assert arrive(owner) == (True, 1)
    assert await ended(waiting) == 0


@pytest.mark.second_stage
async def test_trip_and_opening_wake_all_waiters(clients: Clients, owner: psycopg.Connection) -> None:
    clients.timings = polls_every(1000.0)
    one, other = clients(), clients()
    # Without this, a client asks again when its listener has connected, and needs no notification.
    warm = [asyncio.create_task(client.barrier("warm", parties=3).wait()) for client in (one, other)]
    await wait_for_waiters(owner, 2)
    for client in (one, other):
        listener = getattr(client, "_inner", client)._runtime.listener
        await eventually_async(partial(getattr, listener.waiters, "notifications_work"), "notifications")
    waits = [asyncio.create_task(client.barrier("b", parties=3).wait()) for client in (one, other)]
    opens = [asyncio.create_task(client.latch("l", count=1).wait()) for client in (one, other)]
    await wait_for_waiters(owner, 6)
    owner.execute("UPDATE lock_clients SET seen_until = clock_timestamp() + interval '1 hour'")
    assert await ended(one.barrier("b", parties=3).wait()) == 2
    assert sorted(await ended(asyncio.gather(*waits))) == [0, 1]
    await other.latch("l", count=1).count_down()
    await ended(asyncio.gather(*opens))
    await ended(one.barrier("warm", parties=3).wait())
    await ended(asyncio.gather(*warm))


@pytest.mark.second_stage
async def test_timeout_returns_the_number_if_the_barrier_has_tripped(
    clients: Clients, owner: psycopg.Connection
) -> None:
    clients.timings = polls_every(1000.0)
    waiting = asyncio.create_task(clients().barrier("b", parties=2).wait(4))
    await wait_for_waiters(owner, 1)
    owner.execute("UPDATE lock_clients SET seen_until = clock_timestamp() + interval '1 hour'")
    assert arrive(owner) == (True, 1), "and no notification, so that the party finds it when it leaves"
    assert await ended(waiting) == 0


async def test_party_whose_reply_was_lost_learns_that_it_tripped(clients: Clients, owner: psycopg.Connection) -> None:
    with Proxy(clients.dsn) as proxy:
        client = clients(proxy.dsn, holder="the party in question")
        await client.latch("other", count=1).remaining()
        arrive(owner)
        # More replies than the client's own retry covers. The trap is in the arguments, so the call is executed.
        proxy.lose_reply_to(b"the party in question", times=3)
        assert await ended(client.barrier("b", parties=2).wait()) == 1
        assert proxy.lost == 3
        assert arrive(owner) == (False, None), "the retries did not count for the next generation"
        await client.close()


async def test_count_whose_reply_was_lost_counts_once(clients: Clients) -> None:
    with Proxy(clients.dsn) as proxy:
        client = clients(proxy.dsn)
        latch = client.latch("the latch in question", count=5)
        assert await latch.remaining() == 5
        proxy.lose_reply_to(b"the latch in question", times=3)
        assert await latch.count_down() == 4
        assert proxy.lost == 3
        assert await latch.count_down(2) == 2
        await client.close()


async def test_party_arrives_again_after_a_crash_of_the_database(clients: Clients, owner: psycopg.Connection) -> None:
    waiting = asyncio.create_task(clients().barrier("b", parties=2).wait())
    await wait_for_waiters(owner, 1)
    owner.execute("TRUNCATE barrier_waiters")
    owner.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    await wait_for_waiters(owner, 1)
    attempt = uuid4()
    # Until the party has a new presence, it may not count.
    await eventually_async(lambda: arrive(owner, 2, attempt) == (True, 1), "the barrier trips")
    assert await ended(waiting) == 0


@pytest.mark.second_stage
async def test_crash_of_the_server_forgets_no_trip_and_no_count() -> None:
    arrives = "SELECT number, fresh FROM dblock.arrive_barrier('b', 2, %s, %s)"
    slow, last = [uuid4(), uuid4()], [uuid4(), uuid4()]
    with private_server(in_memory=True, installed=True) as server:
        async with dblock.AsyncClient(server.url) as client:
            with psycopg.connect(server.url, autocommit=True, options="-c search_path=dblock") as owner:
                owner.execute(arrives, slow)
                assert owner.execute(arrives, last).fetchone() == (1, True)
                await client.latch("l", count=2).count_down()
                waiting = asyncio.create_task(client.barrier("b", parties=2).wait())
                await wait_for_waiters(owner, 1)
            server.stop(signal.SIGQUIT)
            server.start()
            with psycopg.connect(server.url, autocommit=True, options="-c search_path=dblock") as owner:
                assert owner.execute(arrives, slow).fetchone() == (0, False), "the trip is forgotten"
                await wait_for_waiters(owner, 1)
                assert owner.execute("SELECT count(*) FROM barrier_passes").fetchone() == (2,)
                assert arrive(owner) == (True, 1)
                assert await ended(waiting) == 0
                assert await client.latch("l", count=2).count_down() == 0


@pytest.mark.second_stage
async def test_outage_does_not_end_a_wait_before_its_timeout(clients: Clients, owner: psycopg.Connection) -> None:
    with Proxy(clients.dsn) as proxy:
        client = clients(proxy.dsn, patience=1)
        waiting = asyncio.create_task(client.barrier("b", parties=2).wait())
        leaving = asyncio.create_task(client.barrier("c", parties=2).wait(3))
        await wait_for_waiters(owner, 2)
        proxy.fall_silent()
        proxy.cut()
        with pytest.raises(dblock.Unavailable):  # it cannot know whether the barrier has tripped
            await ended(leaving)
        assert not waiting.done()
        proxy.flow()
        await wait_for_waiters(owner, 1)  # the party of `c` leaves as soon as it can
        assert arrive(owner) == (True, 1)
        assert await ended(waiting) == 0
        await client.close()


@sync_first
async def test_waiter_of_a_closed_client_gets_an_error_and_leaves(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients()
    waits = [asyncio.create_task(one.wait()) for one in (client.barrier("b", parties=2), client.latch("l", count=1))]
    await wait_for_waiters(owner, 2)
    await client.close()
    for task in waits:
        with pytest.raises(dblock.ClientClosed):
            await ended(task)
    await wait_for_waiters(owner, 0)


async def test_cancelled_waiter_leaves(dsn: str, owner: psycopg.Connection) -> None:
    async with dblock.AsyncClient(dsn) as client:
        kept = asyncio.create_task(client.barrier("b", parties=3).wait())
        waits = [
            asyncio.create_task(one.wait()) for one in (client.barrier("b", parties=3), client.latch("l", count=1))
        ]
        await wait_for_waiters(owner, 3)
        for task in waits:
            task.cancel()
        await asyncio.wait(waits)
        assert all(task.cancelled() for task in waits)
        assert owner.execute("SELECT count(*) FROM barrier_waiters").fetchone() == (1,)
        kept.cancel()
        await asyncio.wait([kept])


@sync_first
async def test_latch_opens_for_all_and_stays_open(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients()
    latch = client.latch("l", count=3)
    assert (latch.name, latch.count) == ("l", 3)
    assert await latch.remaining() == 3
    waits = [asyncio.create_task(clients().latch("l", count=3).wait()) for _ in range(2)]
    await wait_for_waiters(owner, 2)
    assert await latch.count_down() == 2
    with pytest.raises(dblock.WaitTimeout, match="Latch 'l' did not open within 0.01 s"):
        await latch.wait(0.01)
    assert not any(task.done() for task in waits)
    assert await latch.count_down(by=5) == 0
    await ended(asyncio.gather(*waits))
    await latch.wait(0)
    assert (await latch.count_down(), await latch.remaining()) == (0, 0)
    assert owner.execute("SELECT count(*) FROM barrier_waiters").fetchone() == (0,)


@sync_first
async def test_waiter_of_a_latch_without_a_notification_finds_out_by_itself(
    clients: Clients, owner: psycopg.Connection
) -> None:
    waiting = asyncio.create_task(clients().latch("l", count=1).wait())
    await wait_for_waiters(owner, 1)
    owner.execute("SELECT count_down('l', 1)")
    await ended(waiting)


@sync_first
async def test_count_gives_up_when_the_database_stays_away(clients: Clients) -> None:
    with Proxy(clients.dsn) as proxy:
        client = clients(proxy.dsn, timings=timings_with(count_retry_for=0.1))
        latch = client.latch("l", count=2)
        assert await latch.remaining() == 2
        proxy.close()
        with pytest.raises(dblock.Unavailable):
            await latch.count_down()
        await client.close()


PROCESS = """
import json, sys, threading, time
import dblock

dsn, threads, rounds, parties = sys.argv[1], *map(int, sys.argv[2:])
seen = []


def party(barrier):
    for generation in range(rounds):
        arrived = time.monotonic()
        number = barrier.wait(300)
        seen.append((generation, number, arrived, time.monotonic()))


with dblock.Client(dsn, pool_size=4) as client:
    workers = [threading.Thread(target=party, args=[client.barrier("b", parties=parties)]) for _ in range(threads)]
    print("ready", flush=True)
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
print(json.dumps(seen))
"""


def start(dsn: str, threads: int, rounds: int, parties: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", PROCESS, dsn, *map(str, (threads, rounds, parties))]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("needs_presence")
@pytest.mark.second_stage
async def test_dead_process_does_not_count(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients(holder="alive")
    with start(clients.dsn, 2, 1, 3) as process:
        await wait_until(owner, "SELECT count(*) FROM barrier_waiters WHERE presence IS NOT NULL", 2)
        process.kill()
    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    await wait_until(owner, others, 0)
    waiting = [asyncio.create_task(client.barrier("b", parties=3).wait()) for _ in range(2)]
    await wait_until(owner, "SELECT count(*) FROM barrier_waiters WHERE holder = 'alive'", 2)
    await wait_for_waiters(owner, 2)
    assert not any(task.done() for task in waiting), "the barrier has tripped with a dead party"
    assert arrive(owner, 3) == (True, 2)
    assert sorted(await ended(asyncio.gather(*waiting))) == [0, 1]


@pytest.mark.second_stage
def test_fifty_parties_in_five_processes_never_run_ahead(dsn: str) -> None:
    rounds = 10
    processes = [start(dsn, 10, rounds, 50) for _ in range(5)]
    try:
        seen = [tuple(one) for process in processes for one in json.loads(process.communicate()[0].splitlines()[-1])]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert len(seen) == 50 * rounds
    for generation in range(rounds):
        mine = [one for one in seen if one[0] == generation]
        assert sorted(number for _, number, _, _ in mine) == list(range(50))
        assert max(arrived for *_, arrived, _ in mine) <= min(left for *_, left in mine), "a party returned too early"
