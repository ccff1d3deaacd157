"""The memory clients and the clock that the test moves: waits, callbacks, schedules, and what there is not."""

from __future__ import annotations

import asyncio
import pickle
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

import dblock
from dblock.testing import AsyncMemoryClient, Clock, MemoryClient, MemoryDatabase, NotInMemory, WaitsForever
from tests.support.eventually import eventually


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def client(clock: Clock) -> Iterator[MemoryClient]:
    with MemoryClient(clock=clock) as client:
        yield client


@pytest.fixture
def other(client: MemoryClient) -> Iterator[MemoryClient]:
    with MemoryClient(client.database) as other:
        yield other


@pytest.fixture
async def task_client(client: MemoryClient) -> AsyncIterator[AsyncMemoryClient]:
    async with AsyncMemoryClient(client.database) as task_client:
        yield task_client


@pytest.fixture
async def other_task_client(client: MemoryClient) -> AsyncIterator[AsyncMemoryClient]:
    async with AsyncMemoryClient(client.database) as task_client:
        yield task_client


def test_tick_expires_a_lease_that_is_not_kept_alive(client: MemoryClient, other: MemoryClient, clock: Clock) -> None:
    lease = client.lock("a", ttl=30, keep_alive=False).acquire()
    clock.tick(29)
    assert lease.remaining() == pytest.approx(0.4)
    assert other.lock("a").try_acquire() is None
    clock.tick(2)
    assert lease.lost.reason is dblock.Reason.EXPIRED
    assert lease.lost.last_held == datetime(2026, 1, 1, tzinfo=timezone.utc)
    successor = other.lock("a").try_acquire()
    assert successor is not None
    assert successor.token > lease.token
    assert lease.release() is False


def test_tick_renews_a_lease_that_is_kept_alive(client: MemoryClient, clock: Clock) -> None:
    lease = client.lock("a", ttl=30).acquire()
    clock.tick(3600)
    assert lease.remaining() > 19
    assert lease.release()


def test_tick_calls_on_danger_and_on_lost_at_their_moments(client: MemoryClient, clock: Clock) -> None:
    lease = client.lock("a", ttl=30, keep_alive=False).acquire()
    calls: list[tuple[str, float]] = []
    lease.on_danger(lambda left: calls.append((f"{left:.1f} s left", clock())), before=5)
    lease.on_lost(lambda error: calls.append((error.reason, clock())))
    clock.tick(31)
    assert [what for what, _ in calls] == ["5.0 s left", "expired"]
    assert [at for _, at in calls] == [pytest.approx(24.4), pytest.approx(29.4)]


def test_wait_ends_at_the_moment_at_which_the_lease_expires(
    client: MemoryClient, other: MemoryClient, clock: Clock
) -> None:
    client.lock("a", ttl=30, keep_alive=False).acquire()
    assert other.lock("a").acquire(timeout=60)
    assert clock() == pytest.approx(30, abs=1e-3)


def test_wait_moves_the_clock_to_the_end_of_its_timeout(
    client: MemoryClient, other: MemoryClient, clock: Clock
) -> None:
    held = client.lock("a").acquire()
    with pytest.raises(dblock.LockTimeout):
        other.lock("a", timeout=45).acquire()
    assert clock() == pytest.approx(45)
    assert held.remaining() > 0
    assert other.lock("a").queue() == []


def test_wait_that_nothing_ends_raises_and_leaves_no_ticket(client: MemoryClient, other: MemoryClient) -> None:
    held = client.lock("a").acquire()
    with pytest.raises(WaitsForever, match="Give the wait a timeout"):
        other.lock("a").acquire()
    assert client.lock("a").queue() == []
    assert held.release()


@pytest.mark.second_stage
def test_wait_of_a_holder_that_nothing_ends_raises(client: MemoryClient, other: MemoryClient) -> None:
    """It holds another lock, so it looks for a deadlock each half second, and finds none."""
    own, held = client.lock("b").acquire(), other.lock("a").acquire()
    with pytest.raises(WaitsForever):
        client.lock("a").acquire()
    with pytest.raises(WaitsForever):
        own.lost.wait()
    assert client.lock("a").queue() == []
    assert own.release() is held.release() is True


def test_wait_for_an_own_lock_is_a_deadlock(client: MemoryClient, clock: Clock) -> None:
    held = client.lock("a").acquire()
    with pytest.raises(dblock.DeadlockDetected):
        client.lock("a").acquire()
    assert clock() == pytest.approx(0.5)
    assert held.release()


def test_thread_blocks_on_a_clock_that_waits_do_not_move() -> None:
    database = MemoryDatabase(Clock(auto=False))
    holder, waiter = MemoryClient(database), MemoryClient(database)
    held, granted = holder.lock("a").acquire(), list[dblock.Lease]()
    thread = threading.Thread(target=lambda: granted.append(waiter.lock("a").acquire(timeout=60)))
    thread.start()
    eventually(waiter.lock("a").queue, "a waiter")
    database.clock.tick(59)
    assert not granted
    held.release()
    thread.join(20)
    assert [lease.token > held.token for lease in granted] == [True]
    waiter.close()


def test_loss_can_be_waited_for(client: MemoryClient, clock: Clock) -> None:
    lease = client.lock("a", ttl=30, keep_alive=False).acquire()
    assert lease.lost.wait(10) is False
    assert clock() == pytest.approx(10)
    assert lease.lost.wait() is True
    assert clock() == pytest.approx(29.4)


def test_lease_that_is_forgotten_is_released(client: MemoryClient, other: MemoryClient, kept_leases: list[Any]) -> None:
    client.lock("a").acquire()
    with pytest.warns(ResourceWarning, match="never released"):
        kept_leases.clear()
    assert other.lock("a").try_acquire()


def test_closed_client_has_released_its_leases(client: MemoryClient, other: MemoryClient) -> None:
    lease = client.lock("a").acquire()
    client.close()
    assert lease.remaining() == 0
    assert other.lock("a").try_acquire()
    with pytest.raises(dblock.ClientClosed):
        client.lock("a").try_acquire()


def test_schedule_runs_the_slots_that_are_due(client: MemoryClient, other: MemoryClient, clock: Clock) -> None:
    ran: list[str] = []
    on_one, on_other = (
        made.once("report", every=60)(lambda name=name: ran.append(name))
        for made, name in ((client, "one"), (other, "other"))
    )
    on_one()
    assert on_other() is dblock.SKIPPED
    clock.tick(60)
    on_other()
    assert on_one() is dblock.SKIPPED
    assert ran == ["one", "other"]


def test_memory_client_starts_no_thread_and_takes_no_real_time(client: MemoryClient, clock: Clock) -> None:
    threads, began = set(threading.enumerate()), time.monotonic()
    lease = client.lock("a", ttl=30).acquire()
    lease.on_lost(lambda error: None)
    clock.tick(timedelta(hours=1))
    assert lease.remaining() > 0
    assert set(threading.enumerate()) <= threads
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.lock("a").acquire().assert_held(object()),
        lambda client: client.lock("a").acquire().bind(object()),
        lambda client: client.lock("a").acquire().release_in(object()),
        lambda client: client.election("a").campaign().fence(object()),
    ],
)
def test_missing_feature_says_what_is_missing_and_what_to_do(client: MemoryClient, ask: Any) -> None:
    with pytest.raises(NotInMemory, match=r"have no .*\. Test this with a client of Postgres\."):
        ask(client)


def test_clock_and_database_of_a_client_are_checked(client: MemoryClient) -> None:
    for wrong in ("postgresql://localhost", 3):
        with pytest.raises(dblock.InvalidArgument, match="MemoryDatabase"):
            MemoryClient(wrong)  # type: ignore[arg-type]
    with pytest.raises(dblock.InvalidArgument, match="is a dblock.testing.Clock; got 5"):
        MemoryClient(clock=5)  # type: ignore[arg-type]
    with pytest.raises(dblock.InvalidArgument, match="clock already"):
        MemoryClient(client.database, clock=Clock())
    for seconds in (-1, float("inf"), "1"):
        with pytest.raises(dblock.InvalidArgument):
            client.clock.tick(seconds)  # type: ignore[arg-type]
    with pytest.raises(dblock.InvalidArgument, match="time zone"):
        Clock(datetime(2026, 1, 1))
    with pytest.raises(TypeError, match="one process"):
        pickle.dumps(client)


async def test_task_waits_until_the_clock_is_moved(
    task_client: AsyncMemoryClient, other_task_client: AsyncMemoryClient, clock: Clock
) -> None:
    await task_client.lock("a", ttl=30, keep_alive=False).acquire()
    waiting = asyncio.ensure_future(other_task_client.lock("a").acquire(timeout=60))
    await clock.async_tick(29)
    assert not waiting.done()
    await clock.async_tick(2)
    assert (await waiting).remaining() == pytest.approx(28.4, abs=1e-3), "granted when the lease expired"


async def test_until_moves_the_clock_as_far_as_needed(
    task_client: AsyncMemoryClient, other_task_client: AsyncMemoryClient, clock: Clock
) -> None:
    held = await task_client.lock("a").acquire()
    with pytest.raises(dblock.LockTimeout):
        await clock.until(other_task_client.lock("a").acquire(timeout=45))
    assert clock() == pytest.approx(45)
    assert await held.release()


@pytest.mark.second_stage
async def test_until_raises_if_nothing_ends_the_wait(
    task_client: AsyncMemoryClient, other_task_client: AsyncMemoryClient, clock: Clock
) -> None:
    held = await task_client.lock("a").acquire()
    with pytest.raises(WaitsForever):
        await clock.until(other_task_client.lock("a").acquire())
    assert await task_client.lock("a").queue() == []
    assert await held.release()


async def test_body_is_cancelled_when_the_clock_reaches_the_loss(task_client: AsyncMemoryClient, clock: Clock) -> None:
    async def body() -> None:
        async with task_client.lock("a", ttl=30, keep_alive=False):
            await asyncio.Event().wait()

    running = asyncio.ensure_future(body())
    await clock.async_tick(31)
    with pytest.raises(dblock.LeaseLost, match="expired"):
        await running


async def test_coroutine_is_called_back_in_the_loop(task_client: AsyncMemoryClient, clock: Clock) -> None:
    called = asyncio.Event()

    async def callback(error: dblock.LeaseLost) -> None:
        called.set()

    lease = await task_client.lock("a", ttl=30, keep_alive=False).acquire()
    lease.on_lost(callback)
    await clock.async_tick(31)
    assert called.is_set()


def scenario(clock: Clock) -> list[Any]:
    """Return what a program sees that locks, loses and waits."""
    client = MemoryClient(clock=clock)
    other = MemoryClient(client.database)
    kept, lost = client.lock("kept", ttl=30).acquire(), client.lock("lost", ttl=30, keep_alive=False).acquire()
    seen: list[Any] = [kept.token, kept.expires_at, lost.token]
    lost.on_lost(lambda error: seen.append((error.reason, clock())))
    clock.tick(31)
    taken = other.lock("lost").acquire(timeout=5)
    seen += [kept.remaining(), lost.lost.last_held, taken.token, taken.expires_at]
    with pytest.raises(dblock.LockTimeout):
        other.lock("kept").acquire(timeout=5)
    return [*seen, clock(), kept.release(), taken.release()]


@pytest.mark.parametrize("tool", ["freezegun", "time_machine"])
def test_frozen_time_changes_nothing(tool: str) -> None:
    expected = scenario(Clock())
    moment = datetime(2001, 2, 3, tzinfo=timezone.utc)
    if tool == "freezegun":
        freezegun = pytest.importorskip("freezegun")
        with freezegun.freeze_time(moment) as frozen:
            assert scenario(Clock()) == expected
            frozen.tick(timedelta(days=1))
            assert scenario(Clock()) == expected
    else:
        time_machine = pytest.importorskip("time_machine")
        with time_machine.travel(moment, tick=False) as traveller:
            assert scenario(Clock()) == expected
            traveller.shift(86_400)
            assert scenario(Clock()) == expected


@pytest.mark.alone
@pytest.mark.second_stage
def test_hour_passes_in_less_than_fifty_milliseconds() -> None:
    """A lease that is kept alive, one that is lost, and a waiter, for an hour."""

    def hour() -> float:
        clock = Clock()
        client = MemoryClient(clock=clock)
        other = MemoryClient(client.database)
        kept, lost = client.lock("a").acquire(), client.lock("b", keep_alive=False).acquire()
        began = time.thread_time()
        with pytest.raises(dblock.LockTimeout):
            other.lock("a").acquire(timeout=3600)
        took = time.thread_time() - began
        assert kept.remaining() > 0
        assert lost.lost.is_set()
        client.close()
        return took

    took = min(hour() for _ in range(5))
    assert took < 0.050, f"{took * 1e3:.1f} ms"


@pytest.mark.second_stage
def test_acquire_and_release_cost_less_than_six_hundred_function_calls() -> None:
    """A pair takes some 370, which are less than 20 µs at 50 ns a call. The rest is for other versions of Python.

    Both are measured in turns, so that the speed of the machine does not count.
    """

    def empty(value: int) -> int:
        return value

    def calls() -> None:
        for number in range(1000):
            empty(number)

    with MemoryClient() as client:
        lock = client.lock("a")

        def pairs() -> None:
            for _ in range(20):
                lock.acquire().release()

        pairs()
        rounds = [(_seconds(pairs) / 20, _seconds(calls) / 1000) for _ in range(500)]
    pair, call = (min(took) for took in zip(*rounds, strict=True))
    assert pair < 600 * call, f"a pair took {pair * 1e6:.1f} µs, a call {call * 1e9:.0f} ns"


def _seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def test_import_needs_no_pytest_and_opens_nothing() -> None:
    import subprocess

    script = (
        "import sys, threading, dblock.testing; dblock.testing.MemoryClient().lock('a').acquire().release();"
        " print(threading.active_count(), 'pytest' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "1 False\n"
