"""Locks and leases as a caller uses them. Each test runs on both kinds of client."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import dblock
from dblock.testing import AsyncMemoryClient
from tests.support.facade import Clients
from tests.support.stages import first


async def test_free_lock_is_granted_with_a_token(clients: Clients, owner: psycopg.Connection) -> None:
    """The token is the time of the database in microseconds, or up to a second less."""
    client = clients()
    began = time.monotonic()
    lease = await client.lock("a").try_acquire()
    assert lease.name == "a"
    (age,) = owner.execute("SELECT date_part('epoch', clock_timestamp()) - %s / 1e6", [lease.token]).fetchone() or ()
    assert 0 <= age < time.monotonic() - began + 1
    trusted, left = 30 * 0.98, lease.remaining()  # a fiftieth is the margin for clocks that run at different speeds
    assert trusted - (time.monotonic() - began) <= left <= trusted


async def test_held_lock_is_refused_to_its_holder_and_to_others(clients: Clients) -> None:
    first, second = clients(), clients()
    assert await first.lock("a").try_acquire()
    assert await second.lock("a").try_acquire() is None
    assert await first.lock("a").try_acquire() is None
    assert await second.lock("b").try_acquire()


async def test_tokens_rise_with_every_grant_of_a_lock(clients: Clients) -> None:
    lock = clients().lock("a")
    tokens = []
    for _ in range(5):
        lease = await lock.acquire()
        tokens.append(lease.token)
        await lease.release()
    assert tokens == sorted(set(tokens))


async def test_release_frees_the_lock_once(clients: Clients) -> None:
    client = clients()
    lease = await client.lock("a").acquire()
    assert await lease.release() is True
    assert await lease.release() is False
    assert lease.remaining() == 0
    assert await client.lock("a").try_acquire()


@pytest.mark.second_stage
async def test_late_release_cannot_free_the_next_holder(clients: Clients) -> None:
    client = clients()
    late = await client.lock("a", ttl=0.1, keep_alive=False).acquire()
    current = await clients().lock("a").acquire(timeout=20)
    assert current.token > late.token
    assert await late.release() is False
    assert (await client.lock("a").holder()).token == current.token


async def test_renew_extends_from_now(clients: Clients) -> None:
    client = clients()
    lease = await client.lock("a", ttl=20).acquire()
    before = lease.expires_at
    await lease.renew()
    assert lease.expires_at > before
    await lease.renew(ttl=timedelta(seconds=60))
    assert 50 < lease.remaining() <= 60
    assert 50 < (await client.lock("a").holder()).remaining <= 60


async def test_renewal_never_revives_an_expired_lease(clients: Clients, owner: psycopg.Connection) -> None:
    lease = await clients().lock("a", ttl=30).acquire()
    owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp()")
    with pytest.raises(dblock.LeaseLost) as caught:
        await lease.renew()
    assert (caught.value.name, caught.value.token) == ("a", lease.token)
    assert lease.remaining() == 0
    assert await clients().lock("a").holder() is None


async def test_renewal_never_revives_a_superseded_lease(clients: Clients, owner: psycopg.Connection) -> None:
    lease = await clients().lock("a").acquire()
    owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp()")
    successor = await clients().lock("a").acquire()
    with pytest.raises(dblock.LeaseLost):
        await lease.renew()
    assert (await clients().lock("a").holder()).token == successor.token


async def test_renewal_never_revives_a_released_lease(clients: Clients) -> None:
    client = clients()
    lease = await client.lock("a").acquire()
    await lease.release()
    with pytest.raises(dblock.LeaseLost):
        await lease.renew()
    assert await client.lock("a").holder() is None


@pytest.mark.second_stage
async def test_lock_is_granted_again_after_its_lease_expired(clients: Clients) -> None:
    lease = await clients().lock("a", ttl=0.2, keep_alive=False).acquire()
    successor = await clients().lock("a").acquire(timeout=20)
    assert successor.token > lease.token


async def test_acquire_waits_until_the_lock_is_released(clients: Clients) -> None:
    holder = await clients().lock("a").acquire()
    waiting = asyncio.ensure_future(clients().lock("a").acquire(timeout=20))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    await holder.release()
    assert (await waiting).token > holder.token


@pytest.mark.second_stage
@pytest.mark.usefixtures("patient")
async def test_acquire_gives_up_after_its_timeout(clients: Clients) -> None:
    await clients().lock("a").acquire()
    started = time.monotonic()
    with pytest.raises(dblock.LockTimeout, match="'a' was not acquired within 0.3 s") as caught:
        await clients().lock("a", timeout=0.3).acquire()
    assert 0.3 <= time.monotonic() - started < 10, "not when the lease ends"
    assert caught.value.timeout == 0.3
    assert isinstance(caught.value, TimeoutError)


@pytest.mark.usefixtures("patient")
async def test_timeout_of_zero_is_a_try(clients: Clients) -> None:
    lease = await clients().lock("a").acquire(timeout=0)
    with pytest.raises(dblock.LockTimeout):
        await clients().lock("a").acquire(timeout=0)
    await lease.release()


async def test_with_block_holds_the_lock_and_releases_it_after(clients: Clients) -> None:
    client = clients()
    async with client.lock("a", ttl=30, timeout=20) as lease:
        assert (await client.lock("a").holder()).token == lease.token
    assert await client.lock("a").holder() is None


async def test_with_block_releases_the_lock_when_the_body_fails(clients: Clients) -> None:
    client = clients()
    with pytest.raises(ZeroDivisionError):
        async with client.lock("a"):
            raise ZeroDivisionError
    assert await client.lock("a").holder() is None


async def test_with_block_raises_lease_lost_when_the_lease_was_lost(
    clients: Clients, owner: psycopg.Connection
) -> None:
    with pytest.raises(dblock.LeaseLost):
        async with clients().lock("a"):
            owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp()")


async def test_lost_lease_does_not_hide_what_the_body_raised(clients: Clients, owner: psycopg.Connection) -> None:
    with pytest.raises(ZeroDivisionError):
        async with clients().lock("a"):
            owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp()")
            raise ZeroDivisionError


async def test_lease_released_in_the_body_is_not_lost(clients: Clients) -> None:
    async with clients().lock("a") as lease:
        assert await lease.release()


async def test_lease_is_a_context_manager_too(clients: Clients) -> None:
    client = clients()
    async with await client.lock("a").acquire() as lease:
        assert (await client.lock("a").holder()).token == lease.token
    assert await client.lock("a").holder() is None


async def test_each_body_under_a_shared_lock_releases_its_own_lease(
    clients: Clients, owner: psycopg.Connection
) -> None:
    """The first body outlives its lease. When it ends, it must not release the lease of the second body."""
    shared = clients().lock("a", timeout=20)
    lost, taken, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    tokens: list[int] = []

    async def first() -> None:
        async with shared as lease:
            tokens.append(lease.token)
            owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp()")
            lost.set()
            await taken.wait()

    async def second() -> int:
        await lost.wait()
        async with shared as lease:
            taken.set()
            await ended.wait()
            holder = await shared.holder()
            assert holder is not None
            assert holder.token == lease.token
            return int(lease.token)

    outliving, next_one = asyncio.ensure_future(first()), asyncio.ensure_future(second())
    with pytest.raises(dblock.LeaseLost):
        await outliving
    ended.set()
    assert await next_one > tokens[0]


async def test_holder_has_name_token_times_and_meta(clients: Clients) -> None:
    client = clients(holder="worker 7", presence=None)  # so that no renewal moves the deadline
    lock = client.lock("a", ttl=20, meta={"job": "close", "items": [1, 2.5, None, "ü"]})
    assert await lock.holder() is None
    lease = await lock.acquire()
    holder = await clients().lock("a").holder()
    assert holder.token == lease.token
    assert holder.holder == "worker 7"
    assert holder.meta == {"job": "close", "items": [1, 2.5, None, "ü"]}
    assert holder.expires_at == lease.expires_at
    assert holder.expires_at - holder.granted_at == timedelta(seconds=20)
    assert 10 < holder.remaining <= 20


@pytest.mark.parametrize("name", first(2, ["a b'c\"d%s\\;--", "ü" * 256, "x", "\n\t", "🔒", "x" * 512]))
async def test_any_text_is_a_name(clients: Clients, name: str) -> None:
    client = clients()
    lease = await client.lock(name).acquire()
    assert lease.name == name
    assert await client.lock(name).try_acquire() is None
    assert await lease.release()


@pytest.mark.parametrize(
    "meta", first(3, [False, {"big": "x" * 8000}, {"\\u0000": "not a NUL"}, {}, [], 0, "", "text"])
)
async def test_any_json_is_a_meta(clients: Clients, meta: Any) -> None:
    client = clients()
    await client.lock("a", meta=meta).acquire()
    assert (await client.lock("a").holder()).meta == meta


async def test_names_that_look_alike_are_different_locks(clients: Clients) -> None:
    client = clients()
    for name in ("a", "A", "a ", "é", "e\u0301"):
        assert await client.lock(name).try_acquire(), name


async def test_a_hundred_acquirers_get_exactly_one_grant(clients: Clients) -> None:
    locks = [clients().lock("a") for _ in range(5)]
    tries = [lock.try_acquire() for lock in locks for _ in range(20)]
    granted = [lease for lease in await asyncio.gather(*tries) if lease]
    assert len(granted) == 1


async def test_closed_client_raises_client_closed(clients: Clients) -> None:
    client = clients()
    lock = client.lock("a")
    await client.close()
    with pytest.raises(dblock.ClientClosed):
        await lock.try_acquire()
    used = clients()
    await used.lock("a").acquire()
    await used.close()
    with pytest.raises(dblock.ClientClosed):
        await used.lock("a").holder()


async def test_callers_beyond_the_pool_size_wait_their_turn(clients: Clients) -> None:
    client = clients(pool_size=2)
    leases = await asyncio.gather(*(client.lock(f"lock {n}").acquire() for n in range(40)))
    assert len({lease.token for lease in leases}) == 40


async def test_many_first_calls_at_once_open_one_client(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients(pool_size=2)
    await asyncio.gather(*(client.lock(str(number)).holder() for number in range(10)))
    count = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'dblock'"
    assert owner.execute(count).fetchone() in ((1,), (2,))


def test_async_client_that_asyncio_does_not_run_says_so(dsn: str) -> None:
    for client in (dblock.AsyncClient(dsn), AsyncMemoryClient()):
        with pytest.raises(dblock.DblockError, match="needs asyncio, .* Under trio"):
            client.lock("a").acquire().send(None)


def test_async_client_belongs_to_one_event_loop(dsn: str) -> None:
    client = dblock.AsyncClient(dsn)

    async def use() -> None:
        await client.lock("a").holder()

    one, other = asyncio.new_event_loop(), asyncio.new_event_loop()
    one.run_until_complete(use())
    with pytest.raises(dblock.DblockError, match="another event loop"):
        other.run_until_complete(use())
    one.run_until_complete(client.close())
    one.close()
    other.close()


def test_body_can_be_left_by_another_thread_than_the_one_that_entered_it(dsn: str) -> None:
    with dblock.Client(dsn) as client, ThreadPoolExecutor(1) as elsewhere:
        alone = client.lock("a")
        alone.__enter__()
        elsewhere.submit(alone.__exit__, None, None, None).result()
        assert alone.holder() is None


@pytest.mark.second_stage
def test_thread_that_entered_no_body_cannot_leave_one(dsn: str) -> None:
    with dblock.Client(dsn) as client, ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        shared = client.lock("a", ttl=0.2, keep_alive=False)
        for entering in (one, other):
            entering.submit(shared.__enter__).result()
        with pytest.raises(dblock.DblockError, match="entered by 2 others"):
            shared.__exit__(None, None, None)


async def test_meta_that_python_cannot_parse_is_returned_as_text(clients: Clients, owner: psycopg.Connection) -> None:
    # Only some versions of Python can parse this many brackets. No version can parse this many digits.
    for meta, shown in (("1" * 5000, "1" * 5000), ("[" * 3000 + "]" * 3000, None)):
        owner.execute("SELECT try_acquire('a', meta => %s)", [meta])
        found = (await clients().lock("a").holder()).meta
        assert found == shown if shown else isinstance(found, (str, list))
        owner.execute("SELECT release('a', token) FROM holder('a')")
