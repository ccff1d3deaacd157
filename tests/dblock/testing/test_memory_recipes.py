"""Barriers, latches, elections and schedules of the memory clients, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import pytest

import dblock
from dblock.recipes.schedules.schedule import slots_of
from dblock.testing import AsyncMemoryClient, Clock, MemoryChaos, MemoryClient, WaitsForever
from dblock.testing.clock import START


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
async def tasks(client: MemoryClient) -> AsyncIterator[AsyncMemoryClient]:
    """A client for tasks."""
    async with AsyncMemoryClient(client.database, holder="tasks") as tasks:
        yield tasks


@pytest.fixture
async def others(client: MemoryClient) -> AsyncIterator[AsyncMemoryClient]:
    """Another client for tasks."""
    async with AsyncMemoryClient(client.database, holder="others") as others:
        yield others


# Barriers and latches.


async def test_barrier_trips_when_the_last_party_arrives(
    tasks: AsyncMemoryClient, others: AsyncMemoryClient, clock: Clock
) -> None:
    first = [asyncio.create_task(one.barrier("b", parties=3).wait()) for one in (tasks, others)]
    await clock.async_tick(3600)
    assert not any(one.done() for one in first)
    assert await others.barrier("b", parties=3).wait(0) == 2
    await clock.async_tick()
    assert [one.result() for one in first] == [0, 1]


def test_barrier_is_left_when_its_timeout_has_passed(client: MemoryClient, other: MemoryClient, clock: Clock) -> None:
    with pytest.raises(dblock.WaitTimeout, match="did not trip within 3600 s"):
        client.barrier("b", parties=2).wait(3600)
    assert clock() == 3600
    with pytest.raises(dblock.WaitTimeout):
        other.barrier("b", parties=2).wait(0)


def test_latch_that_no_other_thread_can_open_is_not_waited_for(client: MemoryClient, other: MemoryClient) -> None:
    latch = client.latch("l", count=2)
    with pytest.raises(WaitsForever):
        latch.wait()
    assert not client.database.store.barriers.waiters
    assert (latch.count_down(), other.latch("l", count=2).count_down()) == (1, 0)
    latch.wait()


def test_threads_meet_at_a_barrier_on_a_clock_that_waits_do_not_move() -> None:
    with MemoryClient(clock=Clock(auto=False)) as client:
        barrier, numbers = client.barrier("b", parties=3), []
        threads = [threading.Thread(target=lambda: numbers.append(barrier.wait(60))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(numbers) == [0, 1, 2]
        assert client.clock() == 0


# Elections.


def test_leader_is_succeeded_when_its_term_ends(client: MemoryClient, other: MemoryClient, clock: Clock) -> None:
    mine, theirs = client.election("e", value={"at": "here"}), other.election("e")
    with mine.lead() as term:
        clock.tick(3600)
        assert mine.is_leader()
        leader = theirs.leader()
        assert leader is not None
        assert (leader.token, leader.value) == (term.token, {"at": "here"})
        with pytest.raises(dblock.LockTimeout):
            theirs.campaign(timeout=60)
        assert clock() == 3660
    with theirs.lead(0) as next_term:
        assert next_term.token > term.token
    log = [one.how if isinstance(one, dblock.Vacancy) else "leads" for one in mine.observe(0, timeout=0)]
    assert log == ["leads", "resigned", "leads", "resigned"]


def test_body_waits_on_the_clock_for_the_end_of_its_term(client: MemoryClient, clock: Clock) -> None:
    threads, election = set(threading.enumerate()), client.election("e", ttl=30)
    with election.lead() as term:
        assert term.wait(timeout=600) is False
        assert clock() == 600
        assert set(threading.enumerate()) <= threads
        with pytest.raises(WaitsForever):
            term.wait()
        clock.call_later(5, lambda: election.resign())
        assert term.wait() is True
        assert term.ending_reason == "resign"


def test_term_that_another_client_took_is_noticed_with_the_next_renewal(client: MemoryClient, clock: Clock) -> None:
    election = client.election("e", ttl=30)
    with pytest.raises(dblock.LeaseLost), election.lead() as term:
        store = client.database.store
        store.force_release("election:e", term.token, now=True)
        began = clock()
        assert term.wait(3600) is True
        assert clock() - began < 30
        assert not election.is_leader()


def test_term_that_is_not_renewed_ends_the_wait_of_its_body(client: MemoryClient, clock: Clock) -> None:
    with pytest.raises(dblock.LeaseLost), client.election("e", ttl=30).lead() as term:
        client._runtime.keepalive.discard(term._state)
        assert term.wait(3600) is True
        assert clock() == pytest.approx(29.4)


async def test_transfer_and_priority_end_a_term_on_the_clock(
    tasks: AsyncMemoryClient, others: AsyncMemoryClient, clock: Clock
) -> None:
    async def body(term: dblock.AsyncTerm) -> None:
        await term.wait()

    mine, theirs = tasks.election("e"), others.election("e")
    running = [asyncio.create_task(mine.run(body))]
    await clock.async_tick(1)
    assert mine.is_leader()
    running.append(asyncio.create_task(theirs.run(body)))
    await clock.async_tick(1)
    await theirs.transfer(to="others")
    await clock.async_tick(1)
    assert (mine.is_leader(), theirs.is_leader()) == (False, True)
    async with AsyncMemoryClient(tasks.database) as third:
        high = third.election("e", priority=1)
        running.append(asyncio.create_task(high.run(body)))
        await clock.async_tick(2)
        assert high.is_leader()
        for one in (mine, theirs, high):
            one.stop()
        await clock.until(asyncio.gather(*running))


async def test_candidate_waits_for_the_loss_of_a_leader_that_is_gone(
    tasks: AsyncMemoryClient, others: AsyncMemoryClient, clock: Clock
) -> None:
    term = await tasks.election("e", ttl=30).campaign()
    tasks._runtime.keepalive.discard(term._state)  # as if its renewals failed
    waiting = asyncio.create_task(others.election("e").campaign())
    await clock.async_tick(29.5)
    assert not waiting.done()
    assert not term.remaining()
    await clock.async_tick(2)
    assert (await waiting).token > term.token
    with pytest.raises(dblock.LeaseLost):
        await term.end()


def test_frozen_leader_is_not_asked_to_end_and_finds_its_successor(
    client: MemoryClient, other: MemoryClient, clock: Clock
) -> None:
    mine, theirs = client.election("e", ttl=30), other.election("e", priority=1)
    with MemoryChaos(client.database) as chaos, pytest.raises(dblock.LeaseLost), mine.lead() as term:
        chaos.freeze(term)
        next_term = theirs.campaign(timeout=60)
        assert next_term.token > term.token
        assert mine.is_leader(), "it is frozen, and does not know"
        assert term.ending_reason is None
        chaos.thaw(term)
        assert not mine.is_leader()
    next_term.end()


# Schedules.


def test_tick_runs_the_slots_that_are_due(client: MemoryClient, other: MemoryClient, clock: Clock) -> None:
    ran: list[tuple[str, float]] = []

    def job(where: str) -> None:
        ran.append((where, clock()))
        if len(ran) == 2:
            raise ValueError("broken")

    hosts = [one.run_when_due(one.once("job", every=60)(job), where) for one, where in ((client, "a"), (other, "b"))]
    clock.tick(180)
    assert [moment for _, moment in ran] == [0, 60, 120, 180]
    hosts[0].stop()
    other.close()
    clock.tick(180)
    assert len(ran) == 4


def test_cron_expression_is_due_at_its_moments(client: MemoryClient, clock: Clock) -> None:
    ran: list[str] = []

    @client.once("job", cron="30 2 * * *", tz="Europe/Berlin")
    def job() -> None:
        ran.append(f"{dblock.current_run().slot:%m-%d %H:%M}")

    client.run_when_due(job)
    clock.tick(timedelta(days=3))
    assert ran == ["01-01 01:30", "01-02 01:30", "01-03 01:30"]


@pytest.mark.parametrize(
    ("overlap", "ran", "skipped"), [("skip", [0, 30, 60], 4), ("queue", [0, 25, 50], 3), ("allow", [0, 10, 20], 0)]
)
def test_overlap_decides_about_slots_that_are_due_during_a_run(
    client: MemoryClient, clock: Clock, overlap: str, ran: list[int], skipped: int
) -> None:
    job = slots_of(client, "job", every=10, overlap=overlap)
    began: list[float] = []
    active: list[tuple[float, Any]] = []
    while len(began) < 3:
        for ends, run in [one for one in active if one[0] <= clock()]:
            job.end(run, "succeeded")
            active.remove((ends, run))
        _, started = job.claim(queue=False)
        if started is not None:
            began.append(clock())
            active.append((clock() + 25, started))
        clock.tick(5)
    outcomes = [run for run in client.database.store.tables.slot_runs if run.outcome == "skipped"]
    assert (began, sum(run.slots for run in outcomes)) == (ran, skipped)


def test_at_least_keeps_the_next_run_from_starting(client: MemoryClient, clock: Clock) -> None:
    ran: list[float] = []

    @client.once("job", every=10, at_least=25, catch_up="latest")
    def job() -> None:
        ran.append(clock())

    client.run_when_due(job)
    clock.tick(60)
    assert ran == [0, 30, 60]


def test_loop_of_a_host_moves_the_clock_until_it_is_stopped(
    client: MemoryClient, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, ran = threading.Event(), []

    @client.once("job", every=3600)
    def job() -> None:
        ran.append(clock())
        if len(ran) == 3:
            stop.set()

    job.run(stop)
    assert ran == [0, 3600, 7200]
    monkeypatch.setattr("dblock.testing.clock.MOST_PARTS", 20)
    with pytest.raises(WaitsForever):
        client.once("other", every=3600)(lambda: None).run()


async def test_loop_of_a_task_runs_when_the_clock_is_moved(tasks: AsyncMemoryClient, clock: Clock) -> None:
    stop, ran = asyncio.Event(), []

    @tasks.once("job", cron="0 * * * *")
    async def job() -> None:
        ran.append(clock())

    loop = asyncio.create_task(job.run(stop))
    await clock.async_tick(7200)
    assert ran == [0, 3600, 7200]
    stop.set()
    await clock.async_tick()
    assert loop.done()


def test_queued_call_waits_for_the_run_before_it(client: MemoryClient, other: MemoryClient, clock: Clock) -> None:
    first = slots_of(client, "job", every=60, overlap="queue")
    _, run = first.claim()
    assert run is not None
    clock.tick(60)
    clock.call_later(90, lambda: first.end(run, "succeeded"))
    assert other.once("job", every=60, overlap="queue")(clock)() == pytest.approx(150, abs=0.2)
    outcome = first.outcome(START + timedelta(seconds=60))
    assert outcome is not None
    assert outcome.outcome == "succeeded"


def test_schedule_of_another_client_is_refused(client: MemoryClient, other: MemoryClient) -> None:
    with pytest.raises(dblock.InvalidArgument, match="once\\(\\) of the same client"):
        client.run_when_due(other.once("job", every=60)(print))
