"""Read-write locks and semaphores.

The first part is one suite for every kind of lock, plain locks included, on both kinds of client. In it each kind has a
rival: a lock that cannot be held at the same time. The second part has the promises of one kind alone.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import psycopg
import pytest

import dblock
import fenced_store
from tests.dblock.client.test_cancellation import each_await
from tests.dblock.client.test_leases import collect_garbage
from tests.dblock.client.test_waiting import keep_waiters, settled, wait_for_tickets
from tests.support.eventually import eventually_async
from tests.support.facade import Clients
from tests.support.proxy import Proxy
from tests.support.renewals import TTL, renewed
from tests.support.stages import first

pytestmark = [pytest.mark.usefixtures("patient")]

Make = Callable[..., Any]


class Kind(NamedTuple):
    """A kind of lock, and a lock that excludes it."""

    lock: Make
    rival: Make


KINDS = {
    "plain": Kind(
        lambda client, name, **options: client.lock(name, **options),
        lambda client, name, **options: client.lock(name, **options),
    ),
    "read": Kind(
        lambda client, name, **options: client.read_lock(name, **options),
        lambda client, name, **options: client.write_lock(name, **options),
    ),
    "write": Kind(
        lambda client, name, **options: client.write_lock(name, **options),
        lambda client, name, **options: client.read_lock(name, **options),
    ),
    "semaphore": Kind(
        lambda client, name, **options: client.semaphore(name, permits=1, **options),
        lambda client, name, **options: client.semaphore(name, permits=1, **options),
    ),
}


def every_kind(first: str) -> pytest.MarkDecorator:
    """Run a case for every kind of lock on both kinds of client. Of these eight, one runs in the first stage."""
    cases = itertools.product(("sync", "async"), KINDS)
    return pytest.mark.parametrize(
        ("clients", "kind"),
        [pytest.param(*case, marks=[] if "-".join(case) == first else pytest.mark.second_stage) for case in cases],
        indirect=True,
    )


one_first = pytest.mark.parametrize("clients", first(1, ["async", "sync"]), indirect=True)
"""Marks a case of one kind of lock: it runs with `AsyncClient` in the first stage, with `Client` in the second."""

HELD = "SELECT count(*) FROM distributed_locks WHERE expires_at > clock_timestamp()"


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


async def nothing_is_left(owner: psycopg.Connection) -> None:
    """Wait until no lock is held and no ticket waits."""
    await eventually_async(lambda: owner.execute(HELD).fetchone() == (0,), "every lock is free")
    await wait_for_tickets(owner, 0)


def waits_for(lock: Any) -> asyncio.Task[Any]:
    """Acquire a lock in a task of its own."""
    return asyncio.create_task(lock.acquire())


def share_of(lease: Any) -> str:
    """Return the name of the row that a lease holds."""
    name: str = getattr(lease, "_inner", lease)._state.name
    return name


# The suite for every kind.


@every_kind("sync-write")
async def test_grant_excludes_the_rival_until_it_is_released(clients: Clients, kind: Kind) -> None:
    client, other = clients(), clients()
    lease = await kind.lock(client, "a").try_acquire()
    assert lease.name == "a"
    assert 0 < lease.remaining() <= 30 * 0.98
    rival = kind.rival(other, "a", timeout=0)
    assert await rival.try_acquire() is None
    with pytest.raises(dblock.LockTimeout):
        await rival.acquire()
    assert await lease.release() is True
    assert await lease.release() is False
    assert lease.remaining() == 0
    async with rival as after:
        assert after.token > lease.token
        assert await kind.lock(client, "a").try_acquire() is None
    async with kind.lock(client, "a") as last:
        assert last.token > after.token
        holder = await kind.lock(other, "a").holder()
        assert (holder.token, holder.meta) == (last.token, None)


@every_kind("async-read")
async def test_release_wakes_the_waiter(clients: Clients, kind: Kind, owner: psycopg.Connection) -> None:
    held = await kind.rival(clients(), "a", ttl=300).acquire()
    waiting = waits_for(kind.lock(clients(holder="the waiter"), "a", ttl=600))
    await wait_for_tickets(owner, 1)
    assert [one.holder for one in await kind.lock(clients(), "a").queue()] == ["the waiter"]
    await held.release()
    lease = await asyncio.wait_for(waiting, 20)
    assert lease.token > held.token
    await lease.release()
    await nothing_is_left(owner)


@every_kind("async-semaphore")
async def test_wait_that_times_out_leaves_no_ticket(clients: Clients, kind: Kind, owner: psycopg.Connection) -> None:
    held = await kind.rival(clients(), "a").acquire()
    lock = kind.lock(clients(), "a")
    with pytest.raises(dblock.LockTimeout) as caught:
        await lock.acquire(timeout=0.05)
    assert (caught.value.name, caught.value.timeout, caught.value.own_token) == ("a", 0.05, None)
    await wait_for_tickets(owner, 0)
    await held.release()
    assert await lock.try_acquire()


@every_kind("async-write")
async def test_wait_for_an_own_lease_says_so(clients: Clients, kind: Kind) -> None:
    client = clients()
    held = await kind.rival(client, "a").acquire()

    async def wait_in_another_task() -> dblock.LockTimeout:
        with pytest.raises(dblock.LockTimeout, match="this client itself holds") as caught:
            await kind.lock(client, "a").acquire(timeout=0.05)
        return caught.value

    error = await asyncio.create_task(wait_in_another_task())
    assert error.own_token == held.token
    assert ("reentrant" in str(error)) is (kind is KINDS["plain"]), "shares cannot be acquired again"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    await held.release()


@one_first
async def test_wait_of_a_reader_behind_a_writer_does_not_blame_the_own_read_lease(clients: Clients) -> None:
    client, other = clients(), clients()
    async with client.read_lock("a"):
        writing = waits_for(other.write_lock("a"))
        await eventually_async(client.read_lock("a").queue, "the writer is queued")
        with pytest.raises(dblock.LockTimeout) as caught:
            await client.read_lock("a").acquire(timeout=0.05)
        assert caught.value.own_token is None
    await (await asyncio.wait_for(writing, 20)).release()


@every_kind("sync-read")
async def test_loss_names_the_lock_and_its_reason(clients: Clients, kind: Kind, owner: psycopg.Connection) -> None:
    lease = await kind.lock(clients(), "a").acquire()
    owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp() WHERE name = %s", [share_of(lease)])
    with pytest.raises(dblock.LeaseLost, match="lock 'a'") as caught:
        await lease.renew()
    assert (caught.value.name, caught.value.reason, caught.value.token) == ("a", "expired", lease.token)
    assert lease.lost.reason is dblock.Reason.EXPIRED
    assert await kind.rival(clients(), "a").try_acquire()
    with pytest.raises(dblock.LeaseLost):
        await lease.renew()
    assert await lease.release() is False


@every_kind("sync-semaphore")
async def test_forced_release_reaches_the_holder(clients: Clients, kind: Kind, owner: psycopg.Connection) -> None:
    lock, rival = kind.lock(clients(), "a", ttl=600), kind.rival(clients(), "a")
    lease = await lock.acquire()
    force = "SELECT force_release(%s, %s, now => %s)"
    assert owner.execute(force, [share_of(lease), lease.token, False]).fetchone() == (True,)
    with pytest.raises(dblock.LeaseLost, match="forced"):
        await lease.renew()
    assert await rival.try_acquire() is None, "the holder has not let go yet"
    assert await lease.release() is False
    await eventually_async(lambda: owner.execute(HELD).fetchone() == (0,), "the lock is free")
    again = await lock.acquire()
    assert owner.execute(force, [share_of(again), again.token, True]).fetchone() == (True,)
    assert await rival.try_acquire()


@every_kind("async-write")
async def test_closed_client_leaves_neither_a_lease_nor_a_ticket(
    clients: Clients, kind: Kind, owner: psycopg.Connection
) -> None:
    holds, waits = clients(), clients()
    held = await kind.rival(holds, "a").acquire()
    waiting = waits_for(kind.lock(waits, "a"))
    await wait_for_tickets(owner, 1)
    await waits.close()
    with pytest.raises(dblock.ClientClosed):
        await waiting
    await wait_for_tickets(owner, 0)
    await holds.close()
    assert held.remaining() == 0
    assert owner.execute(HELD).fetchone() == (0,)


@every_kind("async-semaphore")
async def test_grant_whose_reply_was_lost_is_found_by_the_retry(
    clients: Clients, kind: Kind, owner: psycopg.Connection
) -> None:
    with Proxy(clients.dsn) as proxy:
        client = clients(proxy.dsn)
        assert await client.lock("warm").try_acquire()
        proxy.lose_reply_to(b"the lock in question")
        lease = await kind.lock(client, "the lock in question").acquire(timeout=30)
        assert proxy.lost == 1
        assert owner.execute(HELD).fetchone() == (2,)
        assert await lease.release()
        assert await kind.rival(client, "the lock in question").try_acquire()
        await client.close()


@every_kind("sync-write")
async def test_transaction_can_prove_and_release_the_lease(
    clients: Clients, kind: Kind, owner: psycopg.Connection
) -> None:
    client = clients()
    lease, rival = await kind.lock(client, "a").acquire(), kind.rival(clients(), "a")
    inner = getattr(lease, "_inner", lease)
    user: Any
    if inner is lease:
        async with await psycopg.AsyncConnection.connect(clients.dsn) as user, user.transaction():
            await lease.assert_held(user)
            await lease.release_in(user)
            assert await rival.try_acquire() is None, "the transaction is not committed yet"
    else:
        with psycopg.connect(clients.dsn) as user, user.transaction():
            await lease.assert_held(user)
            await lease.release_in(user)
            assert await rival.try_acquire() is None, "the transaction is not committed yet"
    assert await rival.try_acquire()
    assert lease.remaining() == 0


@every_kind("none")
async def test_lost_notification_costs_a_bounded_delay(clients: Clients, kind: Kind, owner: psycopg.Connection) -> None:
    """A durable release notifies no waiter. The waiter finds out by itself, long before the lease would expire."""
    held = await kind.rival(clients(presence=None), "a", ttl=300, keep_alive=False).acquire()
    waiter = clients()
    waiting = waits_for(kind.lock(waiter, "a"))
    await wait_for_tickets(owner, 1)
    await settled(waiter)
    owner.execute("SELECT release(%s, %s, durable => true)", [share_of(held), held.token])
    assert (await asyncio.wait_for(waiting, 20)).token > held.token


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.second_stage) for name in KINDS])
async def test_acquire_cancelled_at_any_await_leaves_nothing(dsn: str, owner: psycopg.Connection, name: str) -> None:
    """Both the attempt that is granted at once and the attempt that waits for its turn."""
    kind = KINDS[name]
    async with dblock.AsyncClient(dsn) as client, dblock.AsyncClient(dsn) as other:
        assert await kind.lock(client, "warm").try_acquire()

        async def acquire(at: int) -> None:
            await (await kind.lock(client, f"{at}", ttl=600).acquire()).release()

        async def wait(at: int) -> None:
            held = await kind.rival(other, f"w{at}", ttl=600).acquire()
            release = asyncio.create_task(_release_when_awaited(held, owner))
            try:
                await (await kind.lock(client, f"w{at}", ttl=600).acquire()).release()
            finally:
                release.cancel()
                await held.release()

        async def check(at: int) -> None:
            only_warm = (1,)
            await eventually_async(lambda: owner.execute(HELD).fetchone() == only_warm, f"await {at}: the lock is free")
            await wait_for_tickets(owner, 0)
            assert client._runtime.runner is not None
            pool = client._runtime.runner._pool
            await eventually_async(lambda: len(pool._slots) == len(pool._idle), f"await {at}: every connection is idle")

        assert await each_await(acquire, check) >= 2
        assert await each_await(wait, check) >= 3


async def _release_when_awaited(held: Any, owner: psycopg.Connection) -> None:
    await wait_for_tickets(owner, 1)
    await held.release()


@pytest.mark.second_stage
async def test_keep_alive_renews_leases_of_every_kind(clients: Clients) -> None:
    client = clients()
    leases = [await kind.lock(client, name, ttl=TTL).acquire() for name, kind in KINDS.items()]
    await asyncio.gather(*map(renewed, leases))
    for lease in leases:
        assert await lease.release() is True


# Read-write locks.


async def test_readers_enter_together_and_keep_a_writer_out(clients: Clients, owner: psycopg.Connection) -> None:
    """Also those that have waited side by side."""
    client = clients()
    writer = await clients().write_lock("a").acquire()
    waiting = [waits_for(client.read_lock("a")) for _ in range(3)]
    await wait_for_tickets(owner, 3)
    await writer.release()
    readers = await asyncio.wait_for(asyncio.gather(*waiting), 20)
    assert len({reader.token for reader in readers}) == 3
    assert len({share_of(reader) for reader in readers}) == 3
    assert len(await client.read_lock("a").holders()) == 3
    for reader in readers:
        assert await clients().write_lock("a").try_acquire() is None
        await reader.release()
    assert await clients().write_lock("a").try_acquire()


@one_first
async def test_reader_that_comes_after_a_waiting_writer_waits_behind_it(
    clients: Clients, owner: psycopg.Connection
) -> None:
    """So the writer enters when the reads that ran before it are over, however many readers come later."""
    first = await clients().read_lock("a").acquire()
    writing = waits_for(clients().write_lock("a"))
    await wait_for_tickets(owner, 1)
    assert await clients().read_lock("a").try_acquire() is None
    reading = [waits_for(clients().read_lock("a")) for _ in range(2)]
    await wait_for_tickets(owner, 3)
    await first.release()
    writer = await asyncio.wait_for(writing, 20)
    assert not any(one.done() for one in reading)
    await writer.release()
    later = await asyncio.wait_for(asyncio.gather(*reading), 20)
    assert first.token < writer.token < min(reader.token for reader in later)


@one_first
async def test_reader_does_not_wait_for_a_later_writer(clients: Clients, owner: psycopg.Connection) -> None:
    """The order writer, reader, writer: the reader enters when the first writer leaves, whatever the second one does.

    A reader that waited for every writer would wait for the second one, which waits for the reader.
    """
    first = await clients().write_lock("a").acquire()
    reading = waits_for(clients().read_lock("a"))
    await wait_for_tickets(owner, 1)
    writing = waits_for(clients().write_lock("a"))
    await wait_for_tickets(owner, 2)
    await first.release()
    reader = await asyncio.wait_for(reading, 20)
    assert not writing.done()
    await reader.release()
    assert (await asyncio.wait_for(writing, 20)).token > reader.token


@one_first
async def test_writer_that_gives_up_lets_the_readers_behind_it_in(clients: Clients, owner: psycopg.Connection) -> None:
    reader = await clients().read_lock("a").acquire()
    gives_up = clients()
    writing = waits_for(gives_up.write_lock("a"))
    await wait_for_tickets(owner, 1)
    reading = waits_for(clients().read_lock("a"))
    await wait_for_tickets(owner, 2)
    await gives_up.close()
    with pytest.raises(dblock.ClientClosed):
        await writing
    assert (await asyncio.wait_for(reading, 20)).token > reader.token


@one_first
async def test_downgrade_lets_readers_in_and_no_writer(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients()
    async with client.write_lock("a", meta={"job": 7}) as writer:
        reading = waits_for(clients().read_lock("a"))
        await wait_for_tickets(owner, 1)
        writing = waits_for(clients().write_lock("a"))
        await wait_for_tickets(owner, 2)
        reader = await writer.downgrade()
        assert reader.name == "a"
        assert reader.token > writer.token
        assert writer.remaining() == 0
        assert not writer.lost.is_set()
        with pytest.raises(dblock.LeaseLost, match="over"):
            writer.raise_if_lost()
        beside = await asyncio.wait_for(reading, 20)
        assert {one.token for one in await client.read_lock("a").holders()} == {reader.token, beside.token}
        assert {str(one.meta) for one in await client.read_lock("a").holders()} == {"None", "{'job': 7}"}
        assert not writing.done()
        await reader.renew()
        await beside.release()
    assert reader.remaining() == 0, "the end of the body releases the read lease"
    assert await asyncio.wait_for(writing, 20)


@one_first
async def test_downgraded_lease_is_kept_and_its_loss_ends_the_body(clients: Clients, owner: psycopg.Connection) -> None:
    with pytest.raises(dblock.LeaseLost) as caught:
        async with clients().write_lock("a") as writer:
            reader = await writer.downgrade()
            owner.execute("SELECT release(%s, %s)", [share_of(reader), reader.token])
    assert caught.value.token == reader.token


@one_first
async def test_lost_writer_cannot_downgrade(clients: Clients, owner: psycopg.Connection) -> None:
    writer = await clients().write_lock("a").acquire()
    owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp() WHERE name = %s", [share_of(writer)])
    other = await clients().write_lock("a").acquire()
    with pytest.raises(dblock.LeaseLost) as caught:
        await writer.downgrade()
    assert caught.value.token == writer.token
    assert caught.value.reason in ("superseded", "expired")
    assert [one.token for one in await clients().read_lock("a").holders()] == [other.token]


@one_first
async def test_downgrade_whose_reply_was_lost_is_found_by_the_retry(
    clients: Clients, owner: psycopg.Connection
) -> None:
    with Proxy(clients.dsn) as proxy:
        client = clients(proxy.dsn)
        writer = await client.write_lock("the lock in question").acquire()
        proxy.lose_reply_to(b".downgrade(")
        reader = await writer.downgrade()
        assert proxy.lost == 1
        assert [one.token for one in await client.read_lock("the lock in question").holders()] == [reader.token]
        await client.close()
    assert owner.execute(HELD).fetchone() == (0,)


@pytest.mark.second_stage
async def test_downgrade_cancelled_at_any_await_leaves_nothing(dsn: str, owner: psycopg.Connection) -> None:
    async with dblock.AsyncClient(dsn) as client:
        await (await client.write_lock("warm").acquire()).release()
        writers = []

        async def downgrade(at: int) -> None:
            writers.append(await client.write_lock(f"{at}", ttl=600).acquire())
            await (await writers[-1].downgrade()).release()

        async def check(at: int) -> None:
            await nothing_is_left(owner)
            assert not any(writer.remaining() for writer in writers)

        assert await each_await(downgrade, check) >= 3


@one_first
async def test_upgrade_is_refused_at_once_and_says_why(clients: Clients) -> None:
    client = clients()
    reader = await client.read_lock("a").acquire()
    with pytest.raises(dblock.UpgradeRefused, match="would wait for each other") as caught:
        await reader.upgrade()
    assert caught.value.name == "a"
    # The thread or task that reads would wait for itself.
    for ask in (client.write_lock("a", timeout=5).acquire, client.write_lock("a").try_acquire):
        with pytest.raises(dblock.UpgradeRefused):
            await ask()
    # Another one may wait, and the same one may after it has released.
    other = asyncio.create_task(client.write_lock("a").try_acquire())
    assert await other is None
    await reader.release()
    writer = await client.write_lock("a").try_acquire()
    assert writer


async def test_dropped_read_lease_does_not_refuse_its_thread_the_write_lock(dsn: str, kept_leases: list[Any]) -> None:
    # The client gives a dropped lease back by itself, so the writer does not wait for its own thread.
    with dblock.Client(dsn) as client:
        client.read_lock("a").acquire()
        with pytest.warns(ResourceWarning, match="'a' was never released"):
            collect_garbage(kept_leases)
        assert client.write_lock("a", timeout=30).acquire()


@one_first
async def test_token_of_a_reader_passes_no_fence(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients()
    reader = await client.read_lock("a").acquire()
    assert reader.token > 0
    with fenced_store.FencedStore(clients.dsn) as store:
        for fence in (getattr(reader, "_inner", reader), reader.token):
            with pytest.raises(fenced_store.InvalidArgument, match="read lease passes no fence"):
                store.put("r", 1, fence=fence)
        # It is an integer everywhere else.
        assert owner.execute("SELECT 1 FROM distributed_locks WHERE token = %s", [reader.token]).fetchone()
        assert json.loads(json.dumps(reader.token)) == reader.token
        await reader.release()
        writer = await client.write_lock("a", claims=["r"]).acquire()
        store.put("r", 2, fence=getattr(writer, "_inner", writer))


# Semaphores.


@one_first
async def test_permits_have_distinct_numbers_and_tokens(clients: Clients, owner: psycopg.Connection) -> None:
    semaphore, other = clients().semaphore("a", permits=3), clients().semaphore("a")
    assert await semaphore.available() == 3
    leases = [await semaphore.acquire(), await other.acquire(), await semaphore.acquire()]
    assert [lease.permit for lease in leases] == [0, 1, 2]
    assert [lease.token for lease in leases] == sorted({lease.token for lease in leases})
    assert await other.available() == 0
    assert await other.try_acquire() is None
    waiting = waits_for(other)
    await wait_for_tickets(owner, 1)
    await leases[1].release()
    next_lease = await asyncio.wait_for(waiting, 20)
    assert (next_lease.permit, next_lease.name) == (1, "a")
    assert next_lease.token > leases[2].token
    held = [leases[0], leases[2], next_lease]
    assert [(one.token, one.permit) for one in await other.holders()] == [(one.token, one.permit) for one in held]


@one_first
async def test_claims_of_a_semaphore_fence_one_permit_each(clients: Clients) -> None:
    """So the holder of one permit does not shut out the holder of another."""
    client = clients()
    semaphore = client.semaphore("gpus", permits=2, claims=["gpu:{permit}"])
    first, second = await semaphore.acquire(), await semaphore.acquire()
    with fenced_store.FencedStore(clients.dsn) as store:
        for lease in (first, second):
            store.put(f"gpu:{lease.permit}", "job", fence=getattr(lease, "_inner", lease))
        await first.release()
        assert (await semaphore.acquire()).permit == 0
        with pytest.raises(fenced_store.StaleTokenError):
            store.put("gpu:0", "stale", fence=getattr(first, "_inner", first))
    for claims in (["gpu"], [fenced_store.FencedStore(clients.dsn).claims("gpu:{permit}")]):
        with pytest.raises(dblock.InvalidArgument, match="shut each other out"):
            client.semaphore("gpus", permits=2, claims=claims)


@one_first
async def test_clients_that_disagree_on_the_permits_are_told_both_numbers(clients: Clients) -> None:
    assert await clients().semaphore("a", permits=2).try_acquire()
    for ask in ("try_acquire", "acquire", "available"):
        with pytest.raises(dblock.PermitsDiffer, match="has 2 permits, and this client asked for 5") as caught:
            await getattr(clients().semaphore("a", permits=5), ask)()
        assert (caught.value.name, caught.value.permits, caught.value.asked) == ("a", 2, 5)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), vars(again)) == (str(caught.value), vars(caught.value))


@one_first
async def test_growing_wakes_waiters(clients: Clients, owner: psycopg.Connection) -> None:
    semaphore = clients().semaphore("a", permits=1)
    held = await semaphore.acquire()
    waiters = [waits_for(clients().semaphore("a", permits=1)) for _ in range(3)]
    await wait_for_tickets(owner, 3)
    keep_waiters(owner)
    await semaphore.resize(3)
    await eventually_async(lambda: sum(one.done() for one in waiters) == 2, "two waiters are served")
    served = [one.result() for one in waiters if one.done()]
    assert sorted(lease.permit for lease in (held, *served)) == [0, 1, 2]
    assert await semaphore.available() == 0, "the semaphore knows the number that it has set"
    await held.release()
    assert len(await asyncio.wait_for(asyncio.gather(*waiters), 20)) == 3


@pytest.mark.second_stage
async def test_waiter_creates_a_semaphore_that_a_failover_has_lost(clients: Clients, owner: psycopg.Connection) -> None:
    await clients().semaphore("a", permits=2).acquire()
    await clients().semaphore("a", permits=2).acquire()
    waiter = waits_for(clients().semaphore("a", permits=2))
    await wait_for_tickets(owner, 1)
    owner.execute("WITH t AS (DELETE FROM lock_tickets), q AS (DELETE FROM lock_queues) DELETE FROM distributed_locks")
    lease = await asyncio.wait_for(waiter, 20)
    assert lease.permit == 0
    assert await clients().semaphore("a", permits=2).available() == 1


@one_first
async def test_shrinking_takes_from_no_holder(clients: Clients) -> None:
    semaphore = clients().semaphore("a", permits=3)
    leases = [await semaphore.acquire() for _ in range(3)]
    await semaphore.resize(1)
    for lease in leases:
        await lease.renew()
    assert await semaphore.available() == 0
    for lease in leases[:2]:
        assert await lease.release() is True
        assert await semaphore.try_acquire() is None
    await leases[2].release()
    lease = await semaphore.try_acquire()
    assert lease.permit == 0
    assert await semaphore.try_acquire() is None


@pytest.mark.parametrize("permits", [0, -1, 1.5, True, "2", 10**9])
def test_number_of_permits_is_checked(permits: Any) -> None:
    client = dblock.Client("postgresql://nowhere.example/app")
    with pytest.raises(dblock.InvalidArgument, match="permits of semaphore 'a'"):
        client.semaphore("a", permits=permits)


@one_first
async def test_semaphore_without_a_number_is_refused_before_it_has_one(clients: Clients) -> None:
    for ask in ("try_acquire", "acquire", "available"):
        with pytest.raises(dblock.InvalidArgument, match="permits"):
            await getattr(clients().semaphore("a"), ask)()


# One name, one kind.


@one_first
@pytest.mark.parametrize("kind", ["plain", "read-write"])
async def test_lock_of_another_kind_is_no_semaphore_with_free_permits(clients: Clients, kind: str) -> None:
    client = clients()
    assert await client.semaphore("a", permits=2).available() == 2
    assert await (client.lock("a") if kind == "plain" else client.read_lock("a")).try_acquire()
    with pytest.raises(dblock.WrongKind, match=f"is a {kind} lock"):
        await client.semaphore("a", permits=2).available()
    if kind == "plain":
        for shared in (client.semaphore("a", permits=2), client.read_lock("a")):
            with pytest.raises(dblock.WrongKind, match="is a plain lock"):
                await shared.holders()


@one_first
async def test_name_has_one_kind(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients()
    makes: dict[str, Callable[[str], Awaitable[Any]]] = {
        "plain": lambda name: client.lock(name).try_acquire(),
        "read-write": lambda name: client.read_lock(name).try_acquire(),
        "semaphore": lambda name: client.semaphore(name, permits=1).try_acquire(),
    }
    waits: dict[str, Callable[[str], Awaitable[Any]]] = {
        "plain": lambda name: client.lock(name).acquire(timeout=5),
        "read-write": lambda name: client.write_lock(name).acquire(timeout=5),
        "semaphore": lambda name: client.semaphore(name, permits=1).acquire(timeout=5),
    }
    for number, (kind, make) in enumerate(makes.items()):
        lease = await make(f"{number}")
        if number % 2:
            await lease.release()  # a free lock keeps its kind, too
        for other in makes.keys() - {kind}:
            for ask in (makes[other], waits[other]):
                with pytest.raises(dblock.WrongKind, match="One name has one kind"):
                    await ask(f"{number}")
        if kind != "plain":
            for ask in (makes["plain"], waits["plain"], makes["semaphore"]):
                with pytest.raises(dblock.WrongKind):
                    await ask(share_of(lease))
    await wait_for_tickets(owner, 0)
