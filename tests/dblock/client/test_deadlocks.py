"""Deadlocks of clients: exactly one waiter gets the error, the others continue by themselves."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine

import dblock
from dblock._runtime.owners import caller
from tests.support.eventually import eventually, eventually_async
from tests.support.facade import Clients
from tests.support.machine import measured
from tests.support.timings import timings_with


@pytest.fixture
def early(clients: Clients) -> None:
    """Let waiters look for deadlocks after a moment instead of half a second."""
    clients.timings = timings_with(deadlock_look_interval=0.05)


@pytest.fixture
def early_client(dsn: str) -> Iterator[dblock.Client]:
    """A client whose waiters look that early."""
    with dblock.Client(dsn, timings=timings_with(deadlock_look_interval=0.05)) as client:
        yield client


class Ring:
    """Tasks of which each holds a lock and waits for that of the next one."""

    def __init__(self, clients: list[Any], size: int) -> None:
        self._clients = clients
        self._size = size
        self._held = 0
        self._all_held = asyncio.Event()
        self.errors: list[dblock.DeadlockDetected] = []
        self.took = 0.0
        """Seconds from the moment at which all locks were held to the first error."""

    async def run(self) -> Ring:
        await asyncio.wait_for(asyncio.gather(*map(self._hold_and_wait, range(self._size))), 60)
        return self

    async def _hold_and_wait(self, number: int) -> None:
        client = self._clients[number % len(self._clients)]
        lease = await client.lock(f"l{number}").acquire()
        self._held += 1
        if self._held == self._size:
            self._began = time.monotonic()
            self._all_held.set()
        await self._all_held.wait()
        try:
            await (await client.lock(f"l{(number + 1) % self._size}").acquire()).release()
        except dblock.DeadlockDetected as error:
            self.took = self.took or time.monotonic() - self._began
            self.errors.append(error)
        await lease.release()


@pytest.mark.usefixtures("early")
async def test_deadlock_of_two_ends_one_wait_and_the_other_continues(clients: Clients) -> None:
    (error,) = (await Ring([clients(holder="one"), clients(holder="two")], 2).run()).errors
    assert {(wait.waiter, wait.lock) for wait in error.cycle} in (
        {("one", "l1"), ("two", "l0")},
        {("two", "l1"), ("one", "l0")},
    )
    assert error.name == error.cycle[0].lock
    assert "holds under token" in str(error)


@pytest.mark.second_stage
@pytest.mark.alone
@pytest.mark.parametrize("size", [3, 50])
async def test_ring_of_tasks_has_one_victim_soon(dsn: str, size: int) -> None:
    with measured() as lateness:
        async with dblock.AsyncClient(dsn) as first, dblock.AsyncClient(dsn) as second:
            for client in (first, second):
                await (await client.lock("warm").acquire()).release()
            ring = await Ring([first, second], size).run()
            late = lateness()
    (error,) = ring.errors
    assert len(error.cycle) == size
    # All waits begin at once, and their calls take turns. So the last wait of the ring begins a moment later.
    assert ring.took < 1 + size * 0.02 + 10 * late, f"took {ring.took:.2f} s"


@pytest.mark.nightly
@pytest.mark.timeout(7200)
async def test_thousand_rings_of_any_size_have_one_victim_each(dsn: str) -> None:
    chance, took = random.Random(), []
    with measured() as lateness:
        async with dblock.AsyncClient(dsn) as first, dblock.AsyncClient(dsn) as second:
            for _ in range(1000):
                ring = await Ring([first, second], chance.randint(2, 50)).run()
                (error,) = ring.errors
                took.append(ring.took - len(error.cycle) * 0.02)
            late = lateness()
    assert max(took) < 1 + 10 * late, f"took {sorted(took)[-5:]} s with a lateness of {late:.3f} s"


@pytest.mark.second_stage
async def test_repeated_deadlocks_have_one_victim_each(clients: Clients) -> None:
    """Two participants meet in opposite order again and again, each over another pair of locks."""
    pair = [clients(), clients()]
    for _ in range(8):
        assert len((await Ring(pair, 2).run()).errors) == 1


@pytest.mark.second_stage
async def test_waiters_outside_of_a_cycle_continue(clients: Clients) -> None:
    """A third task waits for a lock of the ring while it holds one itself."""
    client = clients()
    entered = asyncio.Event()

    async def wait_outside() -> None:
        lease = await client.lock("outside").acquire()
        entered.set()
        await (await client.lock("l0").acquire()).release()
        await lease.release()

    outside = asyncio.create_task(wait_outside())
    await entered.wait()
    assert len((await Ring([client], 2).run()).errors) == 1
    await asyncio.wait_for(outside, 60)


@pytest.mark.usefixtures("early")
async def test_with_raises_in_the_victim_and_leaves_nothing(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients()
    if isinstance(client, dblock.AsyncClient):
        with pytest.raises(dblock.DeadlockDetected, match="part of a deadlock"):
            async with client.lock("a"), client.lock("a"):
                pass
    else:
        lease = await client.lock("a").acquire()
        with pytest.raises(dblock.DeadlockDetected, match="part of a deadlock"):
            await client.lock("a").acquire()
        await lease.release()
    assert owner.execute("SELECT count(*) FROM lock_tickets").fetchone() == (0,)
    assert owner.execute("SELECT count(*) FROM waiting_holds").fetchone() == (0,)
    assert owner.execute("SELECT count(*) FROM list_locks()").fetchone() == (0,)


@pytest.mark.usefixtures("early")
async def test_deadlock_over_a_read_write_lock_is_found(clients: Clients) -> None:
    """A writer waits for a reader, and the reader waits for a lock of the writer."""
    client = clients()
    reading, holding = asyncio.Event(), asyncio.Event()
    errors: list[dblock.DeadlockDetected] = []

    async def read() -> None:
        lease = await client.read_lock("rw").acquire()
        reading.set()
        await holding.wait()
        await wait_for(client.lock("x"))
        await lease.release()

    async def write() -> None:
        lease = await client.lock("x").acquire()
        holding.set()
        await reading.wait()
        await wait_for(client.write_lock("rw"))
        await lease.release()

    async def wait_for(lock: Any) -> None:
        try:
            await (await lock.acquire()).release()
        except dblock.DeadlockDetected as error:
            errors.append(error)

    await asyncio.wait_for(asyncio.gather(read(), write()), 60)
    (error,) = errors
    assert {wait.lock for wait in error.cycle} == {"rw", "x"}


@pytest.mark.usefixtures("early")
async def test_second_read_behind_a_waiting_writer_is_a_deadlock(clients: Clients) -> None:
    """Read-write locks are not re-entrant: the second read waits for the writer, which waits for the first."""
    client = clients()
    reader = await client.read_lock("rw").acquire()
    assert await (await client.read_lock("rw").acquire()).release(), "no writer waits yet"
    writer = asyncio.ensure_future(client.write_lock("rw").acquire())
    await eventually_async(client.read_lock("rw").queue, "the writer is queued")
    with pytest.raises(dblock.LockTimeout):
        await client.read_lock("rw").acquire(timeout=0.1)
    with pytest.raises(dblock.DeadlockDetected) as caught:
        await client.read_lock("rw").acquire()
    assert [wait.lock for wait in caught.value.cycle] == ["rw"]
    await reader.release()
    await (await writer).release()


# What counts as held.


def test_wait_for_an_own_lock_lasts_until_its_timeout(early_client: dblock.Client) -> None:
    with early_client.lock("a"), pytest.raises(dblock.LockTimeout, match="this client itself holds it"):
        early_client.lock("a", timeout=0.3).acquire()


@pytest.mark.second_stage
def test_lease_that_is_not_renewed_ends_by_itself(client: dblock.Client) -> None:
    lease = client.lock("a", ttl=1.5, keep_alive=False).acquire()
    again = client.lock("a").acquire()
    assert again.token > lease.token
    again.release()


def test_only_leases_of_this_client_and_thread_count(dsn: str, client: dblock.Client) -> None:
    with dblock.Client(dsn) as other, client.lock("a") as lease, other.lock("b"):
        assert [state.token for state in client._runtime.held_by(caller())] == [lease.token]
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.extend(client._runtime.held_by(caller())))
        thread.start()
        thread.join()
        assert found == []


@pytest.mark.second_stage
def test_waiter_that_holds_nothing_leaves_no_note(client: dblock.Client, owner: psycopg.Connection) -> None:
    lease = client.lock("a").acquire()
    outcome: list[object] = []
    thread = threading.Thread(target=lambda: outcome.append(client.lock("a", timeout=20).acquire()))
    thread.start()
    time.sleep(0.8)
    assert owner.execute("SELECT count(*) FROM waiting_holds").fetchone() == (0,)
    lease.release()
    thread.join()
    assert len(outcome) == 1


# Across processes.

OTHER = """
import sys
import dblock
with dblock.Client(sys.argv[1], holder="other") as client:
    with client.lock("theirs"):
        print("held", flush=True)
        sys.stdin.readline()
        try:
            with client.lock("ours"):
                print("acquired", flush=True)
        except dblock.DeadlockDetected:
            print("victim", flush=True)
"""


@pytest.fixture
def other(dsn: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, dsn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.second_stage
def test_deadlock_of_two_processes_has_one_victim(dsn: str, other: subprocess.Popen[str]) -> None:
    assert other.stdin is not None
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    with dblock.Client(dsn, holder="this") as client:
        victim = False
        with client.lock("ours"):
            other.stdin.write("\n")
            other.stdin.flush()
            try:
                with client.lock("theirs"):
                    pass
            except dblock.DeadlockDetected as error:
                victim = True
                assert {wait.waiter for wait in error.cycle} == {"this", "other"}
        assert other.stdout.readline() == ("acquired\n" if victim else "victim\n")


@pytest.mark.second_stage
def test_process_that_died_is_in_no_cycle(dsn: str, other: subprocess.Popen[str], owner: psycopg.Connection) -> None:
    assert other.stdin is not None
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    with dblock.Client(dsn) as client, client.lock("ours"):
        other.stdin.write("\n")
        other.stdin.flush()
        eventually(lambda: owner.execute("SELECT FROM waiting_holds").fetchone() is not None, "the other waits")
        other.kill()
        other.wait()
        with client.lock("theirs", timeout=60) as lease:
            lease.raise_if_lost()


# Across a lock and a row.

UPDATE = "UPDATE public.accounts SET amount = amount + 1 WHERE id = 1"


@pytest.fixture
def accounts(owner: psycopg.Connection) -> None:
    owner.execute("CREATE TABLE public.accounts (id integer PRIMARY KEY, amount integer NOT NULL DEFAULT 0)")
    owner.execute("INSERT INTO public.accounts VALUES (1)")


@pytest.mark.usefixtures("accounts")
@pytest.mark.parametrize("mark", ["bind", pytest.param("assert_held", marks=pytest.mark.second_stage)])
def test_deadlock_over_a_row_is_found(dsn: str, early_client: dblock.Client, mark: str) -> None:
    """One thread has the row and waits for the lock. The holder of the lock waits for the row."""
    client = early_client
    has_row = threading.Event()
    error: list[dblock.DeadlockDetected] = []

    def wait_for_lock() -> None:
        with client.lock("own") as lease, psycopg.connect(dsn) as connection:
            getattr(lease, mark)(connection)
            connection.execute(UPDATE)
            has_row.set()
            try:
                with client.lock("x"):
                    pass
            except dblock.DeadlockDetected as found:
                error.append(found)
                connection.rollback()

    with client.lock("x") as lease, psycopg.connect(dsn) as connection:
        thread = threading.Thread(target=wait_for_lock)
        thread.start()
        has_row.wait(20)
        getattr(lease, mark)(connection)
        connection.execute(UPDATE)  # returns once the other thread has rolled back
        connection.rollback()
    thread.join()
    (wait_for_x, wait_for_row) = error[0].cycle
    assert wait_for_x.lock == "x"
    assert wait_for_row.lock is None
    assert wait_for_row.session is not None
    assert f"waits in session {wait_for_row.session} for session {wait_for_row.blocker}" in str(error[0])


@pytest.mark.second_stage
@pytest.mark.usefixtures("accounts")
async def test_deadlock_over_a_row_is_found_with_asyncio(dsn: str) -> None:
    engine = create_async_engine("postgresql+psycopg://", async_creator=lambda: psycopg.AsyncConnection.connect(dsn))
    has_row = asyncio.Event()
    async with dblock.AsyncClient(dsn) as client:

        async def wait_for_lock() -> None:
            async with client.lock("own") as lease, engine.connect() as connection:
                await lease.bind(connection)
                await connection.execute(sqlalchemy.text(UPDATE))
                has_row.set()
                with pytest.raises(dblock.DeadlockDetected, match="waits in session"):
                    await client.lock("x").acquire()
                await connection.rollback()

        async with client.lock("x") as lease, await psycopg.AsyncConnection.connect(dsn) as connection:
            waiting = asyncio.create_task(wait_for_lock())
            await has_row.wait()
            await lease.bind(connection)
            await connection.execute(UPDATE)
            await connection.rollback()
        await waiting
    await engine.dispose()


@pytest.mark.usefixtures("accounts")
def test_sqlalchemy_connection_is_bound(dsn: str, client: dblock.Client, owner: psycopg.Connection) -> None:
    engine = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
    with client.lock("x") as lease, engine.connect() as connection:
        lease.bind(connection)
        assert owner.execute("SELECT token FROM bound_sessions()").fetchall() == [(lease.token,)]
        connection.rollback()
        assert owner.execute("SELECT token FROM bound_sessions()").fetchall() == []
    engine.dispose()


def test_lost_lease_cannot_be_bound(dsn: str, client: dblock.Client, owner: psycopg.Connection) -> None:
    lease = client.lock("x").acquire()
    owner.execute("SELECT force_release('x', %s, now => true)", [lease.token])
    with psycopg.connect(dsn) as connection, pytest.raises(dblock.LeaseLost):
        lease.bind(connection)
