"""An AsyncClient whose event loop is blocked, stopped or closed."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine

import dblock
from dblock._runtime.listener_connection import ListenerConnection, LoopReader
from tests.dblock.client.test_engines import url
from tests.support.eventually import eventually, eventually_async
from tests.support.forks import run_in_fork
from tests.support.machine import measured, too_late_to_renew

FREE_ROW = "UPDATE distributed_locks SET expires_at = '-infinity', released_at = clock_timestamp()"
HELD = "SELECT count(*) FROM holder('a')"


def block(seconds: float) -> None:
    time.sleep(seconds)


def block_until_renewed(lease: dblock.AsyncLease) -> None:
    """Block this thread until the lease was renewed because it was due, and not only to tie it to a presence."""
    beyond = lease.expires_at + timedelta(seconds=1)
    eventually(lambda: lease.lost.is_set() or lease.expires_at > beyond)


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert [thread.name for thread in threading.enumerate() if thread not in before] == []


@pytest.mark.second_stage
@pytest.mark.parametrize("ttl", [1.0, 1.5])
@pytest.mark.parametrize("settled", [False, True], ids=["at once", "after a while"])
async def test_loop_blocked_for_three_ttls_keeps_its_lease(
    dsn: str,
    ttl: float,
    settled: bool,
    caplog: pytest.LogCaptureFixture,
    owner: psycopg.Connection,
    presence_offered: bool,
) -> None:
    with measured() as lateness:
        async with dblock.AsyncClient(dsn) as client:
            for _ in range(2):
                try:
                    async with client.lock("a", ttl=ttl) as lease:
                        if settled:
                            await asyncio.sleep(0.3)
                        caplog.clear()
                        began = time.monotonic()
                        block(3 * ttl)
                        assert lease.remaining() > ttl / 3
                        assert owner.execute(HELD).fetchone() == (1,)
                        await asyncio.sleep(0.1)
                        took = time.monotonic() - began
                        lease.raise_if_lost()
                except (AssertionError, dblock.LeaseLost):
                    if too_late_to_renew(lateness(), ttl):
                        return
                    raise
                check_warning(caplog, 2 * ttl, took, presence_offered)


def check_warning(caplog: pytest.LogCaptureFixture, least: float, most: float, presence_offered: bool) -> None:
    """Check that one warning says for how long the loop was blocked. A machine that stalls causes shorter ones."""
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    if not presence_offered:
        warnings = [warning for warning in warnings if "There is no presence" not in warning]
    found = [re.search(r"did not run for at least ([0-9.]+) s", warning) for warning in warnings]
    (seconds,) = [said for one in found if one is not None and (said := float(one[1])) > least]
    assert all(found), warnings
    assert seconds < most + 0.06  # the warning is rounded to tenths


@pytest.mark.second_stage
async def test_loss_is_known_to_every_thread_while_the_loop_is_blocked(dsn: str, owner: psycopg.Connection) -> None:
    seen: list[Any] = []

    def watch(lease: dblock.AsyncLease) -> None:
        owner.execute(FREE_ROW)
        eventually(lambda: lease._state.loss)
        seen.extend([lease.lost.reason, lease.remaining(), cancelled])

    cancelled = False
    async with dblock.AsyncClient(dsn) as client:
        with pytest.raises(dblock.LeaseLost, match="forced"):
            async with client.lock("a", ttl=4) as lease:
                watching = threading.Thread(target=watch, args=(lease,))
                watching.start()
                watching.join()  # the loop is blocked
                try:
                    await asyncio.sleep(30)
                except asyncio.CancelledError:
                    cancelled = True
                    raise
    assert seen == [dblock.Reason.FORCED, 0, False]
    assert cancelled, "the body was cancelled once the loop ran again"


@pytest.mark.second_stage
async def test_waiter_whose_loop_is_blocked_does_not_hold_up_the_queue(dsn: str) -> None:
    """Its thread could send heartbeats for ever, and no waiter behind it would be granted the lock."""
    with dblock.Client(dsn) as other:
        held = other.lock("a", ttl=60).acquire()
        async with dblock.AsyncClient(dsn) as client:
            first = asyncio.create_task(client.lock("a").acquire())
            await eventually_async(client.lock("a").queue, "the first waiter is queued")
            behind: list[float] = []

            def wait_behind() -> None:
                with other.lock("a", timeout=30):
                    behind.append(time.monotonic())

            thread = threading.Thread(target=wait_behind)
            thread.start()
            eventually(lambda: len(other.lock("a").queue()) == 2)
            released = time.monotonic()
            held.release()
            thread.join()  # the loop is blocked
            assert behind[0] - released < 6
            lease = await asyncio.wait_for(first, 5)
            assert await lease.release()


@pytest.mark.usefixtures("no_thread_left", "patient")
async def test_closed_client_leaves_no_thread_behind(dsn: str) -> None:
    client = dblock.AsyncClient(dsn)
    async with client.lock("a"):
        with pytest.raises(dblock.LockTimeout):
            await client.lock("a").acquire(timeout=0.05)
    await client.close()


@pytest.mark.second_stage
@pytest.mark.usefixtures("no_thread_left")
def test_client_whose_loop_was_closed_releases_its_leases_and_ends(dsn: str, owner: psycopg.Connection) -> None:
    async def acquire() -> dblock.AsyncLease:
        return await client.lock("a", ttl=3).acquire()

    client = dblock.AsyncClient(dsn)
    lease = asyncio.run(acquire())
    began = time.monotonic()
    eventually(lambda: owner.execute(HELD).fetchone() == (0,), "the lease is released")
    assert time.monotonic() - began < 2.5
    assert lease.remaining() == 0
    eventually(lambda: not client._runtime.keepalive.running and not client._runtime.listener.running)
    with pytest.raises(dblock.DblockError, match="another event loop"):
        asyncio.run(acquire())


@pytest.mark.second_stage
def test_lease_is_kept_while_its_loop_does_not_run(dsn: str) -> None:
    loop = asyncio.new_event_loop()
    client = dblock.AsyncClient(dsn)
    lease = loop.run_until_complete(client.lock("a", ttl=4).acquire())
    for _ in range(3):
        block_until_renewed(lease)
    assert lease.remaining() > 0
    assert loop.run_until_complete(lease.release())
    loop.run_until_complete(client.close())
    loop.close()


@pytest.mark.second_stage
@pytest.mark.usefixtures("no_thread_left")
async def test_clients_of_several_loops_one_after_the_other_keep_their_leases(dsn: str) -> None:
    def one_loop() -> None:
        async def hold() -> None:
            async with dblock.AsyncClient(dsn) as client, client.lock("a", ttl=4) as lease:
                block_until_renewed(lease)
                lease.raise_if_lost()

        asyncio.run(hold())

    for _ in range(3):
        thread = threading.Thread(target=one_loop)
        thread.start()
        thread.join()


@pytest.mark.second_stage
async def test_child_of_a_fork_leaves_the_lease_and_the_threads_of_its_parent_alone(dsn: str) -> None:
    async with dblock.AsyncClient(dsn) as client, client.lock("a") as lease:
        assert run_in_fork(lambda: lease.remaining() == 0 and threading.active_count() == 1) == 0
        await lease.renew()


@pytest.mark.usefixtures("needs_presence")
@pytest.mark.second_stage
def test_child_of_a_fork_does_not_keep_its_parents_presence_alive(dsn: str) -> None:
    """The child has a copy of each socket of its parent, also of those that the event loop watches."""
    script = (
        "import asyncio, dblock, os, signal, sys, time\n"
        "async def main():\n"
        "    client = dblock.AsyncClient(sys.argv[1])\n"
        "    lease = await client.lock('a', ttl=60).acquire()\n"
        "    while lease._state.presence is None:\n"
        "        await asyncio.sleep(0.01)\n"
        "    await asyncio.sleep(0.2)\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(5)\n"
        "        os._exit(0)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script, dsn], timeout=30, check=False)
    with dblock.Client(dsn) as client:
        client.lock("a").acquire(timeout=3).release()


@pytest.mark.second_stage
@pytest.mark.parametrize("ending", ["return", "raise SystemExit(0)", "time.sleep(1)"])
def test_program_that_ends_without_closing_releases_its_lease(dsn: str, owner: psycopg.Connection, ending: str) -> None:
    script = (
        "import asyncio, dblock, sys, time\n"
        "async def main():\n"
        "    global lease, client\n"
        "    client = dblock.AsyncClient(sys.argv[1])\n"
        "    lease = await client.lock('a', ttl=60).acquire()\n"
        f"    {ending}\n"
        "asyncio.run(main())\n"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, dsn], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - began < 10
    assert owner.execute(HELD).fetchone() == (0,)


@pytest.mark.second_stage
@pytest.mark.parametrize("ending", ["pass", "lease = client = None; gc.collect()"], ids=["exit", "garbage-collected"])
def test_program_with_an_engine_that_does_not_close_releases_its_lease(tcp_dsn: str, ending: str) -> None:
    """Only the engine's creator knows how to connect, to a host by its name."""
    script = (
        "import asyncio, dblock, gc, psycopg, sys\n"
        "from sqlalchemy.ext.asyncio import create_async_engine\n"
        "def connect():\n"
        "    return psycopg.AsyncConnection.connect(sys.argv[1])\n"
        "async def main():\n"
        "    global lease, client\n"
        "    engine = create_async_engine('postgresql+psycopg://', async_creator=connect)\n"
        "    client = dblock.AsyncClient(engine, presence=None)\n"
        "    lease = await client.lock('a', ttl=60).acquire()\n"
        f"    {ending}\n"
        "asyncio.run(main())\n"
    )
    named = tcp_dsn.replace("127.0.0.1", "localhost")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, named], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    with psycopg.connect(tcp_dsn) as observer:
        assert observer.execute(HELD.replace("holder", "dblock.holder")).fetchone() == (0,)


@pytest.mark.usefixtures("needs_presence")
@pytest.mark.second_stage
@pytest.mark.parametrize("how", ["creator", "event"])
async def test_threads_connect_as_the_async_engine_does(dsn: str, owner: psycopg.Connection, how: str) -> None:
    async def create() -> psycopg.AsyncConnection[Any]:
        return await psycopg.AsyncConnection.connect(dsn, application_name="by the engine")

    options: dict[str, Any] = {"async_creator": create} if how == "creator" else {}
    engine = create_async_engine(url(dsn), **options)
    if how == "event":

        def name(connection: Any, record: Any) -> None:
            connection.cursor().execute("SET application_name TO 'by the engine'")
            connection.commit()

        event.listen(engine.sync_engine, "connect", name)
    async with dblock.AsyncClient(engine) as client, client.lock("a", ttl=4) as lease:
        await eventually_async(lambda: lease._state.presence, "the lease has its presence")
        block_until_renewed(lease)
        lease.raise_if_lost()
        sessions = owner.execute(
            "SELECT count(*), count(*) FILTER (WHERE application_name = 'by the engine') FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        ).fetchone()
        assert sessions == (3, 3)
    await engine.dispose()


def test_loop_that_closes_before_it_stops_reading_keeps_no_socket(dsn: str) -> None:
    loop = asyncio.new_event_loop()
    connection = ListenerConnection(psycopg.connect(dsn), lambda payload: None)
    reader = LoopReader(loop, connection, lambda: None)
    loop.run_until_complete(asyncio.sleep(0))
    number = reader._socket
    assert number is not None
    connection.close()
    reader.stop()  # the loop does not run any more
    loop.close()
    del reader
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
