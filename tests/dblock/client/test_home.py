"""The one connection of a quiet client: what goes over it, who may borrow it, and that a borrower delays no renewal."""

from __future__ import annotations

import asyncio
import contextlib
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import dblock
from dblock._core.effects import Call
from dblock._core.listener_failures import Failure
from dblock._runtime import home as home_module
from dblock._runtime import keepalive_runner, pool_demand
from dblock._runtime.connection import RawConnection
from dblock._runtime.error_mapping import Overdue
from dblock._runtime.home import Home
from dblock._runtime.target import Target
from dblock._runtime.threads import started
from tests.dblock.client.test_interrupts import raised_after
from tests.support.eventually import eventually, eventually_async
from tests.support.facade import Clients
from tests.support.machine import measured
from tests.support.sessions import Sessions
from tests.support.timings import timings_with

WATCHED = "watched"
COUNT = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
TERMINATE = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s"
BLOCKED = Call(b"SELECT $1::text FROM pg_advisory_xact_lock_shared(7)", ("1",))
"""A call that waits as long as another session has the advisory lock."""
ONE = Call(b"SELECT $1::text", ("1",))


QUICK: dict[str, Any] = {"slow_part": math.inf, "idle_for": 0.2, "ping_interval": 0.1}


@pytest.fixture
def quick(clients: Clients) -> None:
    """Shorten the quiet time. No reply counts as slow."""
    clients.timings = replace(clients.timings, **QUICK)


@pytest.fixture
def generous(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lend the connection to each call, and for longer, so that a busy machine has no part in the outcome."""
    monkeypatch.setattr(Home, "may_lend", lambda home, call: home.is_open)
    clients.timings = replace(clients.timings, free_within=20.0, lent_for=20.0, longest_wait=math.inf)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Return a function that makes the server accept no more connections of clients."""
    refuses = False

    def refuse() -> None:
        nonlocal refuses
        refuses = True

    connect, connect_async = Target.connect, Target.connect_async

    def connected(target: Target) -> Any:
        if refuses:
            raise psycopg.OperationalError("sorry, too many clients already")
        return connect(target)

    async def connected_async(target: Target) -> Any:
        if refuses:
            raise psycopg.OperationalError("sorry, too many clients already")
        return await connect_async(target)

    monkeypatch.setattr(Target, "connect", connected)
    monkeypatch.setattr(Target, "connect_async", connected_async)
    yield refuse
    refuses = False


def watched(clients: Clients, presence: float | None = None, **options: Any) -> Any:
    """Return a client, without a presence unless one is asked for: a holder with a presence has a second connection."""
    return clients(make_conninfo(clients.dsn, application_name=WATCHED), presence=presence, **options)


def inner(client: Any) -> Any:
    return getattr(client, "_inner", client)._runtime


def connections(owner: psycopg.Connection[Any]) -> int:
    row = owner.execute(COUNT, [WATCHED]).fetchone()
    assert row
    return int(row[0])


async def called(client: Any, call: Call) -> Any:
    """Make a call as a flow of the client makes it, in a thread of its own for a synchronous client."""
    runner = inner(client).runner
    if asyncio.iscoroutinefunction(runner.perform):
        return await runner.perform(call)
    return await asyncio.to_thread(runner.perform, call)


async def only_home(client: Any, owner: psycopg.Connection[Any]) -> Any:
    """Return the listener's connection once the client has no other one, and may borrow it."""
    await eventually_async(
        lambda: inner(client).listener and inner(client).listener.flow.connection and connections(owner) == 1
    )
    return inner(client).listener.flow.connection


async def renewed(lease: Any, times: int = 1) -> None:
    """Return once the lease has been renewed so often."""
    for _ in range(times):
        before = lease._state.sent_at
        await eventually_async(lambda before=before: lease._state.sent_at > before)  # type: ignore[misc]


@pytest.mark.second_stage
@pytest.mark.usefixtures("quick", "generous")
async def test_idle_holder_without_presence_has_one_connection_and_renews_over_it(
    clients: Clients, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = watched(clients)
    lease = await client.lock("a", ttl=3).acquire()
    home = await only_home(client, owner)
    opened, connect = [], Target.connect

    def opening(target: Target) -> Any:
        opened.append(target)
        return connect(target)

    monkeypatch.setattr(Target, "connect", opening)
    await renewed(lease, times=2)
    assert not opened
    assert await lease.release()
    assert connections(owner) == 1, "the release borrowed it"
    assert inner(client).listener.flow.connection is home


@pytest.mark.usefixtures("quick", "generous")
async def test_idle_waiter_has_one_connection_and_gets_the_lock_over_it(
    clients: Clients, owner: psycopg.Connection
) -> None:
    held = await clients().lock("a").acquire()
    client = watched(clients)
    kept = await client.lock("b").acquire()
    waiting = asyncio.create_task(client.lock("a").acquire())
    await only_home(client, owner)
    await held.release()
    lease = await asyncio.wait_for(waiting, 20)
    assert connections(owner) == 1, "the claim borrowed it"
    assert await lease.release()
    assert await kept.release()


@pytest.mark.second_stage
@pytest.mark.usefixtures("quick")
async def test_busy_client_opens_a_second_connection_and_closes_it_when_quiet(
    clients: Clients, owner: psycopg.Connection
) -> None:
    client = watched(clients)
    lease = await client.lock("a").acquire()
    await only_home(client, owner)
    for _ in range(home_module.LOANS + 1):
        await called(client, ONE)
    assert connections(owner) == 2
    await only_home(client, owner)
    assert await lease.release()


def test_home_is_lent_a_few_times_in_a_row_and_not_before_a_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(home_module, "time", SimpleNamespace(monotonic=lambda: now))
    flows: Any = SimpleNamespace(clock=lambda: now, presence=None, timings=timings_with())
    flow: Any = SimpleNamespace(closed=False, connection=None)
    home = Home(flows)
    assert not home.may_lend(ONE), "there is no listener"
    due_at = 200.0
    home.set_up(flow, lambda: due_at, lambda: True)
    assert not home.may_lend(ONE), "there is no connection"
    flow.connection = object()
    assert not home.may_lend(ONE._replace(apart=True)), "a pooler may be in between"
    assert [home.may_lend(ONE) for _ in range(home_module.LOANS + 1)] == [True] * home_module.LOANS + [False]
    now += flows.timings.idle_for
    assert home.may_lend(ONE)
    due_at = now + flows.timings.lent_for / 2
    assert not home.may_lend(ONE)
    flow.closed, due_at = True, 200.0
    assert not home.may_lend(ONE)


CROWD = """
import sys, threading
import dblock

def take():
    with client.lock("a", timeout=120):
        pass

with dblock.Client(sys.argv[1]) as client:
    threads = [threading.Thread(target=take) for _ in range(50)]
    print("ready", flush=True)
    sys.stdin.readline()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("served", flush=True)
"""


@pytest.mark.second_stage
def test_two_hundred_waiters_in_four_processes_share_eight_connections(dsn: str, owner: psycopg.Connection) -> None:
    most, run = 0, [sys.executable, "-c", CROWD, make_conninfo(dsn, application_name=WATCHED)]
    with contextlib.ExitStack() as stack, measured() as lateness:
        crowds = [
            stack.enter_context(subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(4)
        ]
        for crowd in crowds:
            assert crowd.stdout
            assert crowd.stdout.readline() == "ready\n"
        for crowd in crowds:
            assert crowd.stdin
            crowd.stdin.write("\n")
            crowd.stdin.flush()
        while any(crowd.poll() is None for crowd in crowds):
            most = max(most, connections(owner))
            time.sleep(0.02)
        assert [crowd.stdout and crowd.stdout.read() for crowd in crowds] == ["served\n"] * 4
        # A machine that is late makes connections look stuck, and then a client opens another.
        assert most <= 8 or lateness() > pool_demand.GROW_AFTER / 4


@pytest.mark.second_stage
@pytest.mark.usefixtures("quick")
async def test_slow_replies_give_the_keep_alive_its_own_connection_in_time(
    clients: Clients, owner: psycopg.Connection
) -> None:
    client = watched(clients)
    lease = await client.lock("a", ttl=3).acquire()
    await only_home(client, owner)
    runner = inner(client).listener._keepalive_runner
    runner.timings = replace(clients.timings, slow_part=0.0)
    await eventually_async(lambda: connections(owner) == 2)
    await renewed(lease, times=2)
    assert connections(owner) == 2
    runner.timings, runner._slow_until = clients.timings, -math.inf
    await only_home(client, owner)


@pytest.mark.usefixtures("generous")
async def test_renewal_replaces_a_request_for_a_reply(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    """So on a slow network no renewal waits until the server has replied to such a request."""
    client = watched(clients)
    await client.lock("a").acquire()
    await eventually_async(lambda: inner(client).listener.flow.connection)
    replied: list[float] = []
    flow = inner(client).listener.flow
    monkeypatch.setattr(flow, "replied", replied.append)
    before = inner(client).flows.clock()
    await asyncio.to_thread(inner(client).listener._keepalive_runner.perform, ONE)
    assert replied
    assert replied[-1] >= before


@pytest.mark.usefixtures("generous")
async def test_large_call_of_the_keep_alive_delays_no_heartbeat(
    clients: Clients, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The renewal of thousands of leases goes over a connection of its own."""
    client = watched(clients)
    await client.lock("a").acquire()
    await eventually_async(lambda: inner(client).listener.flow.connection)
    sent: list[Call] = []
    renew = Home.renew

    def renewing(home: Home, call: Call, *args: Any) -> Any:
        sent.append(call)
        return renew(home, call, *args)

    monkeypatch.setattr(Home, "renew", renewing)
    large = ONE._replace(args=("1" * keepalive_runner.LARGE,))
    runner = inner(client).listener._keepalive_runner
    assert await asyncio.to_thread(runner.perform, ONE) == ONE.args
    assert await asyncio.to_thread(runner.perform, large) == large.args
    assert [call for call in sent if call.sql == ONE.sql] == [ONE]


@pytest.mark.second_stage
@pytest.mark.usefixtures("quick", "generous")
async def test_client_with_its_own_listen_dsn_makes_no_call_over_it(
    clients: Clients, owner: psycopg.Connection
) -> None:
    listen_dsn = make_conninfo(clients.dsn, application_name="listener")
    client = watched(clients, listen_dsn=listen_dsn)
    lease = await client.lock("a", ttl=1.5).acquire()
    await eventually_async(lambda: connections(owner) == 2)
    await renewed(lease, times=2)
    assert connections(owner) == 2
    assert await lease.release()


@pytest.mark.second_stage
@pytest.mark.usefixtures("quick")
async def test_borrower_that_waits_in_the_server_moves_and_delays_no_renewal(
    clients: Clients, owner: psycopg.Connection, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = watched(clients)
    lease = await client.lock("a", ttl=3).acquire()
    home = await only_home(client, owner)
    monkeypatch.setattr(Home, "may_lend", lambda home, call: home.is_open)
    keeper = sessions.open()
    keeper.do("SELECT pg_advisory_lock(7)")
    calling = asyncio.create_task(called(client, BLOCKED))
    await eventually_async(lambda: connections(owner) == 2 and not inner(client).runner._home.in_use)
    assert not calling.done()
    await renewed(lease, times=2)
    assert not calling.done()
    keeper.do("SELECT pg_advisory_unlock(7)")
    assert await calling == ("1",)
    assert inner(client).listener.flow.connection is home
    lease.raise_if_lost()


@pytest.mark.second_stage
@pytest.mark.usefixtures("quick", "generous")
async def test_client_with_one_connection_renews_and_releases_on_a_full_server(
    clients: Clients,
    owner: psycopg.Connection,
    sessions: Sessions,
    full: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither a call of the user nor the listener's own can occupy the connection for long."""
    client = watched(clients)
    lease = await client.lock("a", ttl=3).acquire()
    home = await only_home(client, owner)
    full()
    keeper = sessions.open()
    keeper.do("SELECT pg_advisory_lock(7)")
    calling = asyncio.create_task(called(client, BLOCKED))
    await renewed(lease)
    with pytest.raises(dblock.Unavailable, match="too many clients"):
        await calling

    def occupy() -> None:
        with contextlib.suppress(psycopg.errors.QueryCanceled):
            home.exchange(BLOCKED, 20.0)

    occupied = threading.Thread(target=occupy)
    occupied.start()
    await renewed(lease)
    await asyncio.to_thread(occupied.join)
    monkeypatch.setattr(Home, "may_lend", lambda home, call: False)
    assert await lease.release(), "it has no other connection"
    assert connections(owner) == 1


@pytest.mark.usefixtures("quick")
async def test_renewal_goes_before_a_borrower_that_waits_for_longer(
    clients: Clients, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = watched(clients)
    await client.lock("a").acquire()
    home = await only_home(client, owner)
    order: list[Any] = []
    exchange = RawConnection.exchange

    def noted(raw: RawConnection, call: Call, within: float) -> Any:
        nonlocal order
        if call.sql == ONE.sql:
            order += call.args  # while the call has the connection
        return exchange(raw, call, within)

    def borrow() -> None:
        home.lend(ONE._replace(args=("borrower",)), 20.0, 20.0)

    def renew() -> None:
        home.renew(ONE._replace(args=("renewal",)), 20.0, 20.0, interrupts=False)

    monkeypatch.setattr(RawConnection, "exchange", noted)
    with home.lock:
        threads = [threading.Thread(target=borrow) for _ in range(3)]
        for thread in threads:
            thread.start()
        await asyncio.sleep(0.1)  # until they wait
        threads.append(threading.Thread(target=renew))
        threads[-1].start()
        await eventually_async(lambda: home._renewals)
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert order == ["renewal", "borrower", "borrower", "borrower"]


@pytest.mark.usefixtures("quick")
async def test_interrupted_borrower_does_not_believe_a_reply(
    clients: Clients, owner: psycopg.Connection, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement that is cancelled while it waits for a standby ends as if it were done, but is not safe."""
    client = watched(clients)
    await client.lock("a").acquire()
    home = await only_home(client, owner)
    keeper = sessions.open()
    keeper.do("SELECT pg_advisory_lock(7)")
    borrowing = asyncio.create_task(asyncio.to_thread(home.lend, BLOCKED, 20.0, 20.0))
    await asyncio.to_thread(sessions.wait_until_a_session_waits)
    monkeypatch.setattr(home.connection, "cancel_safe", lambda timeout: keeper.do("SELECT pg_advisory_unlock(7)"))
    assert await asyncio.to_thread(home.renew, ONE, 20.0, 20.0, interrupts=True) == ("1",)
    with pytest.raises(Overdue) as caught:
        await borrowing
    assert not caught.value.undone


@pytest.mark.usefixtures("quick", "generous")
async def test_end_of_the_session_under_a_borrower_has_its_cause(
    clients: Clients, owner: psycopg.Connection, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = watched(clients)
    await client.lock("a").acquire()
    await only_home(client, owner)
    flow = inner(client).listener.flow
    failed, causes = flow._failed, []

    def note(connection: Any, error: Any) -> Any:
        causes.append(error.failure)
        return failed(connection, error)

    monkeypatch.setattr(flow, "_failed", note)
    keeper = sessions.open()
    keeper.do("SELECT pg_advisory_lock(7)")
    calling = asyncio.create_task(called(client, BLOCKED))
    await asyncio.to_thread(sessions.wait_until_a_session_waits)
    owner.execute(TERMINATE, [WATCHED])
    await eventually_async(lambda: causes)
    assert causes == [Failure.TERMINATED]
    keeper.do("SELECT pg_advisory_unlock(7)")
    assert await calling == ("1",), "it was retried over another connection"


@pytest.mark.second_stage
@pytest.mark.usefixtures("quick", "generous")
async def test_waiter_is_woken_although_the_connection_is_borrowed(
    clients: Clients, owner: psycopg.Connection, sessions: Sessions
) -> None:
    held = await clients().lock("a").acquire()
    client = watched(clients)
    kept = await client.lock("b").acquire()
    waiting = asyncio.create_task(client.lock("a").acquire())
    await only_home(client, owner)
    keeper = sessions.open()
    keeper.do("SELECT pg_advisory_lock(7)")
    calling = asyncio.create_task(called(client, BLOCKED))
    await asyncio.to_thread(sessions.wait_until_a_session_waits)
    await held.release()
    keeper.do("SELECT pg_advisory_unlock(7)")
    assert await calling == ("1",)
    assert await (await asyncio.wait_for(waiting, 20)).release()
    assert await kept.release()


@pytest.mark.second_stage
async def test_cancelled_borrower_returns_the_connection_before_it_cleans_up(
    dsn: str, owner: psycopg.Connection, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings = timings_with(**QUICK, lent_for=2.0, free_within=2.0)
    watched_dsn = make_conninfo(dsn, application_name=WATCHED)
    async with dblock.AsyncClient(watched_dsn, presence=None, timings=timings) as client:
        lease = await client.lock("a").acquire()
        home = await only_home(client, owner)
        monkeypatch.setattr(Home, "may_lend", lambda home, call: home.is_open)
        keeper = sessions.open()
        keeper.do("SELECT pg_advisory_lock(7)")
        calling = asyncio.create_task(called(client, BLOCKED))
        await eventually_async(lambda: inner(client).runner._home.in_use)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert not inner(client).runner._home.in_use
        await eventually_async(lambda: home.raw.usable)
        keeper.do("SELECT pg_advisory_unlock(7)")
        assert await lease.release()


@pytest.mark.second_stage
def test_interrupted_borrower_returns_the_connection(
    dsn: str, owner: psycopg.Connection, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings = timings_with(**QUICK, lent_for=2.0, free_within=2.0)
    with dblock.Client(make_conninfo(dsn, application_name=WATCHED), presence=None, timings=timings) as client:
        lease = client.lock("a").acquire()
        home = asyncio.run(only_home(client, owner))
        monkeypatch.setattr(Home, "may_lend", lambda home, call: home.is_open)
        keeper = sessions.open()
        keeper.do("SELECT pg_advisory_lock(7)")
        runner = inner(client).runner

        waiting = sessions.wait_until_a_session_waits
        with pytest.raises(KeyboardInterrupt), raised_after(waiting, KeyboardInterrupt):
            runner.perform(BLOCKED)
        assert not runner._home.in_use
        eventually(lambda: home.raw.usable)
        keeper.do("SELECT pg_advisory_unlock(7)")
        assert lease.release()


@pytest.mark.parametrize("begun", [True, False])
def test_interrupt_while_a_borrower_begins_leaves_no_grant(
    dsn: str, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    monkeypatch.setattr(Home, "may_lend", lambda home, call: home.is_open)
    timings = timings_with(**QUICK, lent_for=20.0, free_within=20.0)
    with dblock.Client(make_conninfo(dsn, application_name=WATCHED), presence=None, timings=timings) as client:
        lease = client.lock("a").acquire()
        home = asyncio.run(only_home(client, owner))
        lend, threads = home.lend, []

        def lend_late(*args: Any) -> Any:
            monkeypatch.setattr(home, "lend", lend)  # the call that gives up the attempt is not late
            time.sleep(0.05)
            return lend(*args)

        def interrupt(thread: threading.Thread) -> None:
            monkeypatch.setattr(home_module, "started", started)
            threads.append(thread)
            if begun:
                thread.start()
            raise KeyboardInterrupt

        monkeypatch.setattr(home, "lend", lend_late)
        monkeypatch.setattr(home_module, "started", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.lock("b").try_acquire()
        assert not inner(client).runner._home.in_use
        for thread in threads:
            if not begun:
                thread.start()  # a start that was interrupted may still happen
            thread.join()
        assert owner.execute("SELECT count(*) FROM distributed_locks WHERE expires_at > now()").fetchone() == (1,)
        assert lease.release()


@pytest.mark.usefixtures("quick", "generous")
async def test_closing_client_waits_for_a_borrower(
    clients: Clients, owner: psycopg.Connection, sessions: Sessions
) -> None:
    client = watched(clients)
    await client.lock("a").acquire()
    await only_home(client, owner)
    keeper = sessions.open()
    keeper.do("SELECT pg_advisory_lock(7)")
    calling = asyncio.create_task(called(client, BLOCKED))
    await asyncio.to_thread(sessions.wait_until_a_session_waits)
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0.1)  # until it waits
    keeper.do("SELECT pg_advisory_unlock(7)")
    await closing
    assert await calling == ("1",)
    await eventually_async(lambda: connections(owner) == 0)
    assert owner.execute("SELECT count(*) FROM distributed_locks WHERE expires_at > now()").fetchone() == (0,)


@pytest.mark.second_stage
@pytest.mark.usefixtures("quick", "generous")
async def test_closing_client_cancels_a_borrower_that_does_not_end(
    clients: Clients, owner: psycopg.Connection, sessions: Sessions
) -> None:
    client = watched(clients)
    await client.lock("a").acquire()
    await only_home(client, owner)
    keeper = sessions.open()
    keeper.do("SELECT pg_advisory_lock(7)")
    calling = asyncio.create_task(called(client, BLOCKED))
    await asyncio.to_thread(sessions.wait_until_a_session_waits)
    await client.close()
    with pytest.raises(dblock.ClientClosed) as caught:
        await calling
    assert not caught.value.may_be_done, "the server has cancelled it"
    await eventually_async(lambda: connections(owner) == 0)
    assert owner.execute("SELECT count(*) FROM distributed_locks WHERE expires_at > now()").fetchone() == (0,)
