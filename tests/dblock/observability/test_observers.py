"""Observers: what a client tells them, and what it costs if there are none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
import threading
import timeit
from typing import Any

import psycopg
import pytest

import dblock
from dblock._core.lease_flows import LeaseFlows
from dblock.observability import ObservedWait, Observer
from tests.dblock.observability.recorder import Recorder
from tests.support.eventually import eventually, eventually_async
from tests.support.facade import Clients
from tests.support.timings import timings_with


async def test_pair_is_reported_as_one_wait_and_one_hold(clients: Clients) -> None:
    seen = Recorder()
    async with clients(observers=[seen], holder="me").lock("a:1") as lease:
        token = lease.token
        await asyncio.sleep(0.01)
    assert seen.events == ["wait_began", "wait_ended", "hold_began", "hold_ended"]
    (wait,), (hold,) = seen.waits, seen.holds
    assert (wait.locks, wait.holder, wait.outcome, wait.token) == (("a:1",), "me", "granted", token)
    assert wait.handoff is None, "the lock was free"
    assert (hold.lock, hold.holder, hold.token, hold.lost) == ("a:1", "me", token, None)
    assert wait.seconds > 0
    assert hold.seconds > 0.01


async def test_wait_without_a_grant_is_reported_with_its_outcome(clients: Clients) -> None:
    seen = Recorder()
    client = clients(observers=[seen])
    async with clients().lock("a") as other:
        assert await client.lock("a").try_acquire() is None
        for timeout in (0, 0.05):
            with pytest.raises(dblock.LockTimeout):
                await client.lock("a").acquire(timeout=timeout)
        with pytest.raises(dblock.LockTimeout):
            await client.lock_all(["a", "b"]).acquire(timeout=0.05)
        with pytest.raises(dblock.LockTimeout):
            await client.lock_any(["a"]).acquire(timeout=0.05)
        assert other.remaining()
    assert seen.outcomes == ["busy", "busy", "timeout", "timeout", "timeout"]
    assert [wait.token for wait in seen.waits] == [None] * 5
    assert seen.waits[2].seconds >= 0.05
    assert [hold for hold in seen.holds if hold.lost] == []


async def test_queued_wait_is_reported_with_the_time_of_its_hand_off(clients: Clients) -> None:
    seen = Recorder()
    lease = await clients().lock("a").acquire()
    waiting = asyncio.create_task(clients(observers=[seen]).lock("a").acquire())
    await eventually_async(clients().lock("a").queue, "a waiter")
    await lease.release()
    await (await waiting).release()
    (wait,) = seen.waits
    assert wait.handoff is not None
    assert 0 < wait.handoff < wait.seconds


async def test_cancelled_wait_is_reported(dsn: str) -> None:
    seen = Recorder()
    async with dblock.AsyncClient(dsn, observers=[seen]) as client, client.lock("a"):
        waiting = asyncio.create_task(client.lock("a").acquire())
        await eventually_async(client.lock("a").queue, "a waiter")
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
    assert seen.outcomes == ["granted", "cancelled"]
    assert isinstance(seen.waits[1].error, asyncio.CancelledError)


async def test_deadlock_and_database_error_are_reported(clients: Clients) -> None:
    seen = Recorder()
    client = clients(observers=[seen], timings=timings_with(deadlock_look_interval=0.05))

    async def hold_and_wait(mine: str, other: str) -> None:
        async with client.lock(mine):
            started.append(mine)
            await eventually_async(lambda: len(started) == 2, "both tasks hold a lock")
            with contextlib.suppress(dblock.DeadlockDetected):
                await (await client.lock(other).acquire()).release()

    started: list[str] = []
    await asyncio.gather(hold_and_wait("a", "b"), hold_and_wait("b", "a"))
    assert sorted(map(str, seen.outcomes)) == ["deadlock", "granted", "granted", "granted"]
    with pytest.raises(dblock.WrongKind):
        await client.semaphore("a", permits=2).acquire()
    assert seen.outcomes[-1] == "error"


async def test_set_of_locks_is_one_wait_and_a_hold_for_each(clients: Clients) -> None:
    seen = Recorder()
    client = clients(observers=[seen])
    async with client.lock_all(["b", "a"]):
        pass
    async with client.lock_any(["d", "c"]) as lease:
        token = lease.token
    assert [(wait.locks, wait.outcome, wait.token) for wait in seen.waits] == [
        (("a", "b"), "granted", None),
        (("d", "c"), "granted", token),
    ]
    assert [(hold.lock, hold.lost) for hold in seen.holds] == [("a", None), ("b", None), ("d", None)]


async def test_shared_lock_is_reported_under_the_name_that_users_know(clients: Clients) -> None:
    seen = Recorder()
    client = clients(observers=[seen])
    async with client.semaphore("gpu:a", permits=2), client.read_lock("rw:a"):
        pass
    write = await client.write_lock("w").acquire()
    read = await write.downgrade()
    await read.release()
    assert [hold.lock for hold in seen.holds] == ["rw:a", "gpu:a", "w", "w"]
    assert seen.holds[2].token != seen.holds[3].token


async def test_efficiency_lock_is_reported_without_a_token(clients: Clients) -> None:
    seen = Recorder()
    async with clients(observers=[seen]).efficiency_lock("a"):
        pass
    assert (seen.waits[0].token, seen.holds[0].token) == (None, None)


async def test_reentrant_lease_is_one_hold_that_ends_with_its_last_lease(clients: Clients) -> None:
    seen = Recorder()
    lock = clients(observers=[seen]).lock("a", reentrant=True)
    async with lock, lock:
        pass
    assert seen.events == ["wait_began", "wait_ended", "hold_began", "hold_ended"]


def test_term_and_slot_are_holds_of_their_locks(dsn: str) -> None:
    seen = Recorder()
    with dblock.Client(dsn, observers=[seen]) as client:
        client.election("e").campaign().end()

        @client.once("job", every=0.1)
        def job() -> None: ...

        eventually(lambda: job() is not dblock.SKIPPED, "a run of the job")
    assert [(hold.lock, hold.lost) for hold in seen.holds] == [("election:e", None), (seen.holds[1].lock, None)]
    assert "job" in seen.holds[1].lock


@pytest.mark.second_stage
async def test_lost_lease_is_reported_once_with_its_reason(clients: Clients, owner: psycopg.Connection) -> None:
    seen = Recorder()
    client = clients(observers=[seen])
    expiring = await client.lock("expires", ttl=0.2, keep_alive=False).acquire()
    forced = await client.lock("forced", ttl=60).acquire()
    await asyncio.sleep(0.25)
    assert expiring.remaining() == 0
    assert await expiring.release() is False
    owner.execute("SELECT force_release('forced', %s, now => true)", [forced.token])
    assert await forced.release() is False, "the release finds that the lease is gone"
    assert {hold.lock: hold.lost for hold in seen.holds} == {"expires": "expired", "forced": "forced"}
    assert len(seen.holds) == 2


async def test_lost_lease_of_a_set_is_reported_when_its_release_finds_out(
    clients: Clients, owner: psycopg.Connection
) -> None:
    seen = Recorder()
    # Without a presence, so that no renewal comes between the two statements and finds that the lease was forced.
    held = await clients(observers=[seen], presence=None).lock_all(["a", "b"]).acquire()
    owner.execute("SELECT force_release('b', %s, now => true)", [held["b"].token])
    owner.execute("SELECT try_acquire('b')")
    assert await held.release() is False
    assert {hold.lock: hold.lost for hold in seen.holds} == {"a": None, "b": "superseded"}


async def test_lease_that_ends_with_its_client_is_reported(clients: Clients) -> None:
    seen = Recorder()
    client = clients(observers=[seen])
    await client.lock("a").acquire()
    await client.close()
    assert [(hold.lock, hold.lost) for hold in seen.holds] == [("a", None)]


@pytest.mark.second_stage
async def test_renewal_is_reported_with_the_margin_that_was_left(clients: Clients) -> None:
    seen = Recorder()
    async with clients(observers=[seen], presence=None).lock("a", ttl=2) as lease:
        await eventually_async(lambda: seen.renewals or not lease.remaining(), "a renewal")
        assert lease.remaining()
    assert 0 < seen.renewals[0] < 2
    assert 0 < seen.margins[0] < 0.98


async def test_listener_is_reported_when_it_comes_and_goes(clients: Clients, owner: psycopg.Connection) -> None:
    seen = Recorder()
    client = clients(observers=[seen], presence=None)
    async with clients(presence=None).lock("a"):
        waiting = asyncio.create_task(client.lock("a").acquire(timeout=30))
        await eventually_async(lambda: seen.listeners == [False, True])
        owner.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await eventually_async(lambda: seen.listeners[2:4] == [False, True])
    await (await waiting).release()
    await client.close()
    assert seen.listeners[-1] is None


async def test_failing_observer_does_not_disturb_the_others(clients: Clients, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Observer):
        def wait_began(self, wait: ObservedWait) -> None:
            raise RuntimeError("broken")

    seen = Recorder()
    with caplog.at_level(logging.ERROR, "dblock"):
        async with clients(observers=[Broken(), seen]).lock("a"):
            pass
    assert seen.events == ["wait_began", "wait_ended", "hold_began", "hold_ended"]
    assert [record.message for record in caplog.records] == ["observer: wait_began of 'Broken' failed"]


@pytest.mark.parametrize("wrong", [Recorder(), [object()], "prometheus", [Recorder]])
def test_client_refuses_observers_that_are_not_a_list_of_observers(wrong: Any) -> None:
    with pytest.raises(dblock.InvalidArgument, match="observers is a list"):
        dblock.Client("postgresql://127.0.0.1:1/none", observers=wrong)


def test_wait_and_the_beginning_of_a_hold_are_reported_in_the_thread_of_the_caller(dsn: str) -> None:
    seen = Recorder()
    with dblock.Client(dsn, observers=[seen]) as client:
        threads: list[int] = []

        def pair() -> None:
            threads.append(threading.get_ident())
            with client.lock("a"):
                pass

        thread = threading.Thread(target=pair)
        thread.start()
        thread.join()
    assert [seen.threads[event] for event in ("wait_began", "wait_ended", "hold_began")] == threads * 3


def test_client_without_observers_calls_no_code_of_observers(dsn: str) -> None:
    """Not one function: the module that has them is not even imported."""
    script = f"""
import sys, dblock
with dblock.Client({dsn!r}) as client:
    with client.lock("a"):
        pass
    client.lock("b").try_acquire().release()
    with client.lock_all(["c", "d"]):
        pass
print(*[name for name in sys.modules if "observ" in name or "prometheus" in name or "opentelemetry" in name])
"""
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == ""


@pytest.mark.second_stage
@pytest.mark.alone
def test_missing_observers_cost_less_than_a_microsecond_per_pair(client: dblock.Client) -> None:
    """The steps of a pair with the place for observers, less the same steps without it."""
    lock = client.lock("a")
    lease = lock.try_acquire()
    assert lease is not None
    flows, options, state, runtime = lock._flows, lock._options, lease._state, client._runtime
    lease_flows: Any = LeaseFlows(flows, state)

    def look() -> None:  # as `track` does
        if runtime.flows.observation is not None:
            raise AssertionError

    pairs = [
        (lambda: lock._trying("x"), lambda: flows.try_acquire(options, "x")),
        (lease_flows.release, lease_flows._release),
        (look, lambda: None),
    ]
    rounds = 2_000
    added = 0.0
    for with_place, without in pairs:
        # The quickest of many: whatever else the machine does can only add to it.
        best = [min(timeit.repeat(one, number=rounds, repeat=30)) / rounds for one in (with_place, without)]
        added += best[0] - best[1]
    lease.release()
    assert added < 1e-6, f"{added * 1e9:.0f} ns"
