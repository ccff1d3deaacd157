"""A dead holder is succeeded at once, a stopped holder after its ttl, and a live holder never."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

import dblock
from dblock._core import listener_flow as core_listener
from dblock._core import presence
from dblock._core.statements import KEEP_SESSION
from dblock._core.timings import Timings, default
from dblock._runtime.listener_connection import ListenerConnection
from dblock._runtime.target import Target
from dblock.embedded import Server
from tests.support.eventually import eventually, eventually_async
from tests.support.machine import measured, not_judged, soon
from tests.support.proxy import Proxy
from tests.support.servers import stop_slowly
from tests.support.stages import first
from tests.support.timings import timings_with
from tests.support.warm_start import Program

HOLDER = """
import json, sys, time, dblock
options = json.loads(sys.argv[2])
client = dblock.Client(sys.argv[1], **options.pop("client", {}))
for line in sys.stdin:
    with client.lock("warm"):
        pass
    lease = client.lock("a", **options).acquire()
    deadline, present = time.monotonic() + 10, client._runtime.settings.grace is not None
    # The client ties the lease before it sends the request, and the reply shows that the server has tied it too.
    while (present and not lease._state.presence) or lease._state.unreachable:
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    print(json.dumps({"token": lease.token}), flush=True)
    sys.stdin.readline()
    print(json.dumps({"lost": lease.lost.is_set(), "reason": str(lease.lost.reason)}), flush=True)
    lease.release()
"""

GRACE = pytest.mark.parametrize("grace", [10.0, pytest.param(0.15, marks=pytest.mark.second_stage)])
"""The holder's presence: one that leaves a slow machine the time to act, and the default one."""


def keeps_its_lease(grace: float, trial: Callable[[], object]) -> None:
    """Run a trial of a live holder. It has two thirds of the grace to report that it is alive.

    With the default grace this is a tenth of a second, which a machine that stalls may take.
    """
    with measured() as lateness:
        try:
            trial()
        except (AssertionError, dblock.LeaseLost):
            if 3 * lateness() > grace * default.own_part:
                not_judged("to report that the holder is alive")
            raise


LINK = "SELECT pg_terminate_backend(session) FROM dblock.lock_presence"


class Process:
    """A process that holds lock `a`."""

    def __init__(self, dsn: str, **options: Any) -> None:
        self.process = Program(
            [sys.executable, "-c", HOLDER, dsn, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def ask(self) -> Any:
        assert self.process.stdout
        self.tell()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def holding(dsn: str, **options: Any) -> Iterator[Process]:
    process = Process(dsn, **options)
    try:
        process.ask()
        yield process
    finally:
        process.close()


def tied(owner: psycopg.Connection) -> Any:
    """Return the presence that lock `a` is tied to, as soon as the server knows of one."""
    sql = "SELECT presence FROM distributed_locks JOIN lock_presence USING (presence) WHERE name = 'a'"
    return eventually(lambda: owner.execute(sql).fetchone(), "a presence")[0]


def wait_for_withdrawal(owner: psycopg.Connection, withdrawn: Any, lease: Any) -> None:
    """Return once the client has withdrawn this presence, or has given up the lease."""
    sql = "SELECT 1 FROM lock_presence WHERE presence = %s"
    eventually(
        lambda: lease._state.loss or not owner.execute(sql, [withdrawn]).fetchone(), "the withdrawal of the presence"
    )


def wait_for_tickets(owner: psycopg.Connection, number: int) -> None:
    tickets = "SELECT * FROM lock_tickets"
    seen = "SELECT pid, state, wait_event, query FROM pg_stat_activity WHERE datname = current_database()"
    eventually(
        lambda: len(owner.execute(tickets).fetchall()) == number,
        lambda: f"{number} of {owner.execute(tickets).fetchall()}; sessions: {owner.execute(seen).fetchall()}",
    )


def waiting(
    client: dblock.Client, owner: psycopg.Connection, waiters: int = 1, at_grant: Callable[[], Any] | None = None
) -> tuple[threading.Thread, list[Any]]:
    """Start a thread that waits for lock `a`. Return it once it is queued, with a list for the time and the lease.

    At the grant, the thread also calls `at_grant`, and adds the result to the list.
    """
    came: list[Any] = []

    def wait() -> None:
        with contextlib.suppress(dblock.ClientClosed):
            lease = client.lock("a").acquire(timeout=60)
            came.extend((time.monotonic(), lease, at_grant and at_grant()))

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for_tickets(owner, waiters)
    return thread, came


def takeovers(dsn: str, owner: psycopg.Connection, trials: int) -> list[float]:
    """Kill the holder repeatedly; return how long each time until the next waiter was granted the lock."""
    took = []
    with dblock.Client(dsn) as client:
        for _ in range(trials):
            with holding(dsn, ttl=30) as holder:
                thread, came = waiting(client, owner)
                time.sleep(0.1)
                with measured() as lateness:
                    killed = time.monotonic()
                    holder.process.kill()
                    thread.join()
                    took.append(came[0] - killed - lateness())
                assert came[1].release()
    return took


@pytest.mark.second_stage
def test_next_waiter_has_the_lock_soon_after_the_holder_was_killed(dsn: str, owner: psycopg.Connection) -> None:
    took = takeovers(dsn, owner, 7)
    assert statistics.median(took) < 0.3, took
    assert max(took) < 2


@pytest.mark.alone
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kills", [*first(0, [4]), pytest.param(40, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("killed", ["holder", "waiter"])
def test_next_waiter_has_the_lock_soon_after_a_kill_at_any_moment(
    dsn: str, owner: psycopg.Connection, killed: str, kills: int
) -> None:
    """The kill comes 0 to 2 s after the waiter has queued. A killed waiter is the first of two.

    If the release wakes a waiter whose end the server has not noticed yet, the next one comes with its next heartbeat.
    """
    moments = random.Random(killed)
    took = []
    with dblock.Client(dsn) as client, dblock.Client(dsn) as other:
        with client.lock("warm"), other.lock("warm too"):
            pass
        for _ in range(kills):
            with contextlib.ExitStack() as ending:
                if killed == "holder":
                    process = ending.enter_context(holding(dsn, ttl=30))
                    thread, came = waiting(client, owner)
                    time.sleep(moments.uniform(0, 2))
                    lateness = ending.enter_context(measured())
                    began = time.monotonic()
                    process.process.kill()
                else:
                    process = Process(dsn, ttl=30)
                    ending.callback(process.close)
                    lease = other.lock("a", ttl=30).acquire()
                    # A waiter that was passed over within its grace leaves its ticket to a later call.
                    owner.execute("DELETE FROM lock_tickets")
                    process.tell()
                    wait_for_tickets(owner, 1)
                    thread, came = waiting(client, owner, 2)
                    time.sleep(moments.uniform(0, 2))
                    lateness = ending.enter_context(measured())
                    began = time.monotonic()
                    process.process.kill()
                    lease.release()
                thread.join()
                took.append(came[0] - began - lateness())
                assert came[1].release()
    if killed == "holder":
        assert statistics.median(took) < 0.3, took
    assert max(took) < default.heartbeat_interval + 0.5, took


@pytest.mark.nightly
def test_next_waiter_has_the_lock_soon_after_each_of_fifty_kills(dsn: str, owner: psycopg.Connection) -> None:
    took = takeovers(dsn, owner, 50)
    assert statistics.median(took) < 0.3, took


def wait_after_the_lease(owner: psycopg.Connection, thread: threading.Thread) -> float:
    """Return by how many seconds the next grant of lock `a` came later than the end of its lease, on one clock."""
    sql = "SELECT token, date_part('epoch', expires_at), date_part('epoch', granted_at)"

    def look() -> tuple[int, float, float]:
        ((token, expires, granted),) = owner.execute(f"{sql} FROM distributed_locks WHERE name = 'a'".encode())
        return token, expires, granted

    before = look()
    while thread.is_alive():
        time.sleep(0.01)
        # Again and again, because a renewal that was sent may arrive late.
        if (seen := look())[0] == before[0]:
            before = seen
    after = look()
    assert after[0] > before[0]
    return after[2] - before[1]


@pytest.mark.second_stage
@pytest.mark.parametrize("soon", [10.0, pytest.param(0.3, marks=pytest.mark.second_stage)])
def test_stopped_holder_is_succeeded_after_its_ttl_and_learns_of_it(
    dsn: str, owner: psycopg.Connection, soon: float
) -> None:
    with holding(dsn, ttl=3) as holder, dblock.Client(dsn) as client, measured() as lateness:
        thread, _ = waiting(client, owner)
        holder.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, holder.process.pid, os.WSTOPPED | os.WNOWAIT)
        assert 0 <= wait_after_the_lease(owner, thread) < soon + lateness()
        holder.process.send_signal(signal.SIGCONT)
        assert holder.ask()["lost"] is True


@pytest.mark.second_stage
@pytest.mark.parametrize("soon", [10.0, pytest.param(0.3, marks=pytest.mark.second_stage)])
def test_dead_holder_without_presence_is_succeeded_after_its_ttl(
    dsn: str, owner: psycopg.Connection, soon: float
) -> None:
    with (
        holding(dsn, ttl=3, client={"presence": None}) as holder,
        dblock.Client(dsn) as client,
        measured() as lateness,
    ):
        thread, _ = waiting(client, owner)
        holder.process.kill()
        holder.process.wait()
        assert 0 <= wait_after_the_lease(owner, thread) < soon + lateness()


@pytest.mark.second_stage
@GRACE
def test_live_holder_whose_session_the_server_ends_keeps_its_lock(
    dsn: str, owner: psycopg.Connection, grace: float
) -> None:
    def trial() -> None:
        with dblock.Client(dsn, presence=grace) as holder, dblock.Client(dsn) as client:
            lease = holder.lock("a").acquire()
            present(holder, lease)
            thread, came = waiting(client, owner)
            for _ in range(5):
                present(holder, lease)
                ended = tied(owner)
                owner.execute(LINK.encode())
                wait_for_withdrawal(owner, ended, lease)
                time.sleep(0.3)
                assert not came, "the live holder was treated as dead"
                lease.raise_if_lost()
            assert lease.release()
            thread.join()
            assert came[1].token > lease.token

    keeps_its_lease(grace, trial)


def present(client: dblock.Client, lease: Any) -> None:
    """Return once other sessions see the client's presence, and the lease is tied to it."""
    flows, state = client._runtime.flows, lease._state
    # The client ties the lease before it sends the request, and the reply shows that the server has tied it too.
    eventually(lambda: flows.presence and state.presence is flows.presence and not state.unreachable, "the presence")


@pytest.fixture
def seems_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the proxy as a direct connection: like a network, the proxy of these tests closes both sides at once."""
    monkeypatch.setattr(ListenerConnection, "is_direct", lambda *args: True)


def cut_off(dsn: str, owner: psycopg.Connection, asks: bool, **changes: float) -> None:
    """Close all connections of a holder at once. It cannot reconnect, while the server and the next waiter continue.

    With `asks`, the next holder asks the lease at its grant. Else nothing looks at the lease, until the holder is told.
    """
    for _ in range(3):
        with (
            measured() as lateness,
            Proxy(dsn) as proxy,
            dblock.Client(proxy.dsn, presence=0.9, timings=timings_with(**changes)) as holder,
            dblock.Client(dsn) as client,
        ):
            lease = holder.lock("a", ttl=30).acquire()
            present(holder, lease)
            told_at: list[float] = []
            lease._state.at_end(lambda told_at=told_at: told_at.append(time.monotonic()))  # type: ignore[misc]
            thread, came = waiting(client, owner, at_grant=lease.lost.is_set if asks else None)
            cut = time.monotonic()
            proxy.close()
            thread.join()
            assert came[0] - cut < 15, "the next waiter had to wait for the end of the lease"
            if asks:
                assert came[2], "the holder trusted its lease after the next grant"
            else:
                eventually(lambda told_at=told_at: told_at, "the callback of the lease")  # type: ignore[misc]
                # Two threads have written down their times, and each of them may have been late.
                assert told_at[0] < came[0] + lateness(), "the holder was told after the next grant"
            assert lease.lost.reason is dblock.Reason.UNREACHABLE
            came[1].release()


@pytest.mark.second_stage
@pytest.mark.usefixtures("seems_direct")
@pytest.mark.parametrize("asks", [True, False], ids=["asks", "is told"])
def test_cut_off_holder_learns_of_the_loss_before_the_next_grant(
    dsn: str, owner: psycopg.Connection, asks: bool
) -> None:
    cut_off(dsn, owner, asks)


@pytest.mark.second_stage
@pytest.mark.usefixtures("seems_direct")
@pytest.mark.parametrize("asks", [True, False], ids=["asks", "is told"])
def test_cut_off_run_catches_a_holder_that_gives_up_too_late(dsn: str, owner: psycopg.Connection, asks: bool) -> None:
    with pytest.raises(AssertionError, match="after the next grant"):
        cut_off(dsn, owner, asks, own_part=4)


def test_lease_checked_while_presence_is_in_doubt_reports_lost(
    dsn: str, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a stop during which the server has closed the session: no thread of the client has run yet."""
    checked = threading.Event()

    def notices_later(*args: Any) -> Iterator[Any]:
        """Do nothing until the lease was checked, and do nothing then."""
        checked.wait(20)
        return iter(())

    with dblock.Client(dsn) as holder:
        lease = holder.lock("a", ttl=30).acquire()
        present(holder, lease)
        monkeypatch.setattr(core_listener.ListenerFlow, "_failed", notices_later)
        lease.raise_if_lost()
        try:
            owner.execute(LINK.encode())
            eventually(lease.lost.is_set, "the loss")
            assert lease.lost.reason is dblock.Reason.UNREACHABLE
        finally:
            checked.set()


@pytest.mark.second_stage
@pytest.mark.usefixtures("seems_direct")
def test_silent_connection_is_replaced_without_losing_a_lease(dsn: str, owner: psycopg.Connection) -> None:
    timings = timings_with(ping_interval=0.2, reply_within=0.3)
    with (
        Proxy(dsn) as proxy,
        dblock.Client(dsn, listen_dsn=proxy.dsn, timings=timings) as holder,
        dblock.Client(dsn, timings=timings) as client,
    ):
        lease = holder.lock("a", ttl=30).acquire()
        present(holder, lease)
        thread, came = waiting(client, owner)
        silent = tied(owner)
        proxy.fall_silent()
        wait_for_withdrawal(owner, silent, lease)
        assert not came
        lease.raise_if_lost()
        proxy.close()  # now the server sees the end of the session
        time.sleep(0.5)
        assert not came, "the live holder was treated as dead"
        lease.raise_if_lost()
        assert lease.release()
        thread.join()
        came[1].release()


@pytest.mark.second_stage
@GRACE
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in a request"])
@pytest.mark.usefixtures("seems_direct")
def test_last_message_of_the_server_counts_before_the_connection_closes(
    dsn: str, owner: psycopg.Connection, busy: bool, grace: float
) -> None:
    """A backend gives its advisory locks back before it closes its socket."""
    # Nothing but the message shall tell it: a request that gets no reply would tell it only after the test.
    timings = timings_with(ping_interval=0.2 if busy else 60.0, reply_within=60.0)

    def trial() -> None:
        with (
            Proxy(dsn) as proxy,
            dblock.Client(dsn, listen_dsn=proxy.dsn, presence=grace, timings=timings) as holder,
            dblock.Client(dsn, timings=timings) as client,
        ):
            lease = holder.lock("a", ttl=30).acquire()
            present(holder, lease)
            thread, came = waiting(client, owner)
            proxy.keeps_clients = True
            ended = tied(owner)
            if busy:
                proxy.hold_requests()
                asked = proxy.requests
                eventually(lambda: proxy.requests > asked, "a request that gets no reply")
            owner.execute(LINK.encode())
            wait_for_withdrawal(owner, ended, lease)
            time.sleep(0.3)
            assert not came, "the live holder was treated as dead"
            lease.raise_if_lost()
            assert lease.release()
            thread.join()
            came[1].release()

    keeps_its_lease(grace, trial)


@pytest.mark.second_stage
@pytest.mark.usefixtures("seems_direct")
def test_holder_without_replies_gives_up_before_the_server_does(dsn: str, owner: psycopg.Connection) -> None:
    timings = timings_with(ping_interval=0.2, reply_within=0.3, trusted_for=1.5)
    with Proxy(dsn) as proxy, dblock.Client(proxy.dsn, timings=timings) as holder:
        lease = holder.lock("a", ttl=30).acquire()
        present(holder, lease)
        proxy.fall_silent()
        started = time.monotonic()
        assert lease.lost.wait(10) is True
        assert 0.5 < time.monotonic() - started < 5
        assert lease.lost.reason is dblock.Reason.UNREACHABLE
        assert owner.execute("SELECT count(*) FROM lock_presence").fetchone() == (1,), "the server has already noticed"
        proxy.close()


def test_server_keeps_the_session_for_longer_than_the_client_trusts_it(dsn: str, owner: psycopg.Connection) -> None:
    assert Timings().trusted_for + Timings().ping_interval < presence.DROPPED_AFTER
    with dblock.Client(dsn) as holder:
        holder.lock("a").acquire()
        owner.execute("SET idle_session_timeout = '1 h'")
        owner.execute(KEEP_SESSION.sql)
        assert owner.execute("SHOW idle_session_timeout").fetchone() == ("0",)


@pytest.mark.second_stage
@pytest.mark.parametrize("how", first(1, ["fast", "immediate"]))
def test_server_restart_makes_no_client_look_dead(own_server: Server, how: str) -> None:
    """The holder learns that the server ends all its sessions, so that no presence counts, and keeps its lease."""
    # A grace that leaves a machine that stalls the time to learn it.
    grace = 1.5
    with dblock.Client(own_server.url, presence=grace) as holder, holding(own_server.url, ttl=30) as killed:
        kept = holder.lock("b", ttl=30).acquire()
        present(holder, kept)
        killed.process.kill()
        restart(own_server, how, grace + 0.1)
        with dblock.Client(own_server.url) as client:
            for name, timeout in (("a", 1.0), ("b", grace + 0.5)):
                with pytest.raises(dblock.LockTimeout):
                    client.lock(name).acquire(timeout)
        assert not kept.lost.is_set()
        kept.renew()
        assert kept.release()


@pytest.mark.second_stage
def test_lease_without_presence_outlasts_a_restart(own_server: Server) -> None:
    with dblock.Client(own_server.url, presence=None) as holder:
        lease = holder.lock("b", ttl=30).acquire()
        restart(own_server, "fast", 0.7)
        lease.renew()
        assert lease.release()


def restart(server: Server, how: str, away: float) -> None:
    """Restart the server: by an orderly shutdown, after which it is away for these seconds, or as after a crash.

    They are longer than the grace, because a holder that reconnects at once may keep its leases.
    """
    if how == "immediate":
        with psycopg.connect(server.url, autocommit=True) as connection:
            (backend,) = connection.execute(
                "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'"
            ).fetchone()  # type: ignore[misc]
            os.kill(backend, signal.SIGKILL)
            # The server accepts connections until it notices the crash, and then ends every session.
            with contextlib.suppress(psycopg.OperationalError):
                connection.execute("SELECT pg_sleep(60)")
        eventually(server.answers, "the server has recovered")
        return
    stop_slowly(server)
    time.sleep(away)
    server.start()


@pytest.mark.second_stage
def test_live_waiters_are_served_in_order_when_half_of_the_waiters_die(dsn: str, owner: psycopg.Connection) -> None:
    script = """
import sys, time, threading, dblock
client, number = dblock.Client(sys.argv[1]), sys.argv[2]
def wait(which):
    lease = client.lock("a", ttl=30).acquire()
    print(f"{number} {which} {lease.token}", flush=True)
    lease.release()
for which in range(10):
    threading.Thread(target=wait, args=(which,), daemon=True).start()
    while len(client.lock("a").queue()) < 10 * int(number) + which + 1:
        time.sleep(0.005)
print("queued", flush=True)
time.sleep(60)
"""
    with dblock.Client(dsn) as client:
        held = client.lock("a").acquire()
        waiters = []
        for number in range(6):
            waiter = Program([sys.executable, "-c", script, dsn, str(number)], stdout=subprocess.PIPE, text=True)
            waiters.append(waiter)
            assert waiter.stdout is not None
            assert waiter.stdout.readline() == "queued\n"
        try:
            for waiter in waiters[::2]:
                waiter.kill()
            served = []
            # There is one short delay for all dead waiters.
            with soon(3):
                held.release()
                for waiter in waiters[1::2]:
                    assert waiter.stdout is not None
                    served += [waiter.stdout.readline().split() for _ in range(10)]
        finally:
            for waiter in waiters:
                waiter.kill()
                waiter.communicate()
    served.sort(key=lambda one: int(one[2]))
    assert [(int(number), int(which)) for number, which, _ in served] == [(n, w) for n in (1, 3, 5) for w in range(10)]
    time.sleep(0.5)  # past the grace
    with dblock.Client(dsn) as client:
        client.lock("a").acquire(timeout=5)
    assert owner.execute("SELECT count(*) FROM lock_tickets").fetchone() == (0,), "a dead waiter left its ticket behind"


@pytest.mark.second_stage
def test_stopped_holder_whose_session_ended_knows_of_the_loss_when_it_resumes(
    dsn: str, owner: psycopg.Connection
) -> None:
    """Its listener reports that it is alive as soon as it can, and learns that the report comes too late."""
    for _ in range(3):
        with holding(dsn, ttl=30) as holder, dblock.Client(dsn) as client:
            thread, came = waiting(client, owner)
            holder.process.send_signal(signal.SIGSTOP)
            owner.execute(LINK.encode())
            thread.join()
            holder.process.send_signal(signal.SIGCONT)
            time.sleep(0.3)
            report = holder.ask()
            assert report["lost"] is True, report
            assert came[1].release()


@pytest.mark.second_stage
@GRACE
@pytest.mark.usefixtures("patient")
def test_holder_whose_event_loop_is_blocked_reports_that_it_is_alive(
    dsn: str, owner: psycopg.Connection, grace: float
) -> None:
    """Its session ends while the loop is blocked. The listener's thread withdraws the presence, and the lease stays."""

    async def hold(client: dblock.Client) -> None:
        async with dblock.AsyncClient(dsn, presence=grace) as holder:
            lease = await holder.lock("a", ttl=60).acquire()
            await eventually_async(lambda: lease._state.presence, "a presence")
            ended = await asyncio.to_thread(tied, owner)
            owner.execute(LINK.encode())
            wait_for_withdrawal(owner, ended, lease)  # the loop is blocked
            with contextlib.suppress(dblock.LockTimeout):
                assert not client.lock("a").acquire(timeout=0.5), "the live holder was treated as dead"
            await asyncio.sleep(0)
            assert lease.remaining() > 30

    def trial() -> None:
        with dblock.Client(dsn) as client:
            asyncio.run(hold(client))

    keeps_its_lease(grace, trial)


@pytest.mark.second_stage
@pytest.mark.usefixtures("seems_direct")
def test_connection_that_is_slow_to_become_the_presence_saves_no_lease(
    dsn: str, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old presence cannot be withdrawn. The new session is open, but the database does not know of it yet."""
    with dblock.Client(dsn) as holder, dblock.Client(dsn) as client:
        lease = holder.lock("a", ttl=30).acquire()
        present(holder, lease)
        thread, _ = waiting(client, owner)
        monkeypatch.setattr(holder._runtime.listener.flow.in_doubt, "withdraw", lambda: iter(()))
        owner.execute("ALTER FUNCTION register_presence RENAME TO register_at_once")
        owner.execute(
            "CREATE FUNCTION register_presence(presence uuid, grace interval) RETURNS void LANGUAGE plpgsql AS $$ BEGIN"
            " PERFORM pg_sleep(1); PERFORM dblock.register_at_once(presence, grace); END $$"
        )
        owner.execute(LINK.encode())
        thread.join()
        assert lease.lost.is_set()
        assert lease.remaining() == 0


def test_unreachable_host_among_several_proves_nothing(dsn: str) -> None:
    parameters = conninfo.conninfo_to_dict(dsn)
    several = conninfo.make_conninfo(dsn, host=f"/nonexistent,{parameters['host']}")
    assert not Target(several).is_one_host
    assert Target(dsn).is_one_host


@pytest.mark.second_stage
def test_client_behind_a_proxy_never_looks_dead(dsn: str, owner: psycopg.Connection) -> None:
    """A proxy may close its connection to the server without the client's knowledge."""
    with Proxy(dsn) as proxy, dblock.Client(proxy.dsn) as holder, dblock.Client(dsn) as client:
        lease = holder.lock("a", ttl=30).acquire()
        eventually(lambda: holder._runtime.listener.flow.connection, "the listener is connected")
        assert owner.execute("SELECT count(*) FROM lock_presence").fetchone() == (0,)
        with pytest.raises(dblock.LockTimeout):
            client.lock("a").acquire(timeout=0.5)
        lease.raise_if_lost()


@pytest.mark.second_stage
def test_open_transaction_elsewhere_delays_no_takeover_and_no_other_waiter(dsn: str, owner: psycopg.Connection) -> None:
    """All the statements of the transaction start at once, so that its call looks like a transaction of its own."""
    until_dead = (
        "DO $$ BEGIN WHILE NOT pg_try_advisory_xact_lock_shared((SELECT advisory_key FROM dblock.lock_presence"
        " JOIN dblock.distributed_locks USING (presence) WHERE name = 'a'))"
        " LOOP PERFORM pg_sleep(0.0002); END LOOP; END $$"
    )
    with (
        holding(dsn, ttl=30) as holder,
        dblock.Client(dsn) as client,
        psycopg.connect(dsn, autocommit=True) as user,
    ):
        thread, came = waiting(client, owner)
        call = f"BEGIN; {until_dead}; SELECT dblock.try_acquire('a')".encode()
        transaction = threading.Thread(target=user.execute, args=[call])
        transaction.start()
        holder.process.kill()
        transaction.join()
        killed = time.monotonic()
        thread.join()
        assert came[0] - killed < 15, "it waited for the end of the lease"
        came[1].release()


@pytest.mark.second_stage
def test_dead_waiter_queued_before_its_presence_is_passed_over_at_once(dsn: str, owner: psycopg.Connection) -> None:
    """The wait is the first thing that its client does."""
    script = "import sys, dblock; dblock.Client(sys.argv[1]).lock('a').acquire()"
    count = "SELECT count(*), count(presence) FROM lock_tickets"
    with dblock.Client(dsn) as holder, dblock.Client(dsn) as client:
        held = holder.lock("a").acquire()
        with Program([sys.executable, "-c", script, dsn]) as waiter:
            eventually(lambda: owner.execute(count).fetchone() == (1, 1), "the first ticket")
            came: list[float] = []

            def wait() -> None:
                client.lock("a").acquire()
                came.append(time.monotonic())

            thread = threading.Thread(target=wait)
            thread.start()
            eventually(lambda: owner.execute(count).fetchone() == (2, 2), "the second ticket")
            waiter.kill()
            waiter.wait()
            # Only its presence tells that it is dead: its last heartbeat counts for long.
            owner.execute("UPDATE lock_clients SET seen_until = clock_timestamp() + interval '1 hour'")
            time.sleep(0.3)
            released = time.monotonic()
            held.release()
            thread.join()
            assert came[0] - released < 15
