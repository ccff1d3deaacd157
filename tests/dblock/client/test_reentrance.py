"""Locks that a thread or task acquires again while it holds them."""

from __future__ import annotations

import asyncio
import math
import os
import random
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

import dblock
import fenced_store
from dblock._runtime.owners import Owner, caller
from tests.support.eventually import eventually, eventually_async
from tests.support.facade import Clients
from tests.support.renewals import TTL
from tests.support.stages import first, sync_first

pytestmark = [pytest.mark.usefixtures("patient")]


def expire(owner: psycopg.Connection) -> None:
    owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp()")


def granted(owner: psycopg.Connection, name: str = "a") -> bool:
    query = "SELECT expires_at > clock_timestamp() FROM distributed_locks WHERE name = %s"
    return bool((owner.execute(query, [name]).fetchone() or [False])[0])


def kept(client: Any) -> int:
    """Return how many leases the client's keep-alive renews."""
    return len(client._runtime.keepalive.flow.schedule._states)


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.parametrize("method", ["acquire", "try_acquire"])
async def test_second_acquire_shares_the_grant_and_sends_nothing(
    clients: Clients, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = clients()
    outer = await client.lock("a", reentrant=True).acquire()
    with monkeypatch.context() as patched:
        patched.setattr(client._runtime, "run", lambda flow: pytest.fail("a statement was sent"))
        inner = await getattr(client.lock("a", reentrant=True), method)()
        assert (inner.token, inner.name) == (outer.token, "a")
        assert inner.remaining() > 0
        assert await inner.release() is True
    assert outer.remaining() > 0
    assert inner.remaining() == 0
    assert await outer.release() is True


@pytest.mark.parametrize("order", first(2, [(0, 1, 2), (2, 0, 1), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 1, 0)]))
async def test_lock_is_released_with_the_last_lease_in_any_order(
    clients: Clients, order: tuple[int, ...], owner: psycopg.Connection
) -> None:
    lock = clients().lock("a", reentrant=True)
    leases = [await lock.acquire() for _ in range(3)]
    for index in order:
        assert granted(owner)
        assert await leases[index].release() is True
    assert not granted(owner)


@sync_first
async def test_lease_that_is_released_twice_counts_once(clients: Clients, owner: psycopg.Connection) -> None:
    lock = clients().lock("a", reentrant=True)
    outer, inner = await lock.acquire(), await lock.acquire()
    assert await inner.release() is True
    assert await inner.release() is False
    assert granted(owner)
    assert outer.remaining() > 0
    assert await outer.release() is True
    assert await outer.release() is False


async def test_nested_bodies_release_at_the_end_of_the_outermost(clients: Clients, owner: psycopg.Connection) -> None:
    lock = clients().lock("a", reentrant=True)
    async with lock as outer:
        async with lock as inner:
            assert inner.token == outer.token
        assert granted(owner)
        with pytest.raises(dblock.LeaseLost) as caught:
            inner.raise_if_lost()
        assert caught.value.reason == "over"
    assert not granted(owner)


@pytest.mark.parametrize("times", [20, pytest.param(200, marks=pytest.mark.second_stage)])
async def test_many_acquires_leave_no_renewal_and_no_row(
    clients: Clients, times: int, owner: psycopg.Connection
) -> None:
    """Others have left one renewal behind for each acquire but the last."""
    client = clients()
    leases = [await client.lock("a", reentrant=True).acquire() for _ in range(times)]
    assert kept(client) == 1
    for lease in leases:
        await lease.release()
    assert kept(client) == 0
    assert not granted(owner)
    again = await client.lock("a", reentrant=True).acquire()
    assert again.token > leases[0].token
    await again.release()


@sync_first
async def test_inner_ttl_never_shortens_the_outer_lease(clients: Clients) -> None:
    client = clients()
    outer = await client.lock("a", ttl=60, reentrant=True).acquire()
    inner = await client.lock("a", ttl=10, reentrant=True).acquire()
    assert outer.remaining() > 40
    await inner.renew()
    await inner.renew(ttl=10)
    assert outer.ttl == inner.ttl == 60
    assert outer.remaining() > 40
    await inner.release()
    assert outer.ttl == 60


@pytest.mark.second_stage
@sync_first
async def test_longer_inner_ttl_extends_the_lease_at_the_next_renewal(clients: Clients) -> None:
    client = clients()
    outer = await client.lock("a", ttl=TTL, reentrant=True).acquire()
    inner = await client.lock("a", ttl=60, reentrant=True).acquire()
    await eventually_async(lambda: outer.remaining() > 3 * TTL)
    await inner.release()
    assert outer.ttl == TTL
    assert outer.remaining() > 3 * TTL


@pytest.mark.second_stage
async def test_inner_lease_is_kept_alive_though_the_outer_one_is_not(clients: Clients) -> None:
    """The keep-alive sleeps without end while it has nothing to renew, so the inner acquire must wake it."""
    client = clients(presence=None)
    outer = await client.lock("a", ttl=TTL, keep_alive=False, reentrant=True).acquire()
    before = outer.expires_at
    flow = client._runtime.keepalive.flow
    for _ in range(2):  # for an instant it looks so before each sleep
        await eventually_async(lambda: not flow._in_use and flow._asleep_until == math.inf)
        await asyncio.sleep(0.1)
    inner = await client.lock("a", ttl=TTL, reentrant=True).acquire()
    await eventually_async(lambda: inner.expires_at > before)
    assert inner.remaining() > 0
    await inner.release()


async def test_lost_grant_is_never_returned_again(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients()
    outer = await client.lock("a", reentrant=True).acquire()
    inner = await client.lock("a", reentrant=True).acquire()
    expire(owner)
    with pytest.raises(dblock.LeaseLost):
        await outer.renew()
    assert inner.lost.is_set()
    assert inner.lost.reason == outer.lost.reason == dblock.Reason.EXPIRED
    later = await client.lock("a", reentrant=True).acquire(timeout=20)
    assert later.token > outer.token
    assert await inner.release() is False
    assert await outer.release() is False
    assert granted(owner), "the release of a lost lease has freed the next grant"
    again = await client.lock("a", reentrant=True).acquire()
    assert again.token == later.token


@sync_first
async def test_every_lease_reports_the_loss_to_its_callbacks(clients: Clients, owner: psycopg.Connection) -> None:
    lock = clients().lock("a", reentrant=True)
    outer, inner, early = await lock.acquire(), await lock.acquire(), await lock.acquire()
    called: list[str] = []
    for name, lease in (("outer", outer), ("inner", inner), ("early", early)):
        lease.on_lost(lambda error, name=name: called.append(f"{name} {error.reason}"))
    await early.release()
    expire(owner)
    with pytest.raises(dblock.LeaseLost):
        await inner.renew()
    await eventually_async(lambda: len(called) == 2)
    assert sorted(called) == ["inner expired", "outer expired"]


async def test_body_with_a_lost_inner_lease_raises_at_its_end(clients: Clients, owner: psycopg.Connection) -> None:
    lock = clients().lock("a", reentrant=True)
    caught = []
    with pytest.raises(dblock.LeaseLost):
        async with lock:
            try:
                async with lock as inner:
                    expire(owner)
                    with pytest.raises(dblock.LeaseLost):
                        await inner.renew()
                    await asyncio.sleep(0)
            except dblock.LeaseLost as error:
                caught.append(error)
    assert [error.reason for error in caught] == ["expired"]


async def test_loss_cancels_nested_bodies_from_the_inside_out(dsn: str, owner: psycopg.Connection) -> None:
    seen: list[str] = []
    async with dblock.AsyncClient(dsn) as client:
        lock = client.lock("a", reentrant=True)
        with pytest.raises(dblock.LeaseLost):
            async with lock:
                try:
                    async with lock as inner:
                        inner._grant.lose(dblock.Reason.FORCED)
                        try:
                            await asyncio.sleep(20)
                        except asyncio.CancelledError:
                            seen.append("inner body cancelled")
                            raise
                except dblock.LeaseLost:
                    seen.append("inner lease lost")
                try:
                    await asyncio.sleep(20)
                except asyncio.CancelledError:
                    seen.append("outer body cancelled")
                    raise
        task = asyncio.current_task()
        assert task is not None
        assert not hasattr(task, "cancelling") or task.cancelling() == 0
        await asyncio.sleep(0)
    assert seen == ["inner body cancelled", "inner lease lost", "outer body cancelled"]


async def test_cancellation_from_outside_passes_through_nested_bodies(dsn: str, owner: psycopg.Connection) -> None:
    async with dblock.AsyncClient(dsn) as client:
        lock = client.lock("a", reentrant=True)
        entered = asyncio.Event()

        async def work() -> None:
            async with lock, lock:
                entered.set()
                await asyncio.sleep(20)

        task = asyncio.create_task(work())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not granted(owner)


@sync_first
async def test_two_clients_do_not_share(clients: Clients) -> None:
    client, other = clients(), clients()
    lease = await client.lock("a", reentrant=True).acquire()
    assert await other.lock("a", reentrant=True).try_acquire() is None
    assert (await client.lock("b", reentrant=True).acquire()).token != lease.token


@sync_first
async def test_plain_lock_waits_for_a_reentrant_one_and_the_reverse(
    clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    client = clients()
    for outer, inner in ((True, False), (False, True), (False, False)):
        caplog.clear()
        held = await client.lock("a", reentrant=outer).acquire()
        with pytest.raises(dblock.LockTimeout, match="reentrant=True") as caught:
            await client.lock("a", reentrant=inner).acquire(timeout=0.01)
        assert caught.value.own_token == held.token
        assert [message for message in caplog.messages if "already holds lock 'a'" in message]
        assert await client.lock("a", reentrant=inner).try_acquire() is None
        await held.release()


@pytest.mark.parametrize("tasks", [5, pytest.param(100, marks=pytest.mark.second_stage)])
async def test_tasks_of_one_loop_never_share(dsn: str, tasks: int) -> None:
    """Others kept the token in a thread-local, which all tasks of a loop have in common.

    Each task acquires while the one before it is inside.
    """
    inside = 0
    tokens: list[int] = []
    entered = [asyncio.Event() for _ in range(tasks + 1)]
    entered[0].set()

    async def work(lock: Any, number: int) -> None:
        nonlocal inside
        await entered[number].wait()
        async with lock as outer:
            inside += 1
            assert inside == 1, "two tasks are inside"
            entered[number + 1].set()
            for _ in range(3):
                await asyncio.sleep(0)
            async with lock as inner:
                assert inner.token == outer.token
                await asyncio.sleep(0)
            tokens.append(outer.token)
            inside -= 1

    async with dblock.AsyncClient(dsn) as client:
        shared = client.lock("a", reentrant=True)
        await asyncio.gather(*(work(shared, number) for number in range(tasks)))
        assert len(set(tokens)) == tasks
        assert kept(client) == 0


async def test_child_task_is_another_owner(dsn: str) -> None:
    """A child task inherits the context variables of its parent, and must not inherit the lock."""
    async with dblock.AsyncClient(dsn) as client:
        lock = client.lock("a", reentrant=True)
        async with lock as lease:
            assert await asyncio.create_task(lock.try_acquire()) is None
            assert not any(await asyncio.gather(lock.try_acquire(), lock.try_acquire()))
            again = await lock.acquire()
            assert again.token == lease.token
            await again.release()


async def test_tasks_that_use_a_synchronous_client_do_not_share(client: dblock.Client) -> None:
    """They run in one thread."""
    lock = client.lock("a", reentrant=True)

    async def again() -> Any:
        return lock.try_acquire()

    with lock as lease:
        assert await asyncio.create_task(again()) is None
        inner = await again()
        assert inner.token == lease.token
        inner.release()


def test_threads_do_not_share(client: dblock.Client) -> None:
    lock = client.lock("a", reentrant=True)
    with lock:
        assert in_thread(lock.try_acquire) is None


def test_thread_with_the_number_of_an_ended_one_does_not_share(client: dblock.Client) -> None:
    lock = client.lock("a", reentrant=True)
    taken: list[Any] = []

    def take() -> None:
        taken.append((threading.get_ident(), lock.try_acquire()))

    for _ in range(200):
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        if taken[-1][0] == taken[0][0] and len(taken) > 1:
            break
    else:
        pytest.skip("this system does not use the numbers of threads again")
    assert taken[0][1] is not None
    assert [lease for _, lease in taken[1:] if lease] == []


def test_lease_can_be_released_in_another_thread(client: dblock.Client, owner: psycopg.Connection) -> None:
    lock = client.lock("a", reentrant=True)
    outer, inner = lock.acquire(), lock.acquire()
    assert in_thread(inner.release) is True
    assert granted(owner)
    assert in_thread(outer.release) is True
    assert not granted(owner)
    lock.acquire(timeout=20).release()


def test_lease_that_joins_while_another_thread_releases_the_last_one_is_held(client: dblock.Client) -> None:
    """The last lease is released in another thread while the owner acquires again: either comes first."""
    lock = client.lock("a", reentrant=True)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(20):
            releasing = pool.submit(lock.acquire().release)
            inner = lock.acquire(timeout=20)
            assert releasing.result() is True
            assert inner.remaining() > 0
            assert client.lock("a").holder() is not None
            assert inner.release() is True
    assert kept(client) == 0


@pytest.mark.second_stage
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_child_of_a_fork_does_not_share(client: dblock.Client, owner: psycopg.Connection) -> None:
    lock = client.lock("a", reentrant=True)
    with lock as outer:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            code = 1
            try:
                shared = lock.try_acquire()
                outer.release()
                code = 0 if shared is None and outer.remaining() == 0 else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert granted(owner)
        assert outer.remaining() > 0


def test_forgotten_inner_lease_does_not_release_the_outer(
    client: dblock.Client, kept_leases: list[Any], owner: psycopg.Connection
) -> None:
    lock = client.lock("a", reentrant=True)
    outer, inner = lock.acquire(), lock.acquire()
    kept_leases.clear()
    with pytest.warns(ResourceWarning, match="never released"):
        del inner
    assert outer.remaining() > 0
    assert outer.release() is True
    assert not granted(owner)


async def test_forgotten_last_lease_releases_the_lock(
    client: dblock.Client, kept_leases: list[Any], owner: psycopg.Connection
) -> None:
    lock = client.lock("a", ttl=600, reentrant=True)
    outer, inner = lock.acquire(), lock.acquire()
    outer.release()
    kept_leases.clear()
    with pytest.warns(ResourceWarning, match="never released"):
        del inner
    await eventually_async(lambda: not granted(owner))
    lock.acquire(timeout=20).release()


def test_interrupted_inner_acquire_does_not_count(client: dblock.Client, owner: psycopg.Connection) -> None:
    outer = client.lock("a", reentrant=True).acquire()
    interrupted = client.lock("a", reentrant=True)

    def interrupt(runtime: Any, state: Any) -> Any:
        raise KeyboardInterrupt

    interrupted._kind = interrupt
    with pytest.raises(KeyboardInterrupt):
        interrupted.acquire()
    assert outer.remaining() > 0
    assert outer.release() is True
    assert not granted(owner)


@sync_first
async def test_closed_client_ends_every_lease(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients()
    lock = client.lock("a", reentrant=True)
    outer, inner = await lock.acquire(), await lock.acquire()
    await client.close()
    assert outer.remaining() == inner.remaining() == 0
    assert not granted(owner)
    with pytest.raises(dblock.ClientClosed):
        await lock.acquire()


@sync_first
async def test_inner_acquire_cannot_claim_what_the_grant_has_not(clients: Clients) -> None:
    client = clients()
    outer = await client.lock("a", claims=["x"], reentrant=True).acquire()
    inner = await client.lock("a", claims=["x"], reentrant=True).acquire()
    for method in ("acquire", "try_acquire"):
        with pytest.raises(dblock.InvalidArgument, match="has not claimed 'y'"):
            await getattr(client.lock("a", claims=["x", "y"], reentrant=True), method)()
    assert await inner.release()
    assert await outer.release()
    assert await client.lock("a", claims=["x", "y"], reentrant=True).try_acquire()


@pytest.mark.second_stage
@pytest.mark.parametrize("method", ["acquire", "try_acquire"])
def test_inner_acquire_claims_in_other_databases(client: dblock.Client, dsn: str, method: str) -> None:
    with fenced_store.FencedStore(dsn) as store, client.lock("a", reentrant=True) as outer:
        store.put("x", b"1", fence=outer)
        with getattr(client.lock("a", claims=[store.claims("x", "y")], reentrant=True), method)() as inner:
            store.put("x", b"2", fence=inner)
        with pytest.raises(fenced_store.StaleTokenError):
            store.put("y", b"late", fence=outer.token - 1)


@pytest.mark.parametrize("rolls_back", first(1, [True, False]))
def test_release_in_on_an_inner_lease_leaves_the_outer_one(
    client: dblock.Client, dsn: str, rolls_back: bool, owner: psycopg.Connection
) -> None:
    lock = client.lock("a", reentrant=True)
    outer, inner = lock.acquire(), lock.acquire()
    with psycopg.connect(dsn) as connection:
        inner.assert_held(connection)
        inner.release_in(connection)
        assert inner.remaining() == 0
        assert outer.remaining() > 0
        if rolls_back:
            connection.rollback()
    assert inner.release() is False
    assert granted(owner)
    outer.renew()
    with psycopg.connect(dsn) as connection:
        outer.release_in(connection)
        if rolls_back:
            connection.rollback()
    assert granted(owner) is rolls_back
    if rolls_back:
        outer.renew()
        again = lock.acquire(timeout=20)
        assert again.token == outer.token, "the grant was held again after the rollback"
        assert again.release()
    assert outer.release() is True
    assert not granted(owner)


async def test_release_in_of_a_task_on_an_inner_lease_leaves_the_outer_one(dsn: str, owner: psycopg.Connection) -> None:
    async with dblock.AsyncClient(dsn) as client:
        lock = client.lock("a", reentrant=True)
        outer, inner = await lock.acquire(), await lock.acquire()
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            await inner.assert_held(connection)
            await inner.release_in(connection)
        assert granted(owner)
        assert outer.remaining() > 0
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            await outer.release_in(connection)
        assert not granted(owner)


def test_release_in_of_a_lost_inner_lease_raises_with_the_reason(
    client: dblock.Client, dsn: str, owner: psycopg.Connection
) -> None:
    lock = client.lock("a", reentrant=True)
    outer, inner = lock.acquire(), lock.acquire()
    expire(owner)
    with psycopg.connect(dsn) as connection, pytest.raises(dblock.LeaseLost) as caught:
        inner.release_in(connection)
    assert caught.value.reason == outer.lost.reason == inner.lost.reason == "expired"


@sync_first
async def test_released_inner_lease_is_over_in_every_respect(clients: Clients) -> None:
    lock = clients().lock("a", reentrant=True)
    outer, inner = await lock.acquire(), await lock.acquire()
    await inner.release()
    assert "over" in repr(inner)
    assert not inner.lost.is_set()
    assert inner.lost.reason is None
    for call in (inner.renew, inner.raise_if_lost):
        with pytest.raises(dblock.LeaseLost) as caught:
            result = call()
            if result is not None:
                await result
        assert caught.value.reason == "over"
    assert f"token {outer.token}" in repr(outer)
    await outer.renew(ttl=40)
    assert outer.ttl == 40


async def test_wait_for_the_loss_of_an_inner_lease_ends_with_its_release(dsn: str) -> None:
    async with dblock.AsyncClient(dsn) as client:
        lock = client.lock("a", reentrant=True)
        outer, inner = await lock.acquire(), await lock.acquire()
        waiting = [asyncio.create_task(lease.lost.wait()) for lease in (inner, outer)]
        await asyncio.sleep(0)
        await inner.release()
        assert await waiting[0] is False
        assert not waiting[1].done()
        outer._grant.lose(dblock.Reason.FORCED)
        assert await waiting[1] is True


def test_wait_of_a_thread_for_the_loss_of_an_inner_lease_ends_with_its_release(client: dblock.Client) -> None:
    lock = client.lock("a", reentrant=True)
    outer, inner = lock.acquire(), lock.acquire()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(lease.lost.wait) for lease in (inner, outer)]
        inner.release()
        assert waiting[0].result(20) is False
        assert not waiting[1].done()
        outer._grant.lose(dblock.Reason.FORCED)
        assert waiting[1].result(20) is True


@pytest.mark.second_stage
def test_inner_lease_warns_of_danger_until_it_is_released(client: dblock.Client) -> None:
    lock = client.lock("a", ttl=1.5, keep_alive=False, reentrant=True)
    outer, inner = lock.acquire(), lock.acquire()
    called: list[str] = []
    outer.on_danger(lambda left: called.append("outer"), before=1.2)
    inner.on_danger(lambda left: called.append("inner"), before=1.2)
    inner.release()
    assert outer.lost.wait(20)
    eventually(lambda: "outer" in called, "the outer lease has warned")


def test_assert_locked_knows_what_the_thread_holds(client: dblock.Client, dsn: str) -> None:
    with pytest.raises(dblock.NotLocked, match="Lock 'a' is not held") as caught:
        dblock.assert_locked("a")
    assert caught.value.name == "a"
    with client.lock("a"):
        dblock.assert_locked("a")
        with pytest.raises(dblock.NotLocked):
            dblock.assert_locked("b")
        with dblock.Client(dsn) as other, other.efficiency_lock("b"):
            dblock.assert_locked("b")
        with pytest.raises(dblock.NotLocked):
            dblock.assert_locked("b")
        with pytest.raises(dblock.NotLocked):
            in_thread(lambda: dblock.assert_locked("a"))
    with pytest.raises(dblock.NotLocked):
        dblock.assert_locked("a")
    with pytest.raises(dblock.InvalidArgument):
        dblock.assert_locked("")


def test_assert_locked_knows_every_kind_of_lock(client: dblock.Client) -> None:
    with client.write_lock("rows") as written:
        dblock.assert_locked("rows")
        with written.downgrade():
            dblock.assert_locked("rows")
    with client.semaphore("gpus", permits=2):
        dblock.assert_locked("gpus")
    with client.lock_all(["b", "a"]):
        dblock.assert_locked("a")
        dblock.assert_locked("b")
    with client.lock_any(["a", "b"]) as lease:
        dblock.assert_locked(lease.name)
    for name in ("rows", "gpus", "a", "b"):
        with pytest.raises(dblock.NotLocked):
            dblock.assert_locked(name)


def test_assert_locked_sends_nothing(client: dblock.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    with client.lock("a"), monkeypatch.context() as patched:
        patched.setattr(client._runtime, "run", lambda flow: pytest.fail("a statement was sent"))
        dblock.assert_locked("a")


@pytest.mark.second_stage
def test_assert_locked_refuses_a_lost_lease(client: dblock.Client, owner: psycopg.Connection) -> None:
    lease = client.lock("a", ttl=0.1, keep_alive=False).acquire()
    time.sleep(0.12)
    with pytest.raises(dblock.NotLocked):
        dblock.assert_locked("a")
    assert not lease.release()


def test_assert_locked_counts_reentrant_leases(client: dblock.Client) -> None:
    lock = client.lock("a", reentrant=True)
    outer, inner = lock.acquire(), lock.acquire()
    outer.release()
    dblock.assert_locked("a")
    inner.release()
    with pytest.raises(dblock.NotLocked):
        dblock.assert_locked("a")


async def test_assert_locked_tells_tasks_apart(dsn: str) -> None:
    async def check() -> None:
        dblock.assert_locked("a")

    async with dblock.AsyncClient(dsn) as client, client.lock("a"):
        await check()
        with pytest.raises(dblock.NotLocked, match="child task"):
            await asyncio.create_task(check())
        with pytest.raises(dblock.NotLocked):
            await asyncio.to_thread(dblock.assert_locked, "a")


@sync_first
async def test_nothing_is_recorded_of_leases_that_have_ended(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients()
    owners = [caller() if isinstance(client, dblock.AsyncClient) else await client._run(caller)]
    for options in ({}, {"reentrant": True}):
        async with client.lock("a", **options):
            assert len(owners[0].leases()) == 1
        lease = await client.lock("b", **options).acquire()
        expire(owner)
        with pytest.raises(dblock.LeaseLost):
            await lease.renew()
        assert not owners[0]._leases


def test_owner_neither_uses_nor_changes_the_random_numbers_of_the_program() -> None:
    """Workers that seed `random` with the same constant would otherwise pass for each other."""
    numbers = set()
    for _ in range(2):
        random.seed(7)
        numbers.add(Owner().number)
        after = random.random()
        random.seed(7)
        assert random.random() == after
    assert len(numbers) == 2
