"""A lease over time: kept alive, lost for one of four reasons, told about, left to the end of the program."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

import dblock
from dblock._runtime import shutdown
from tests.support.facade import Clients
from tests.support.forks import run_in_fork
from tests.support.proxy import Proxy
from tests.support.stages import first, sync_first

RUN_OUT = "UPDATE distributed_locks SET expires_at = clock_timestamp()"
TAKE_OVER = RUN_OUT + "; SELECT token FROM try_acquire('a', '1 hour')"
FORCE = "UPDATE distributed_locks SET expires_at = '-infinity', released_at = clock_timestamp()"

LET_GO = "SELECT force_release('a', token) FROM distributed_locks"


async def eventually(true: Callable[[], Any], within: float = 10) -> Any:
    deadline = time.monotonic() + within
    while not (found := true()):
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.01)
    return found


async def test_a_lease_is_kept_alive_for_longer_than_its_ttl(clients: Clients, owner: psycopg.Connection) -> None:
    async with clients().lock("a", ttl=0.3) as lease:
        await asyncio.sleep(1.2)
        assert lease.remaining() > 0
        assert owner.execute("SELECT token FROM holder('a')").fetchone() == (lease.token,)
    assert owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,)


async def test_lease_without_keep_alive_expires(clients: Clients) -> None:
    lease = await clients().lock("a", ttl=0.2, keep_alive=False).acquire()
    await asyncio.sleep(0.25)
    assert lease.lost.is_set()
    assert lease.lost.reason is dblock.Reason.EXPIRED
    assert lease.remaining() == 0
    assert await lease.release() is False


async def test_all_leases_are_renewed_in_one_statement(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients()
    leases = [await client.lock(f"{number}", ttl=1).acquire() for number in range(50)]
    before = owner.execute("SELECT pg_stat_get_xact_function_calls(0), txid_current()").fetchone()
    await asyncio.sleep(1.5)
    after = owner.execute("SELECT pg_stat_get_xact_function_calls(0), txid_current()").fetchone()
    assert all(lease.remaining() > 0 for lease in leases)
    assert before is not None
    assert after is not None
    # Transactions of the whole server: five rounds, and a few more while the leases come to go together.
    assert after[1] - before[1] < 20


async def test_the_keep_alive_has_its_connection_before_it_needs_it(
    clients: Clients, owner: psycopg.Connection
) -> None:
    """A round that began by opening one could be too late where the database is slow to answer."""
    lease = await clients(pool_size=1).lock("a", ttl=600).acquire()
    ours = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'dblock'"
    await eventually(lambda: owner.execute(ours).fetchone() == (3,))  # and the listener's
    await eventually(lambda: not getattr(lease, "_inner", lease)._state.unreachable)


@pytest.mark.parametrize(
    ("happens", "reason"),
    [(RUN_OUT, "expired"), (TAKE_OVER, "superseded"), (FORCE, "forced"), (LET_GO, "forced")],
    ids=str,
)
async def test_the_reason_of_a_loss_is_named(
    clients: Clients, owner: psycopg.Connection, happens: str, reason: str
) -> None:
    lease = await clients().lock("a", ttl=0.6).acquire()
    owner.execute(happens.encode())
    await eventually(lease.lost.is_set)
    assert lease.lost.reason == reason
    assert abs(lease.lost.last_held.timestamp() - time.time()) < 5
    with pytest.raises(dblock.LeaseLost, match=f"{reason}") as lost:
        lease.raise_if_lost()
    assert (lost.value.name, lost.value.token, lost.value.reason) == ("a", lease.token, reason)
    assert await lease.release() is False


async def test_a_database_that_does_not_answer_is_the_reason_too(clients: Clients) -> None:
    with Proxy(clients.dsn) as proxy:
        client = clients(proxy.dsn, patience=1)
        lease = await client.lock("a", ttl=1).acquire()
        proxy.fall_silent()
        started = time.monotonic()
        await eventually(lease.lost.is_set)
        assert time.monotonic() - started < 1.0, "lost only after the database could grant it to another"
        assert lease.lost.reason is dblock.Reason.UNREACHABLE
        proxy.flow()


@sync_first
async def test_a_renewal_whose_answer_is_lost_does_not_lose_the_lease(clients: Clients) -> None:
    with Proxy(clients.dsn) as proxy:
        client = clients(proxy.dsn)
        lease = await client.lock("the lock in question", ttl=0.9).acquire()
        proxy.lose_reply_to(b"the lock in question", times=2)
        await asyncio.sleep(2)
        assert proxy.lost == 2
        assert lease.remaining() > 0
        assert await lease.release() is True


@sync_first
async def test_connections_that_fall_silent_do_not_lose_the_lease(clients: Clients) -> None:
    """Of those that were open nothing is heard any more, and nobody says why; the database is as well as ever."""
    with Proxy(clients.dsn) as proxy:
        lease = await clients(proxy.dsn).lock("a", ttl=3).acquire()
        await asyncio.sleep(0.5)
        assert proxy.lose_servers() > 1
        await asyncio.sleep(3)
        assert not lease.lost.is_set()
        proxy.cut()


@sync_first
async def test_a_pool_that_is_all_busy_does_not_starve_the_keep_alive(clients: Clients) -> None:
    client = clients(pool_size=1, patience=10)
    lease = await client.lock("a", ttl=0.6).acquire()
    with psycopg.connect(clients.dsn) as keeper:
        # Whoever acquires now waits here, with the client's only connection.
        keeper.execute("LOCK TABLE dblock.token_timeline")
        stuck = asyncio.ensure_future(client.lock("b").acquire())
        await asyncio.sleep(1.5)
        assert not stuck.done()
        assert lease.remaining() > 0
    await stuck
    assert await lease.release() is True


async def test_on_lost_is_called_once_with_the_reason_and_not_on_release(
    clients: Clients, owner: psycopg.Connection
) -> None:
    told: list[dblock.LeaseLost] = []
    client = clients()
    lost, released = await client.lock("a", ttl=0.6).acquire(), await client.lock("b", ttl=0.6).acquire()
    lost.on_lost(told.append)
    released.on_lost(told.append)
    await released.release()
    owner.execute(TAKE_OVER.encode())
    await eventually(lambda: told)
    await asyncio.sleep(0.3)
    assert [(error.name, error.reason) for error in told] == [("a", "superseded")]
    late: list[dblock.LeaseLost] = []
    lost.on_lost(late.append)
    await eventually(lambda: late)


async def test_on_lost_comes_by_the_clock_even_when_the_keep_alive_is_stuck(clients: Clients) -> None:
    with Proxy(clients.dsn) as proxy:
        lease = await clients(proxy.dsn, patience=5).lock("a", ttl=0.8).acquire()
        told: list[float] = []
        started = time.monotonic()
        lease.on_lost(lambda error: told.append(time.monotonic() - started))
        proxy.fall_silent()
        await eventually(lambda: told)
        assert 0.3 < told[0] < 0.8
        proxy.flow()


async def test_on_danger_comes_before_the_loss_and_again_after_a_renewal(clients: Clients) -> None:
    lease = await clients().lock("a", ttl=1, keep_alive=False).acquire()
    told: list[float] = []
    lease.on_danger(told.append, before=0.7)
    await eventually(lambda: told)
    assert 0.5 < told[0] <= 0.7
    await lease.renew()
    await eventually(lambda: len(told) == 2)
    assert not lease.lost.is_set()
    await asyncio.sleep(0.1)
    assert len(told) == 2
    for wrong in (0, 1, -1, "soon"):
        with pytest.raises(dblock.InvalidArgument):
            lease.on_danger(told.append, before=wrong)


async def test_exception_in_a_callback_is_only_logged(
    clients: Clients, owner: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    lease = await clients().lock("a", ttl=0.3).acquire()
    told: list[Any] = []
    lease.on_lost(lambda error: 1 / 0)
    lease.on_lost(told.append)
    owner.execute(RUN_OUT)
    await eventually(lambda: told)
    await eventually(lambda: "ZeroDivisionError" in caplog.text)


async def test_a_coroutine_can_be_called_back(dsn: str, owner: psycopg.Connection) -> None:
    async with dblock.AsyncClient(dsn) as client:
        lease = await client.lock("a", ttl=0.3).acquire()
        told = asyncio.Event()

        async def tell(error: dblock.LeaseLost) -> None:
            await asyncio.sleep(0)
            told.set()

        lease.on_lost(tell)
        owner.execute(RUN_OUT)
        await asyncio.wait_for(told.wait(), 5)


def test_a_thread_can_wait_for_the_loss(client: dblock.Client, owner: psycopg.Connection) -> None:
    lease = client.lock("a", ttl=0.6).acquire()
    assert lease.lost.wait(0.05) is False
    threading.Timer(0.1, lambda: owner.execute(RUN_OUT)).start()
    assert lease.lost.wait(5) is True
    other = client.lock("b").acquire()
    threading.Timer(0.1, other.release).start()
    assert other.lost.wait(5) is False, "a release is no loss"


async def test_a_task_can_wait_for_the_loss(dsn: str, owner: psycopg.Connection) -> None:
    async with dblock.AsyncClient(dsn) as client:
        lease = await client.lock("a", ttl=0.6).acquire()
        waiting = asyncio.ensure_future(lease.lost.wait())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        owner.execute(RUN_OUT)
        assert await asyncio.wait_for(waiting, 5) is True
        other = await client.lock("b").acquire()
        waiting = asyncio.ensure_future(other.lost.wait())
        await asyncio.sleep(0)
        await other.release()
        assert await asyncio.wait_for(waiting, 5) is False


async def test_the_body_of_async_with_is_cancelled_and_ends_in_lease_lost(dsn: str, owner: psycopg.Connection) -> None:
    async with dblock.AsyncClient(dsn) as client:
        reached = False
        with pytest.raises(dblock.LeaseLost, match="superseded"):
            async with client.lock("a", ttl=0.3):
                owner.execute(TAKE_OVER.encode())
                await asyncio.sleep(10)
                reached = True
        assert not reached
        task = asyncio.current_task()
        assert task is not None
        if sys.version_info >= (3, 11):
            assert task.cancelling() == 0
        await asyncio.sleep(0.01)


async def test_a_body_that_raises_something_itself_keeps_it(dsn: str, owner: psycopg.Connection) -> None:
    async with dblock.AsyncClient(dsn) as client:
        with pytest.raises(KeyError):
            async with client.lock("a", ttl=0.3):
                owner.execute(RUN_OUT)
                try:
                    await asyncio.sleep(10)
                finally:
                    raise KeyError


async def test_a_body_that_is_cancelled_by_others_is_cancelled(dsn: str, owner: psycopg.Connection) -> None:
    async with dblock.AsyncClient(dsn) as client:

        async def body() -> None:
            async with client.lock("a"):
                await asyncio.sleep(10)

        task = asyncio.ensure_future(body())
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,)


async def test_an_answer_to_acquire_that_comes_too_late_is_given_back(clients: Clients) -> None:
    with Proxy(clients.dsn) as proxy:
        client = clients(proxy.dsn)
        await client.lock("warm").holder()
        proxy.delay = 0.25
        assert await client.lock("a", ttl=0.1).try_acquire() is None
        proxy.delay = 0
        assert await client.lock("a").holder() is None


async def test_a_closed_client_has_released_what_it_held(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients()
    kept, left = await client.lock("a").acquire(), await client.lock("b", keep_alive=False).acquire()
    await client.close()
    for name in "ab":
        assert owner.execute("SELECT count(*) FROM holder(%s)", [name]).fetchone() == (0,)
    assert kept.remaining() == left.remaining() == 0
    assert not kept.lost.is_set()


@sync_first
async def test_close_has_released_the_lease_though_replies_take_over_a_second(
    clients: Clients, owner: psycopg.Connection
) -> None:
    with Proxy(clients.dsn) as proxy:
        client = clients(proxy.dsn)
        await client.lock("a").acquire()
        proxy.delay = 1.2
        await client.close()
        assert owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,)


async def test_a_client_that_is_closed_in_its_event_loop_does_not_block_that(
    dsn: str, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there is to say without an event loop is for clients whose loop is gone."""
    said: list[object] = []
    monkeypatch.setattr(shutdown, "_release_remaining", lambda *whose: said.append(whose))
    client = dblock.AsyncClient(dsn)
    await client.lock("a").acquire()
    await client.close()
    assert owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,)
    assert said == []
    assert not client._shut.alive


async def test_the_bodys_error_comes_before_that_of_a_closed_client(clients: Clients) -> None:
    client = clients()
    with pytest.raises(KeyError):
        async with client.lock("a"):
            await client.close()
            raise KeyError


async def test_a_lease_that_nobody_has_in_hand_warns_and_is_released(
    dsn: str, owner: psycopg.Connection, kept_leases: list[Any]
) -> None:
    def free() -> bool:
        return owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,)

    with dblock.Client(dsn) as client:
        client.lock("a").acquire()
        with pytest.warns(ResourceWarning, match="'a' was never released"):
            forget(kept_leases)
        await eventually(free)
    async with dblock.AsyncClient(dsn) as async_client:
        await async_client.lock("a").acquire()
        with pytest.warns(ResourceWarning, match="'a' was never released"):
            forget(kept_leases)
        await eventually(free)


def forget(leases: list[Any]) -> None:
    leases.clear()
    gc.collect()


SYNC = "import dblock, sys; lease = dblock.Client(sys.argv[1]).lock('a', ttl=600).acquire(); {}"
ASYNC = (
    "import asyncio, dblock, sys\n"
    "async def main():\n"
    "    global lease, client\n"
    "    client = dblock.AsyncClient(sys.argv[1])\n"
    "    lease = await client.lock('a', ttl=600).acquire()\n"
    "    {}\n"
    "asyncio.run(main())"
)


@pytest.mark.parametrize("how", first(1, ["pass", "sys.exit(3)", "1 / 0", "raise KeyboardInterrupt"]))
@pytest.mark.parametrize("script", [SYNC, ASYNC], ids=["sync", "async"])
def test_the_end_of_the_interpreter_releases_what_is_held(
    dsn: str, owner: psycopg.Connection, script: str, how: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script.format(how), dsn], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode == 0) == (how == "pass"), done.stderr
    assert owner.execute("SELECT token FROM distributed_locks WHERE name = 'a'").fetchone() == (1,)
    assert owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,), done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_child_renews_nothing_of_its_parents(dsn: str, owner: psycopg.Connection) -> None:
    """Only the child goes on; the parent is stopped, and so is its keep-alive."""
    script = (
        "import dblock, os, sys, time, signal\n"
        "client = dblock.Client(sys.argv[1])\n"
        "lease = client.lock('a', ttl=0.6).acquire()\n"
        "if os.fork() == 0:\n"
        "    mine = client.lock('b', ttl=0.6).acquire()\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "    time.sleep(1.5)\n"
        "    print(mine.remaining() > 0, lease.remaining(), flush=True)\n"
        "    os._exit(0)\n"
        "time.sleep(30)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, dsn], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout == "True 0.0\n"
    assert owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,)


async def test_looking_at_a_lost_lease_in_the_body_leaves_no_cancellation_behind(dsn: str) -> None:
    async with dblock.AsyncClient(dsn) as client:
        for how in ("raise_if_lost", "own error", "nested"):
            with pytest.raises((dblock.LeaseLost, KeyError)):
                async with client.lock(how, ttl=0.2, keep_alive=False) as lease:
                    time.sleep(0.3)  # noqa: ASYNC251 - the loop is blocked, and no timer rings
                    if how == "own error":
                        lease.remaining()
                        raise KeyError
                    if how == "nested":
                        async with client.lock("inner", ttl=0.2, keep_alive=False) as inner:
                            time.sleep(0.3)  # noqa: ASYNC251
                            inner.raise_if_lost()
                    lease.raise_if_lost()
            for _ in range(3):
                await asyncio.sleep(0)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="counts cancellations")
async def test_a_loss_is_told_as_such_while_the_task_is_being_cancelled(dsn: str, owner: psycopg.Connection) -> None:
    """A cancelled task cleans up under a lock, and that is lost."""
    seen: list[BaseException] = []

    async def work(client: dblock.AsyncClient) -> None:
        try:
            await asyncio.sleep(10)
        finally:
            try:
                async with client.lock("a", ttl=0.3):
                    owner.execute(RUN_OUT)
                    await asyncio.sleep(10)
            except BaseException as error:
                seen.append(error)

    async with dblock.AsyncClient(dsn) as client:
        task = asyncio.ensure_future(work(client))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [type(error) for error in seen] == [dblock.LeaseLost]


async def test_a_worker_thread_may_be_the_first_to_see_the_loss(dsn: str) -> None:
    async with dblock.AsyncClient(dsn) as client:
        told = asyncio.Event()

        async def tell(error: dblock.LeaseLost) -> None:
            told.set()

        def poll(lease: dblock.AsyncLease) -> None:
            with contextlib.suppress(dblock.LeaseLost):
                while True:
                    lease.raise_if_lost()

        started = time.monotonic()
        with pytest.raises(dblock.LeaseLost):
            async with await client.lock("a", ttl=0.3, keep_alive=False).acquire() as lease:
                lease.on_lost(tell)
                await asyncio.gather(asyncio.to_thread(poll, lease), asyncio.sleep(10))
        assert time.monotonic() - started < 5
        await asyncio.wait_for(told.wait(), 5)


def test_a_closed_client_leaves_no_thread(dsn: str) -> None:
    before = threading.active_count()
    for _ in range(10):
        with dblock.Client(dsn) as client:
            lease = client.lock("a").acquire()
            lease.on_lost(lambda error: None)
            lease.release()
    deadline = time.monotonic() + 5
    while threading.active_count() > before:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


async def test_expired_lease_does_not_stay_in_the_renewal_schedule(clients: Clients, kept_leases: list[Any]) -> None:
    client = clients()
    for number in range(5):
        with pytest.raises(dblock.LeaseLost):
            async with client.lock(f"{number}", ttl=0.1, keep_alive=False):
                await asyncio.sleep(0.15)
        with contextlib.suppress(dblock.LeaseLost):
            await client.lock(f"dropped {number}", ttl=0.1, keep_alive=False).acquire()
    await asyncio.sleep(0.2)
    forget(kept_leases)
    await asyncio.sleep(0)
    await client.lock("wakes the keep-alive", ttl=0.3).acquire()
    schedule = getattr(client, "_inner", client)._keepalive.flow.schedule
    await eventually(lambda: len(schedule._states) <= 1)


def test_repeated_waits_for_loss_leave_no_callback_behind(client: dblock.Client) -> None:
    lease = client.lock("a").acquire()
    for _ in range(50):
        assert lease.lost.wait(0) is False
    assert len(lease._state._endings) == 0


async def test_a_client_that_is_closed_while_it_acquires_leaves_no_lock(
    clients: Clients, owner: psycopg.Connection
) -> None:
    with Proxy(clients.dsn) as proxy:
        client = clients(proxy.dsn)
        await client.lock("warm").holder()
        proxy.delay = 0.3
        acquiring = asyncio.ensure_future(client.lock("a", ttl=600).acquire())
        await asyncio.sleep(0.1)
        await client.close()
        with pytest.raises(dblock.ClientClosed):
            await acquiring
        await eventually(lambda: owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,))


async def test_a_closed_client_leaves_no_task_behind(dsn: str) -> None:
    client = dblock.AsyncClient(dsn, presence=None)
    async with client.lock("a"):
        pass
    # Nothing is held, so there is nothing to say that would give the tasks time to end.
    await client.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_keep_alive_is_there_again_after_all_tasks_were_cancelled(dsn: str) -> None:
    async with dblock.AsyncClient(dsn) as client:
        await client.lock("a").acquire()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.05)
        lease = await client.lock("b", ttl=0.4).acquire()
        await asyncio.sleep(1)
        assert lease.remaining() > 0


async def test_a_warning_that_every_renewal_would_set_off_is_refused(clients: Clients) -> None:
    lease = await clients().lock("a", ttl=10).acquire()
    with pytest.raises(dblock.InvalidArgument, match="less than 6 s"):
        lease.on_danger(print, before=7)


async def test_a_body_whose_lock_was_taken_away_ends_in_lease_lost(clients: Clients, owner: psycopg.Connection) -> None:
    """Also before the keep-alive has noticed."""
    with pytest.raises(dblock.LeaseLost, match="forced"):
        async with clients().lock("a") as lease:
            owner.execute("SELECT release('a', %s)", [lease.token])


async def test_forced_holder_keeps_the_lock_until_it_has_released(clients: Clients, owner: psycopg.Connection) -> None:
    """It is told by its next renewal, long before its deadline; and who waits need not wait for that."""
    lease = await clients().lock("a", ttl=6).acquire()
    owner.execute(LET_GO)
    began = time.monotonic()
    await eventually(lambda: lease.lost.is_set())
    assert lease.lost.reason is dblock.Reason.FORCED
    assert owner.execute("SELECT token FROM holder('a')").fetchone() == (lease.token,), "it was not asked to the end"
    assert await lease.release() is False
    await eventually(lambda: owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,))
    assert time.monotonic() - began < 4, "it was free when its deadline had passed, and not before"


def test_concurrent_releases_of_one_lease_succeed_at_most_once(client: dblock.Client) -> None:
    lease = client.lock("a").acquire()
    with ThreadPoolExecutor(8) as threads:
        assert sorted(threads.map(lambda _: lease.release(), range(8)))[:7] == [False] * 7
    assert not lease.lost.is_set()


async def test_callback_that_is_not_callable_is_refused(clients: Clients) -> None:
    lease = await clients().lock("a").acquire()
    for wrong in (None, 5):
        with pytest.raises(dblock.InvalidArgument, match="can be called"):
            lease.on_lost(wrong)
        with pytest.raises(dblock.InvalidArgument, match="can be called"):
            lease.on_danger(wrong, before=1)


def test_parents_lease_in_a_child_is_over_and_not_lost(client: dblock.Client) -> None:
    lease = client.lock("a", ttl=0.2, keep_alive=False).acquire()
    told: list[Any] = []
    lease.on_lost(told.append)

    def body() -> bool:
        time.sleep(0.3)
        return not lease.lost.is_set() and not told

    assert run_in_fork(body) == 0
