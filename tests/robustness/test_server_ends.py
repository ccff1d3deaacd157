"""What becomes of a lease with presence when its server is shut down, killed or replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

import dblock
from dblock._core.timings import default
from dblock.embedded import Server
from tests.support.eventually import eventually, eventually_async
from tests.support.machine import measured
from tests.support.proxy import Proxy, fatal
from tests.support.servers import stop_slowly
from tests.support.standby import promote, standby_of, wait_until_caught_up
from tests.support.timings import timings_with

pytestmark = [pytest.mark.timeout(120), pytest.mark.second_stage]

GRACE = 1.5
"""Longer than the default, so that a machine that stalls for half a second has no part in the outcome."""

PAUSE = 2.0
"""Seconds for which the server is away in a planned restart."""

SESSIONS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'dblock'"
PIDS = "SELECT pid FROM pg_stat_activity WHERE application_name = 'dblock'"
LISTENER = "SELECT pg_terminate_backend(session) FROM dblock.lock_presence"


def present(client: Any, lease: Any) -> None:
    """Return once other sessions see the client's presence, and the lease is tied to it."""
    flows, state = client._runtime.flows, lease._state

    # The client ties the lease before it sends the request, and the reply shows that the server has tied it too.
    def is_tied() -> bool:
        if flows.presence is not None and state.presence is flows.presence and not state.unreachable:
            return True
        lease.raise_if_lost()
        return False

    eventually(is_tied, "the lease is tied to the presence")
    time.sleep(0.3)  # from then on the client looks at its socket only now and then


def too_late_to_learn(lateness: float) -> bool:
    """Return whether a lease may have been given up only because the machine was late.

    The client learns of the restart within its part of the grace. For that three processes wake up one after another:
    the client that connects, the server that refuses, and the client that reads why.
    """
    return 3 * lateness > GRACE * default.own_part


@contextlib.contextmanager
def sampled(lease: Any) -> Iterator[list[float]]:
    """Read the lease again and again, as a careful holder does."""
    found: list[float] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(0.003):
            found.append(lease.remaining())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("reads", [True, False], ids=["read often", "never read"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["fast", "immediate"])
def test_lease_with_presence_outlasts_a_planned_restart(own_server: Server, how: signal.Signals, reads: bool) -> None:
    with dblock.Client(own_server.url, presence=GRACE) as holder:
        lease = holder.lock("a", ttl=30).acquire()
        present(holder, lease)
        before = lease._state.presence
        with sampled(lease) if reads else contextlib.nullcontext([1.0]) as found:
            stop_slowly(own_server, how)
            time.sleep(PAUSE)
            own_server.start()
            present(holder, lease)
        assert min(found) > 0
        assert lease._state.presence is not before, "the lease is tied to a new presence"
        with dblock.Client(own_server.url) as other, pytest.raises(dblock.LockTimeout):
            other.lock("a").acquire(timeout=0.5)
        lease.raise_if_lost()


def test_lease_of_a_quiet_client_outlasts_a_planned_restart(own_server: Server) -> None:
    """It has two connections. The end of one alone would not show that the server ends all sessions."""
    with dblock.Client(own_server.url, presence=GRACE, timings=timings_with(idle_for=0.1, lasting=0.1)) as holder:
        lease = holder.lock("a", ttl=30).acquire()
        runner = holder._runtime.runner
        assert runner is not None
        with psycopg.connect(own_server.url, autocommit=True) as owner:
            eventually(
                lambda: runner._pool.is_empty() and len(owner.execute(PIDS).fetchall()) == 2, "two connections are left"
            )
        present(holder, lease)
        stop_slowly(own_server)
        time.sleep(PAUSE)
        own_server.start()
        present(holder, lease)


async def test_lease_of_a_blocked_loop_outlasts_a_planned_restart(own_server: Server) -> None:
    with measured() as lateness:
        async with dblock.AsyncClient(own_server.url, presence=GRACE) as holder:
            lease = await holder.lock("a", ttl=30).acquire()
            await eventually_async(lambda: lease._state.presence and not lease._state.unreachable, "a presence")
            await asyncio.sleep(0.3)
            own_server.stop()  # the loop is blocked
            own_server.start()
            await asyncio.sleep(0.1)
            try:
                await lease.renew()
            except dblock.LeaseLost:
                if not too_late_to_learn(lateness()):
                    raise


@pytest.mark.parametrize("reads", [True, False], ids=["read often", "never read"])
def test_lease_with_presence_is_lost_with_a_killed_postmaster(own_server: Server, reads: bool) -> None:
    """Its sessions may continue for a moment, and no new connection is answered: nothing proves that they end."""
    with dblock.Client(own_server.url, presence=GRACE) as holder:
        lease = holder.lock("a", ttl=30).acquire()
        present(holder, lease)
        with sampled(lease) if reads else contextlib.nullcontext():
            assert own_server.pid is not None
            os.kill(own_server.pid, signal.SIGKILL)
            assert lease.lost.wait(5) is True
        assert lease.lost.reason is dblock.Reason.UNREACHABLE
        own_server.stop()
        own_server.start()


def test_lease_outlasts_the_end_of_all_its_sessions_by_an_administrator(own_server: Server) -> None:
    """The server accepts new connections, so the client reports that it is alive."""
    with (
        dblock.Client(own_server.url, presence=GRACE) as holder,
        dblock.Client(conninfo.make_conninfo(own_server.url, application_name="other")) as other,
    ):
        lease = holder.lock("a", ttl=30).acquire()
        present(holder, lease)
        with psycopg.connect(own_server.url, autocommit=True) as owner:
            owner.execute(SESSIONS)
        with pytest.raises(dblock.LockTimeout):
            other.lock("a").acquire(timeout=2 * GRACE)
        lease.raise_if_lost()


def test_holder_whose_session_ends_in_a_smart_shutdown_reports_over_its_other_session(own_server: Server) -> None:
    """The server is shutting down and accepts no connections, but the sessions of waiters continue."""
    with dblock.Client(own_server.url, presence=GRACE) as holder, dblock.Client(own_server.url) as other:
        lease = holder.lock("a", ttl=30).acquire()
        present(holder, lease)
        other.lock("b").acquire()
        with psycopg.connect(own_server.url, autocommit=True) as owner:
            assert own_server.pid is not None
            os.kill(own_server.pid, signal.SIGTERM)
            shutting_down(own_server)
            owner.execute(LISTENER + " ORDER BY session LIMIT 1")
            owner.execute(LISTENER)
            with pytest.raises(dblock.LockTimeout):
                other.lock("a").acquire(timeout=2 * GRACE)
            lease.raise_if_lost()
        own_server.stop()
        own_server.start()


def shutting_down(server: Server) -> None:
    def refuses() -> bool:
        try:
            psycopg.connect(server.url).close()
        except psycopg.OperationalError as error:
            assert "shutting down" in str(error)
            return True
        return False

    eventually(refuses, "the shutdown has begun")


@pytest.mark.usefixtures("seems_direct")
def test_lease_with_presence_is_lost_with_a_proxy(dsn: str) -> None:
    """The connection is refused, but the server lives on."""
    with Proxy(dsn) as proxy, dblock.Client(proxy.dsn) as holder:
        lease = holder.lock("a", ttl=30).acquire()
        present(holder, lease)
        proxy.close()
        assert lease.lost.wait(5) is True
        assert lease.lost.reason is dblock.Reason.UNREACHABLE


@pytest.fixture
def seems_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    from dblock._runtime.listener_connection import ListenerConnection

    monkeypatch.setattr(ListenerConnection, "is_direct", lambda *args: True)


def test_lease_with_presence_outlasts_a_switchover(own_server: Server) -> None:
    """The old primary is shut down in order, then the standby is promoted, as a cluster manager does it."""
    with standby_of(own_server) as standby:
        hosts = [str(conninfo.conninfo_to_dict(each.url)["host"]) for each in (standby, own_server)]
        both = conninfo.make_conninfo(own_server.url, host=",".join(hosts), port="5432,5432")
        with dblock.Client(both, presence=GRACE) as holder:
            lease = holder.lock("a", ttl=30).acquire()
            present(holder, lease)
            wait_until_caught_up(own_server, standby)
            with sampled(lease) as found:
                stop_slowly(own_server)
                promote(standby)
                present(holder, lease)
            assert min(found) > 0
            with dblock.Client(standby.url) as other, pytest.raises(dblock.LockTimeout):
                other.lock("a").acquire(timeout=0.5)
            lease.renew()


@contextlib.contextmanager
def starting_server(address: str, port: int) -> Iterator[None]:
    """Refuse connections as a server does that is starting."""
    refusal = fatal("57P03", "the database system is starting up")
    with socket.create_server((address, port)) as listening:

        def refuse() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection:
                        if connection.recv(4096)[4:8] == (80877103).to_bytes(4, "big"):  # asks for TLS
                            connection.sendall(b"N")
                            connection.recv(4096)
                        connection.sendall(refusal)

        thread = threading.Thread(target=refuse)
        thread.start()
        yield
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_another_server_of_the_same_name_that_starts_proves_nothing(
    tcp_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name has two addresses. The holder's server lives, but refuses the holder's new connections."""
    port = int(str(conninfo.conninfo_to_dict(tcp_dsn)["port"]))
    find = socket.getaddrinfo

    def find_both(host: Any, *args: Any, **options: Any) -> Any:
        addresses = ["127.0.0.1", "127.0.0.2"] if host == "db.example" else [host]
        return [found for address in addresses for found in find(address, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", find_both)
    with (
        starting_server("127.0.0.2", port),
        psycopg.connect(tcp_dsn, autocommit=True) as owner,
    ):
        owner.execute("CREATE ROLE app SUPERUSER LOGIN PASSWORD 'secret'")
        name = conninfo.make_conninfo(tcp_dsn, host="db.example", user="app")
        with dblock.Client(name, presence=GRACE) as holder, dblock.Client(tcp_dsn) as other:
            lease = holder.lock("a", ttl=30).acquire()
            present(holder, lease)
            other.lock("b").acquire().release()
            owner.execute("ALTER ROLE app NOLOGIN")
            owner.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'")
            with other.lock("a").acquire(timeout=10):
                assert lease.lost.is_set()
            owner.execute("ALTER ROLE app LOGIN")
