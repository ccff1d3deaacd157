"""A lease over time: renewal, loss for one of four reasons, callbacks, and release at the end of the program."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

import dblock
from dblock._core.effects import Call
from dblock._runtime import shutdown
from dblock._runtime.keepalive import KeepAlive
from dblock._runtime.pool import AsyncPool
from dblock._runtime.runner import AsyncRunner
from tests.support.closing import closing_before
from tests.support.eventually import eventually, eventually_async
from tests.support.facade import Clients
from tests.support.forks import run_in_fork
from tests.support.proxy import Proxy
from tests.support.renewals import TTL, renewed
from tests.support.sessions import Sessions, hold_first_grant
from tests.support.stages import first, sync_first

EXPIRE = "UPDATE distributed_locks SET expires_at = clock_timestamp()"
TAKE_OVER = EXPIRE + "; SELECT token FROM try_acquire('a', '1 hour')"
FREE_ROW = "UPDATE distributed_locks SET expires_at = '-infinity', released_at = clock_timestamp()"

SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'dblock'"
"""A client whose leases have no presence has two: the listener's, and one of its pool until that was idle for 5 s."""

FORCE_RELEASE = "SELECT force_release('a', token) FROM distributed_locks"


@pytest.mark.second_stage
@sync_first
async def test_lease_is_kept_alive_for_longer_than_its_ttl(clients: Clients, owner: psycopg.Connection) -> None:
    lease = await clients().lock("a", ttl=TTL).acquire()
    await renewed(lease)
    assert owner.execute("SELECT token FROM holder('a')").fetchone() == (lease.token,)
    assert await lease.release()
    assert owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,)


async def second_connection(client: Any) -> None:
    """Wait until the keep-alive has a connection beside the listener's."""
    runtime = getattr(client, "_inner", client)._runtime
    await eventually_async(lambda: runtime.listener is not None and runtime.listener._keepalive_runner._pool.has_idle)


@pytest.mark.second_stage
async def test_lease_without_keep_alive_expires(clients: Clients) -> None:
    lease = await clients().lock("a", ttl=0.2, keep_alive=False).acquire()
    await asyncio.sleep(0.25)
    assert lease.lost.is_set()
    assert lease.lost.reason is dblock.Reason.EXPIRED
    assert lease.remaining() == 0
    assert await lease.release() is False


@sync_first
@pytest.mark.second_stage
async def test_all_leases_are_renewed_in_one_statement(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients(presence=None)  # so that every renewal was due
    leases = [await client.lock(f"{number}", ttl=TTL).acquire() for number in range(50)]
    before = owner.execute("SELECT txid_current()").fetchone()
    await asyncio.gather(*map(renewed, leases))
    after = owner.execute("SELECT txid_current()").fetchone()
    assert before is not None
    assert after is not None
    # Transactions of the whole server: a few until all leases are renewed together.
    assert after[0] - before[0] < 20


async def test_keep_alive_connects_before_the_first_renewal_is_due(clients: Clients) -> None:
    """If the database is slow to reply, a renewal that first had to open a connection could be too late."""
    client = clients(pool_size=1, presence=0.5)
    lease = await client.lock("a", ttl=600).acquire()
    await second_connection(client)
    await eventually_async(lambda: not getattr(lease, "_inner", lease)._state.unreachable)


@pytest.mark.second_stage
async def test_reason_of_a_loss_is_named(clients: Clients, owner: psycopg.Connection) -> None:
    losses = {
        "a": (EXPIRE + " WHERE name = 'a'", "expired"),
        "b": (EXPIRE + " WHERE name = 'b'; SELECT token FROM try_acquire('b', '1 hour')", "superseded"),
        "c": (FREE_ROW + " WHERE name = 'c'", "forced"),
        "d": ("SELECT force_release('d', token) FROM distributed_locks WHERE name = 'd'", "forced"),
    }
    client, began = clients(), time.time()
    leases = {name: await client.lock(name, ttl=TTL).acquire() for name in losses}
    for happens, _ in losses.values():
        owner.execute(happens.encode())
    for name, (_, reason) in losses.items():
        lease = leases[name]
        await eventually_async(lease.lost.is_set)
        assert lease.lost.reason == reason, name
        assert began - 0.1 < lease.lost.last_held.timestamp() < time.time()
        with pytest.raises(dblock.LeaseLost, match=f"{reason}") as lost:
            lease.raise_if_lost()
        assert (lost.value.name, lost.value.token, lost.value.reason) == (name, lease.token, reason)
        assert await lease.release() is False


@sync_first
@pytest.mark.second_stage
async def test_lease_is_lost_as_unreachable_before_the_database_can_grant_it_again(clients: Clients) -> None:
    with Proxy(clients.dsn) as proxy:
        client = clients(proxy.dsn, patience=1)
        lease = await client.lock("a", ttl=3).acquire()
        proxy.fall_silent()
        started = last_trusted = looked = time.monotonic()
        while not lease.lost.is_set():
            last_trusted = looked
            await asyncio.sleep(0.005)
            looked = time.monotonic()
        assert last_trusted < started + 3.0, "the database could already grant the lock to another holder"
        assert lease.lost.reason is dblock.Reason.UNREACHABLE
        proxy.flow()


@sync_first
@pytest.mark.second_stage
async def test_renewal_whose_reply_is_lost_does_not_lose_the_lease(clients: Clients) -> None:
    with Proxy(clients.dsn) as proxy:
        client = clients(proxy.dsn)
        lease = await client.lock("the lock in question", ttl=TTL).acquire()
        proxy.lose_reply_to(b"the lock in question", times=2)
        await renewed(lease)
        await eventually_async(lambda: proxy.lost == 2)
        assert await lease.release()


@pytest.mark.second_stage
async def test_connections_that_fall_silent_do_not_lose_the_lease(clients: Clients, owner: psycopg.Connection) -> None:
    """The open connections stop responding without an error, while the database still accepts new connections."""
    with Proxy(clients.dsn) as proxy:
        lease = await clients(proxy.dsn).lock("a", ttl=9).acquire()
        await eventually_async(lambda: owner.execute(SESSIONS).fetchone() == (2,))
        before = lease.expires_at
        assert proxy.lose_servers() > 1
        # The first renewal is given up after 6 s, which leaves 3 s for the next one.
        await eventually_async(lambda: lease.lost.is_set() or lease.expires_at > before)
        assert not lease.lost.is_set()
        proxy.cut()


@sync_first
@pytest.mark.second_stage
async def test_exhausted_pool_does_not_starve_the_keep_alive(clients: Clients, sessions: Sessions) -> None:
    client = clients(pool_size=1, patience=30)
    lease = await client.lock("a", ttl=TTL).acquire()
    with psycopg.connect(clients.dsn) as keeper:
        # An acquire now waits for this session, with the only connection of the client's pool.
        hold_first_grant(keeper, "b")
        stuck = asyncio.ensure_future(client.lock("b").acquire())
        await asyncio.to_thread(sessions.wait_until_a_session_waits)
        await renewed(lease)
        assert not stuck.done()
    await stuck
    assert await lease.release()


@pytest.mark.second_stage
async def test_on_lost_is_called_once_with_the_reason_and_not_on_release(
    clients: Clients, owner: psycopg.Connection
) -> None:
    calls: list[dblock.LeaseLost] = []
    client = clients()
    lost, released = await client.lock("a", ttl=4).acquire(), await client.lock("b", ttl=4).acquire()
    lost.on_lost(calls.append)
    released.on_lost(calls.append)
    await released.release()
    owner.execute(TAKE_OVER.encode())
    await eventually_async(lambda: calls)
    await asyncio.sleep(0.3)
    assert [(error.name, error.reason) for error in calls] == [("a", "superseded")]
    late: list[dblock.LeaseLost] = []
    lost.on_lost(late.append)
    await eventually_async(lambda: late)


@pytest.mark.second_stage
async def test_on_lost_is_called_on_time_even_when_the_keep_alive_is_stuck(clients: Clients) -> None:
    """The keep-alive is stuck for five seconds: so long it waits for a new connection."""
    with Proxy(clients.dsn) as proxy:
        lease = await clients(proxy.dsn, patience=5).lock("a", ttl=0.8).acquire()
        calls: list[float] = []
        started, left = time.monotonic(), lease.remaining()
        lease.on_lost(lambda error: calls.append(time.monotonic() - started))
        proxy.fall_silent()
        await eventually_async(lambda: calls)
        assert left - 0.1 < calls[0] < 0.8 + 3
        proxy.flow()


@sync_first
@pytest.mark.second_stage
async def test_on_danger_is_called_before_the_loss_and_again_after_a_renewal(clients: Clients) -> None:
    """The lease lasts longer than a busy machine is late. The second call comes half of `before` after the first."""
    ttl, before = 6.0, 5.5
    lease = await clients().lock("a", ttl=ttl, keep_alive=False).acquire()
    calls: list[float] = []
    due = min(before, lease.remaining())
    lease.on_danger(calls.append, before=before)
    await eventually_async(lambda: calls)
    assert due - 2.2 < calls[0] <= before
    await lease.renew()
    await eventually_async(lambda: len(calls) == 2)
    assert not lease.lost.is_set()
    await asyncio.sleep(0.1)
    assert len(calls) == 2
    for wrong in (0, ttl, -1, "soon"):
        with pytest.raises(dblock.InvalidArgument):
            lease.on_danger(calls.append, before=wrong)


@pytest.mark.second_stage
async def test_exception_in_a_callback_is_only_logged(
    clients: Clients, owner: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    lease = await clients().lock("a", ttl=0.3).acquire()
    calls: list[Any] = []
    lease.on_lost(lambda error: 1 / 0)
    lease.on_lost(calls.append)
    owner.execute(EXPIRE)
    await eventually_async(lambda: calls)
    await eventually_async(lambda: "ZeroDivisionError" in caplog.text)


@pytest.mark.second_stage
async def test_coroutine_can_be_called_back(dsn: str, owner: psycopg.Connection) -> None:
    async with dblock.AsyncClient(dsn) as client:
        lease = await client.lock("a", ttl=0.3).acquire()
        called = asyncio.Event()

        async def callback(error: dblock.LeaseLost) -> None:
            await asyncio.sleep(0)
            called.set()

        lease.on_lost(callback)
        owner.execute(EXPIRE)
        await asyncio.wait_for(called.wait(), 20)


@pytest.mark.second_stage
def test_thread_can_wait_for_the_loss(client: dblock.Client, owner: psycopg.Connection) -> None:
    lease = client.lock("a", ttl=3).acquire()
    assert lease.lost.wait(0.05) is False
    threading.Timer(0.1, lambda: owner.execute(EXPIRE)).start()
    assert lease.lost.wait(20) is True
    other = client.lock("b").acquire()
    threading.Timer(0.1, other.release).start()
    assert other.lost.wait(5) is False, "a release is not a loss"


@pytest.mark.second_stage
async def test_task_can_wait_for_the_loss(dsn: str, owner: psycopg.Connection) -> None:
    async with dblock.AsyncClient(dsn) as client:
        lease = await client.lock("a", ttl=3).acquire()
        waiting = asyncio.ensure_future(lease.lost.wait())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        owner.execute(EXPIRE)
        assert await asyncio.wait_for(waiting, 20) is True
        other = await client.lock("b").acquire()
        waiting = asyncio.ensure_future(other.lost.wait())
        await asyncio.sleep(0)
        await other.release()
        assert await asyncio.wait_for(waiting, 20) is False


@pytest.mark.second_stage
async def test_body_of_async_with_is_cancelled_and_ends_in_lease_lost(dsn: str, owner: psycopg.Connection) -> None:
    async with dblock.AsyncClient(dsn) as client:
        reached = False
        with pytest.raises(dblock.LeaseLost, match="superseded"):
            async with client.lock("a", ttl=4):
                owner.execute(TAKE_OVER.encode())
                await asyncio.sleep(30)
                reached = True
        assert not reached
        task = asyncio.current_task()
        assert task is not None
        if sys.version_info >= (3, 11):
            assert task.cancelling() == 0
        await asyncio.sleep(0.01)


@pytest.mark.second_stage
async def test_error_of_the_body_is_kept_when_the_lease_is_lost(dsn: str, owner: psycopg.Connection) -> None:
    async with dblock.AsyncClient(dsn) as client:
        with pytest.raises(KeyError):
            async with client.lock("a", ttl=0.3):
                owner.execute(EXPIRE)
                try:
                    await asyncio.sleep(10)
                finally:
                    raise KeyError


async def test_body_cancelled_by_the_program_raises_cancelled_error(dsn: str, owner: psycopg.Connection) -> None:
    async with dblock.AsyncClient(dsn) as client:
        entered = asyncio.Event()

        async def body() -> None:
            async with client.lock("a"):
                entered.set()
                await asyncio.sleep(30)

        task = asyncio.ensure_future(body())
        await asyncio.wait_for(entered.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,)


@pytest.mark.second_stage
async def test_grant_whose_reply_comes_too_late_is_given_back(clients: Clients) -> None:
    with Proxy(clients.dsn) as proxy:
        client = clients(proxy.dsn)
        await client.lock("warm").holder()
        proxy.delay = 0.25
        assert await client.lock("a", ttl=0.1).try_acquire() is None
        proxy.delay = 0
        assert await client.lock("a").holder() is None


async def test_closed_client_has_released_its_leases(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients()
    kept, left = await client.lock("a").acquire(), await client.lock("b", keep_alive=False).acquire()
    await client.close()
    for name in "ab":
        assert owner.execute("SELECT count(*) FROM holder(%s)", [name]).fetchone() == (0,)
    assert kept.remaining() == left.remaining() == 0
    assert not kept.lost.is_set()


@sync_first
@pytest.mark.second_stage
async def test_close_has_released_the_lease_though_replies_take_over_a_second(
    clients: Clients, owner: psycopg.Connection
) -> None:
    with Proxy(clients.dsn) as proxy:
        client = clients(proxy.dsn)
        await client.lock("a").acquire()
        proxy.delay = 1.2
        await client.close()
        assert owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,)


async def test_client_closed_in_its_event_loop_does_not_block_the_loop(
    dsn: str, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a client whose event loop is gone releases its leases with blocking calls."""
    blocking: list[object] = []
    monkeypatch.setattr(shutdown, "_release_remaining", lambda *args: blocking.append(args))
    client = dblock.AsyncClient(dsn)
    await client.lock("a").acquire()
    await client.close()
    assert owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,)
    assert blocking == []
    assert not client._runtime.shutdown.alive


async def test_error_of_the_body_is_raised_before_client_closed(clients: Clients) -> None:
    client = clients()
    with pytest.raises(KeyError):
        async with client.lock("a"):
            await client.close()
            raise KeyError


async def test_garbage_collected_lease_warns_and_is_released(
    dsn: str, owner: psycopg.Connection, kept_leases: list[Any]
) -> None:
    def free() -> bool:
        return owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,)

    with dblock.Client(dsn) as client:
        client.lock("a", ttl=600).acquire()
        with pytest.warns(ResourceWarning, match="'a' was never released"):
            collect_garbage(kept_leases)
        await eventually_async(free)
    async with dblock.AsyncClient(dsn) as async_client:
        await async_client.lock("a", ttl=600).acquire()
        with pytest.warns(ResourceWarning, match="'a' was never released"):
            collect_garbage(kept_leases)
        await eventually_async(free)


def collect_garbage(leases: list[Any]) -> None:
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


@pytest.mark.alone
@pytest.mark.second_stage
@pytest.mark.parametrize("how", first(1, ["pass", "sys.exit(3)", "1 / 0", "raise KeyboardInterrupt"]))
@pytest.mark.parametrize("script", [SYNC, ASYNC], ids=["sync", "async"])
def test_end_of_the_interpreter_releases_its_leases(dsn: str, owner: psycopg.Connection, script: str, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script.format(how), dsn], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode == 0) == (how == "pass"), done.stderr
    assert owner.execute("SELECT token FROM distributed_locks WHERE name = 'a'").fetchone() != (0,)
    assert owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,), done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.second_stage
def test_child_does_not_renew_its_parents_leases(dsn: str, owner: psycopg.Connection) -> None:
    """Only the child continues. The parent is killed, and its keep-alive with it."""
    script = (
        "import dblock, os, sys, time, signal\n"
        "client = dblock.Client(sys.argv[1])\n"
        "lease = client.lock('a', ttl=1).acquire()\n"
        "if os.fork() == 0:\n"
        "    mine = client.lock('b', ttl=6).acquire()\n"
        "    first = mine.expires_at\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "    while not mine.lost.is_set() and (mine.expires_at - first).total_seconds() < 1.5:\n"
        "        time.sleep(0.01)\n"
        "    print(mine.remaining() > 0, lease.remaining(), flush=True)\n"
        "    os._exit(0)\n"
        "time.sleep(30)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, dsn], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "True 0.0\n"
    # The child has renewed its own lease over a second later, when the parent's ended.
    assert owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,)


@pytest.mark.second_stage
async def test_checking_a_lost_lease_in_the_body_leaves_no_cancellation_behind(dsn: str) -> None:
    async with dblock.AsyncClient(dsn) as client:
        for how in ("raise_if_lost", "own error", "nested"):
            with pytest.raises((dblock.LeaseLost, KeyError)):
                async with client.lock(how, ttl=0.2, keep_alive=False) as lease:
                    time.sleep(0.3)  # noqa: ASYNC251 - the loop is blocked, and no timer fires
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


@pytest.mark.second_stage
@pytest.mark.skipif(sys.version_info < (3, 11), reason="counts cancellations")
async def test_loss_raises_lease_lost_in_a_task_that_is_being_cancelled(dsn: str, owner: psycopg.Connection) -> None:
    """A cancelled task cleans up under a lock, and loses the lease of that lock."""
    seen: list[BaseException] = []

    async def work(client: dblock.AsyncClient) -> None:
        try:
            await asyncio.sleep(10)
        finally:
            try:
                async with client.lock("a", ttl=0.3):
                    owner.execute(EXPIRE)
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


@pytest.mark.second_stage
async def test_worker_thread_may_be_the_first_to_see_the_loss(dsn: str) -> None:
    async with dblock.AsyncClient(dsn) as client:
        called = asyncio.Event()

        async def callback(error: dblock.LeaseLost) -> None:
            called.set()

        def poll(lease: dblock.AsyncLease) -> None:
            with contextlib.suppress(dblock.LeaseLost):
                while True:
                    lease.raise_if_lost()

        started = time.monotonic()
        with pytest.raises(dblock.LeaseLost):
            async with await client.lock("a", ttl=0.3, keep_alive=False).acquire() as lease:
                lease.on_lost(callback)
                await asyncio.gather(asyncio.to_thread(poll, lease), asyncio.sleep(30))
        assert time.monotonic() - started < 15
        await asyncio.wait_for(called.wait(), 20)


def test_closed_client_leaves_no_thread(dsn: str) -> None:
    before = threading.active_count()
    for _ in range(10):
        with dblock.Client(dsn) as client:
            lease = client.lock("a").acquire()
            lease.on_lost(lambda error: None)
            lease.release()
    eventually(lambda: threading.active_count() <= before, "the threads have ended")


@pytest.mark.second_stage
async def test_expired_lease_does_not_stay_in_the_renewal_schedule(clients: Clients, kept_leases: list[Any]) -> None:
    client = clients()
    for number in range(5):
        with pytest.raises(dblock.LeaseLost):
            async with client.lock(f"{number}", ttl=0.1, keep_alive=False):
                await asyncio.sleep(0.15)
        with contextlib.suppress(dblock.LeaseLost):
            await client.lock(f"dropped {number}", ttl=0.1, keep_alive=False).acquire()
    await asyncio.sleep(0.2)
    collect_garbage(kept_leases)
    await asyncio.sleep(0)
    await client.lock("wakes the keep-alive", ttl=0.3).acquire()
    schedule = getattr(client, "_inner", client)._runtime.keepalive.flow.schedule
    await eventually_async(lambda: len(schedule._states) <= 1)


def test_repeated_waits_for_loss_leave_no_callback_behind(client: dblock.Client) -> None:
    lease = client.lock("a").acquire()
    before = len(lease._state._endings)
    for _ in range(50):
        assert lease.lost.wait(0) is False
    assert len(lease._state._endings) == before


async def test_cancelled_release_of_a_client_that_closes_leaves_no_lock(
    dsn: str, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release is under way when its task is cancelled and the client closed, as at the end of a program."""
    call, sent = AsyncRunner._call, asyncio.Event()

    async def send(self: AsyncRunner, effect: Call, *rest: Any) -> Any:
        if b".release(" in effect.sql:
            sent.set()
            effect = effect._replace(sql=effect.sql.replace(b"SELECT", b"SELECT pg_sleep(10),"))
        return await call(self, effect, *rest)

    client = dblock.AsyncClient(dsn, presence=None)
    lease = await client.lock("a").acquire()
    monkeypatch.setattr(AsyncRunner, "_call", send)
    releasing = asyncio.ensure_future(lease.release())
    await sent.wait()
    asleep = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
    await eventually_async(lambda: owner.execute(asleep).fetchone() is not None, "the release is under way")
    releasing.cancel()
    await client.close()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    assert owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,)


async def test_release_cancelled_just_before_its_client_closes_leaves_no_lock(
    dsn: str, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release waits for a connection, so no call is under way."""
    waits = asyncio.Event()

    async def wait(*args: Any) -> None:
        waits.set()
        await asyncio.Event().wait()

    client = dblock.AsyncClient(dsn, presence=None)
    lease = await client.lock("a").acquire()
    with monkeypatch.context() as patch:
        patch.setattr(AsyncPool, "take", wait)
        releasing = asyncio.ensure_future(lease.release())
        await waits.wait()
    releasing.cancel()
    await client.close()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    assert owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,)


async def test_close_releases_a_lease_whose_row_is_locked_for_a_moment(
    clients: Clients, owner: psycopg.Connection
) -> None:
    client = clients(presence=None)
    await client.lock("a").acquire()
    called: list[str] = []
    with owner.transaction(), clients.before_calls(called.append):
        owner.execute("SELECT FROM distributed_locks WHERE name = 'a' FOR UPDATE")
        closing = asyncio.ensure_future(client.close())
        await eventually_async(lambda: called.count("release_all") >= 2, "the release is retried")
    await closing
    assert owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,)


@pytest.mark.second_stage
async def test_close_releases_a_lease_that_counts_as_lost_when_its_presence_ends(
    clients: Clients, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, let_go = clients(presence=1), KeepAlive.let_go
    lease = await client.lock("a").acquire()
    await eventually_async(
        lambda: owner.execute("SELECT true FROM distributed_locks WHERE presence IS NOT NULL").fetchone()
    )

    def look_before(self: KeepAlive) -> Any:
        eventually(lease.lost.is_set, "the lease counts as lost without its presence")
        return let_go(self)

    monkeypatch.setattr(KeepAlive, "let_go", look_before)
    await client.close()
    assert owner.execute("SELECT expires_at = '-infinity' FROM distributed_locks").fetchone() == (True,)


@pytest.mark.parametrize("kind", ["lock", "read_lock"])
async def test_client_that_is_closed_while_it_releases_leaves_no_lock(
    clients: Clients, owner: psycopg.Connection, kind: str
) -> None:
    client = clients(presence=None)
    lease = await getattr(client, kind)("a").acquire()
    with closing_before("release", clients, client):
        assert await lease.release()
    held = "SELECT name FROM distributed_locks WHERE expires_at > clock_timestamp() ORDER BY name"
    assert owner.execute(held).fetchall() == []


async def test_client_that_is_closed_while_it_acquires_leaves_no_lock(
    clients: Clients, owner: psycopg.Connection
) -> None:
    with Proxy(clients.dsn) as proxy:
        client = clients(proxy.dsn)
        await client.lock("warm").holder()
        proxy.hold_replies()
        sent = proxy.requests
        acquiring = asyncio.ensure_future(client.lock("a", ttl=600).acquire())
        await eventually_async(lambda: proxy.requests > sent)
        closing = asyncio.ensure_future(client.close())
        await eventually_async(lambda: getattr(client, "_inner", client)._runtime.closed)
        proxy.flow()
        await closing
        with pytest.raises(dblock.ClientClosed):
            await acquiring
        await eventually_async(lambda: owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,))


async def test_closed_client_leaves_no_task_behind(dsn: str) -> None:
    client = dblock.AsyncClient(dsn, presence=None)
    async with client.lock("a"):
        pass
    # No lease is held, so close() sends no release, which would give the tasks time to end.
    await client.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.second_stage
async def test_keep_alive_restarts_after_all_tasks_were_cancelled(dsn: str) -> None:
    async with dblock.AsyncClient(dsn) as client:
        await client.lock("a").acquire()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.05)
        await renewed(await client.lock("b", ttl=TTL).acquire())


async def test_on_danger_that_every_renewal_would_trigger_is_refused(clients: Clients) -> None:
    lease = await clients().lock("a", ttl=10).acquire()
    with pytest.raises(dblock.InvalidArgument, match="less than 6 s"):
        lease.on_danger(print, before=7)


async def test_body_whose_lock_was_freed_ends_in_lease_lost(clients: Clients, owner: psycopg.Connection) -> None:
    """The body raises even if the keep-alive has not noticed the loss yet."""
    with pytest.raises(dblock.LeaseLost, match="forced"):
        async with clients().lock("a") as lease:
            owner.execute("SELECT release('a', %s)", [lease.token])


@pytest.mark.second_stage
async def test_forced_holder_keeps_the_lock_until_it_has_released(clients: Clients, owner: psycopg.Connection) -> None:
    """The holder learns it from its next renewal, long before its deadline. Waiters need not wait for the deadline."""
    lease = await clients().lock("a", ttl=6).acquire()
    deadline = lease.expires_at
    owner.execute(FORCE_RELEASE)
    await eventually_async(lambda: lease.lost.is_set())
    assert lease.lost.reason is dblock.Reason.FORCED
    assert owner.execute("SELECT token FROM holder('a')").fetchone() == (lease.token,), "the lock was freed too early"
    assert await lease.release() is False
    await eventually_async(lambda: owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,))
    in_time = owner.execute("SELECT clock_timestamp() < %s", [deadline]).fetchone()
    assert in_time == (True,), "the lock was free only when the deadline had passed"


def test_concurrent_releases_of_one_lease_succeed_at_most_once(client: dblock.Client) -> None:
    lease = client.lock("a").acquire()
    with ThreadPoolExecutor(8) as threads:
        assert sorted(threads.map(lambda _: lease.release(), range(8)))[:7] == [False] * 7
    assert not lease.lost.is_set()


async def test_callback_that_is_not_callable_is_refused(clients: Clients) -> None:
    lease = await clients().lock("a").acquire()
    for wrong in (None, 5):
        with pytest.raises(dblock.InvalidArgument, match="must be callable"):
            lease.on_lost(wrong)
        with pytest.raises(dblock.InvalidArgument, match="must be callable"):
            lease.on_danger(wrong, before=1)


@pytest.mark.second_stage
def test_parents_lease_in_a_child_is_over_and_not_lost(client: dblock.Client) -> None:
    lease = client.lock("a", ttl=1.5, keep_alive=False).acquire()
    calls: list[Any] = []
    lease.on_lost(calls.append)

    def body() -> bool:
        time.sleep(1.6)
        return not lease.lost.is_set() and not calls

    assert run_in_fork(body) == 0
