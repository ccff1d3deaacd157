"""lock_all and lock_any, on both kinds of client: all or nothing, exactly one, no deadlock, and nothing left behind."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

import dblock
from dblock._core.effects import Call
from tests.dblock.client.test_cancellation import each_await, idle_again
from tests.support.closing import closing_before
from tests.support.eventually import eventually_async
from tests.support.facade import Clients
from tests.support.machine import before_long
from tests.support.timings import timings_with

TTL = 600
"""Seconds of a lease that would outlast the patience of the test if nothing released it."""


def held(owner: psycopg.Connection) -> list[str]:
    """Return the names of the locks that are held."""
    rows = owner.execute("SELECT name FROM distributed_locks WHERE expires_at > clock_timestamp() ORDER BY name")
    return [name for (name,) in rows]


def tickets(owner: psycopg.Connection) -> list[str]:
    """Return the names of the locks for which a ticket exists, once for each ticket."""
    return [name for (name,) in owner.execute("SELECT name FROM lock_tickets ORDER BY name, number")]


async def nothing_stays(owner: psycopg.Connection) -> None:
    """Wait until no lock is held and no ticket is left."""
    await eventually_async(lambda: not held(owner) and not tickets(owner))


@contextmanager
def statements(clients: Clients) -> Iterator[list[str]]:
    """Collect the names of dblock's functions that clients of this database call in the body, in order."""
    called: list[str] = []
    with clients.before_calls(called.append):
        yield called


async def test_set_has_a_lease_for_each_name(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients()
    async with client.lock_all(["b", "a", "b", "c"], ttl=TTL, meta={"why": "test"}) as locks:
        assert list(locks) == ["a", "b", "c"]
        assert held(owner) == ["a", "b", "c"]
        assert locks.tokens == {name: locks[name].token for name in "abc"}
        assert locks.tokens["a"] < locks.tokens["b"] < locks.tokens["c"]
        assert 0 < locks.remaining() <= min(locks[name].remaining() for name in locks) + 1
        assert not locks.lost.is_set()
        assert (locks.lost.name, locks.lost.reason) == (None, None)
        locks.raise_if_lost()
    assert held(owner) == []
    assert locks.remaining() == 0
    assert not locks.lost.is_set()
    with pytest.raises(dblock.LeaseLost, match="over"):
        locks.raise_if_lost()


async def test_empty_set_holds_nothing_and_sends_nothing(clients: Clients) -> None:
    with statements(clients) as called:
        async with clients().lock_all([]) as locks:
            assert len(locks) == 0
            assert locks.tokens == {}
            assert locks.remaining() == math.inf
            assert not locks.lost.is_set()
            locks.raise_if_lost()
    assert called == []
    assert await locks.release() is True
    assert await clients().lock_all([]).try_acquire(), "an empty set was acquired"


async def test_free_locks_take_one_call_and_one_release(clients: Clients) -> None:
    client = clients(presence=None)
    await client.lock("warm").holder()
    with statements(clients) as called:
        locks = await client.lock_all([f"{number}" for number in range(10)]).acquire()
        assert await locks.release() is True
        lease = await client.lock_any(["x", "y"]).acquire()
    assert called == ["acquire_all", "release_all", "acquire_any"]
    assert lease.name == "x"


@pytest.mark.second_stage
async def test_leases_of_a_set_are_renewed_in_one_statement(clients: Clients) -> None:
    client = clients(presence=None)
    async with client.lock_all([f"{number}" for number in range(10)], ttl=6) as locks:
        with statements(clients) as called:
            before = locks["9"].expires_at
            await eventually_async(lambda: locks["9"].expires_at > before)
            await eventually_async(lambda: "renew_all" in called)
        assert called == ["renew_all"]
        assert all(locks[name].remaining() > 4 for name in locks)


async def test_try_gets_all_or_none(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients()
    async with client.lock("b") as other:
        assert await client.lock_all(["a", "b", "c"]).try_acquire() is None
        assert await client.lock_any(["b"]).try_acquire() is None
        assert held(owner) == ["b"]
        assert tickets(owner) == []
        assert other.remaining() > 0
        got = await client.lock_any(["b", "d"]).try_acquire()
        assert got.name == "d"
        assert await got.release() is True


async def test_timeout_names_the_lock_and_leaves_nothing(
    clients: Clients, owner: psycopg.Connection, patient: None
) -> None:
    mine, other = clients(), clients()
    async with other.lock("b"):
        with pytest.raises(dblock.LockTimeout, match="waited for lock 'b', and another client holds it") as caught:
            await mine.lock_all(["a", "b", "c"], timeout=0.05).acquire()
        assert (caught.value.name, caught.value.names) == ("b", ("a", "b", "c"))
        with pytest.raises(dblock.LockTimeout, match="None of 1 locks was acquired within 0.05 s: other clients"):
            await mine.lock_any(["b"]).acquire(timeout=0.05)
        assert held(owner) == ["b"]
        assert tickets(owner) == []


@pytest.mark.second_stage
async def test_timeout_says_that_the_caller_itself_holds_a_lock(
    clients: Clients, owner: psycopg.Connection, patient: None, caplog: pytest.LogCaptureFixture
) -> None:
    client = clients()
    async with client.lock("b") as own:
        with caplog.at_level(logging.WARNING, "dblock"):
            for locks in (client.lock_all(["a", "b"]), client.lock_any(["b"])):
                with pytest.raises(dblock.LockTimeout, match=f"itself holds it, under token {own.token}") as caught:
                    await locks.acquire(timeout=0.02)
                assert caught.value.own_token == own.token
        assert caplog.text.count("already holds lock 'b'") == 2


@pytest.mark.parametrize("names", ["abc", 7, None, b"abc"])
async def test_names_are_a_list(clients: Clients, names: Any) -> None:
    for function in ("lock_all", "lock_any"):
        with pytest.raises(dblock.InvalidArgument, match=f"{function} takes a list of names"):
            getattr(clients(), function)(names)


async def test_bad_names_are_refused_before_anything_is_sent(clients: Clients) -> None:
    client = clients()
    with pytest.raises(dblock.InvalidArgument, match="at least one lock"):
        client.lock_any([])
    for bad in ("", "x" * 513, "a\0b", 7):
        with pytest.raises(dblock.InvalidArgument):
            client.lock_all(["a", bad])
    with pytest.raises(dblock.InvalidArgument, match="ttl"):
        client.lock_all(["a"], ttl=0)
    with pytest.raises(dblock.InvalidArgument, match="timeout"):
        await client.lock_all(["a"]).acquire(timeout=-1)


@pytest.mark.second_stage
async def test_names_of_other_kinds_are_refused_and_nothing_stays(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients()
    async with client.semaphore("s", permits=2), client.lock("b") as blocker:
        before = held(owner)
        for function in (client.lock_all, client.lock_any):
            with pytest.raises(dblock.WrongKind, match="'s'"):
                await function(["s"], ttl=TTL).acquire()
        with pytest.raises(dblock.WrongKind):
            await client.lock_all(["a", "s"], ttl=TTL).acquire()
        waiting = asyncio.ensure_future(client.lock_all(["a", "b", "s"], ttl=TTL).acquire())
        await eventually_async(lambda: tickets(owner) == ["b"])
        await blocker.release()
        with pytest.raises(dblock.WrongKind):
            await waiting
        await eventually_async(lambda: held(owner) == [name for name in before if name != "b"] and not tickets(owner))


@pytest.mark.second_stage
async def test_waiting_set_holds_what_comes_before_and_then_gets_all(
    clients: Clients, owner: psycopg.Connection
) -> None:
    mine, other = clients(), clients()
    blocker = await other.lock("b").acquire()
    waiting = asyncio.ensure_future(mine.lock_all(["c", "b", "a"], ttl=TTL).acquire())
    await eventually_async(lambda: tickets(owner) == ["b"])
    assert held(owner) == ["a", "b"]
    await blocker.release()
    with before_long(5):
        locks = await waiting
    assert held(owner) == ["a", "b", "c"]
    assert locks.tokens["b"] > blocker.token
    assert await locks.release() is True
    await nothing_stays(owner)


@pytest.mark.second_stage
async def test_sets_in_opposite_orders_do_not_deadlock(clients: Clients, owner: psycopg.Connection) -> None:
    one, other = clients(), clients()

    async def work(client: Any, names: list[str]) -> None:
        for _ in range(5):
            async with client.lock_all(names, ttl=TTL):
                pass

    with before_long(10):
        await asyncio.gather(*(work(*pair) for pair in [(one, ["a", "b", "c"]), (other, ["c", "b", "a"])] * 2))
    await nothing_stays(owner)


@pytest.mark.second_stage
async def test_waiting_set_keeps_its_locks_from_sets_behind_it(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients()
    blocker = await client.lock("b").acquire()
    waiting = [asyncio.ensure_future(client.lock_all(["a", "b"]).acquire())]
    await eventually_async(lambda: tickets(owner) == ["b"])
    waiting.append(asyncio.ensure_future(client.lock_all(["a", "c"]).acquire()))
    await eventually_async(lambda: tickets(owner) == ["a", "b"])
    with statements(clients) as called:
        await asyncio.sleep(clients.timings.cycle_look_interval * 2.5)
    assert not {"abandon_all", "give_way"} & {*called}, "sets behind it wait in the same order, so they cannot block it"
    await blocker.release()
    for one in waiting:
        assert await (await one).release() is True


@pytest.mark.second_stage
@pytest.mark.parametrize("order", [["a", "b", "z"], ["b", "z"]])
async def test_set_steps_aside_for_a_lock_taken_by_hand(
    clients: Clients, owner: psycopg.Connection, order: list[str]
) -> None:
    mine, other = clients(), clients()
    by_hand = await other.lock("z").acquire()
    waiting = asyncio.ensure_future(mine.lock_all(order, ttl=TTL).acquire())
    await eventually_async(lambda: tickets(owner) == ["z"])
    with before_long(5):
        second = await other.lock("b").acquire()
        assert "a" not in order or held(owner) == ["a", "b", "z"], "the locks before b are kept"
        await second.release()
        await by_hand.release()
        locks = await waiting
    assert held(owner) == order
    assert locks.tokens["b"] > second.token
    await locks.release()
    await nothing_stays(owner)


@pytest.mark.second_stage
async def test_set_gives_way_to_the_lock_taken_by_hand_and_is_next(clients: Clients, owner: psycopg.Connection) -> None:
    mine, other, third = clients(), clients(), clients()
    by_hand = await other.lock("z").acquire()
    waiting = asyncio.ensure_future(mine.lock_all(["a", "z"], ttl=TTL).acquire())
    await eventually_async(lambda: tickets(owner) == ["z"])
    behind = asyncio.ensure_future(third.lock_all(["a"], ttl=TTL).acquire())
    await eventually_async(lambda: tickets(owner) == ["a", "z"])
    with before_long(5):
        second = await other.lock("a").acquire()
        await by_hand.release()
        await second.release()
        locks = await waiting
        await locks.release()
        assert (await behind).tokens["a"] > locks.tokens["a"] > second.token, "the set kept its position"


@pytest.mark.second_stage
@pytest.mark.parametrize("kind", ["plain", "write"])
async def test_set_in_a_deadlock_with_another_lock_of_its_task_ends_one_wait(
    dsn: str, owner: psycopg.Connection, kind: str
) -> None:
    """A set gives up its own locks for others. It does not give up the lock that its task has taken before."""

    def other(client: dblock.AsyncClient) -> Any:
        return client.write_lock("z") if kind == "write" else client.lock("z")

    async def by_hand_and_set(client: dblock.AsyncClient) -> None:
        async with other(client):
            await eventually_async(lambda: "b" in held(owner))
            async with client.lock_all(["a", "b", "c"], ttl=TTL):
                pass

    async def by_hand(client: dblock.AsyncClient) -> None:
        async with client.lock("b"):
            await eventually_async(lambda: tickets(owner) == ["b"])
            async with other(client):
                pass

    async with dblock.AsyncClient(dsn) as one, dblock.AsyncClient(dsn) as two:
        waits = asyncio.gather(by_hand_and_set(one), by_hand(two), return_exceptions=True)
        ends = await asyncio.wait_for(waits, 30)
        assert [type(end) for end in ends if end is not None] == [dblock.DeadlockDetected]
        await nothing_stays(owner)


@pytest.mark.second_stage
async def test_set_that_waits_for_a_lock_of_its_own_task_is_told(dsn: str, owner: psycopg.Connection) -> None:
    async def waits_for_itself(client: dblock.AsyncClient) -> None:
        async with client.lock("b"):
            with pytest.raises(dblock.DeadlockDetected):
                await client.lock_all(["a", "b"], ttl=TTL).acquire()
            assert held(owner) == ["b"]

    async with dblock.AsyncClient(dsn) as client:
        await asyncio.wait_for(waits_for_itself(client), 30)
        await nothing_stays(owner)


@pytest.mark.second_stage
async def test_any_waits_for_all_and_takes_the_first_that_becomes_free(
    clients: Clients, owner: psycopg.Connection
) -> None:
    mine, other = clients(), clients()
    blockers = {name: await other.lock(name).acquire() for name in "abc"}
    waiting = asyncio.ensure_future(mine.lock_any(["c", "a", "b"]).acquire())
    await eventually_async(lambda: tickets(owner) == ["a", "b", "c"])
    await blockers["b"].release()
    with before_long(5):
        lease = await waiting
    assert lease.name == "b"
    assert lease.token > blockers["b"].token
    assert tickets(owner) == []
    await lease.release()


@pytest.mark.second_stage
async def test_release_serves_one_of_the_waiters_for_any(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients()
    blockers = {name: await client.lock(name).acquire() for name in "ab"}
    waiting = [asyncio.ensure_future(client.lock_any(names).acquire()) for names in (["a", "b"], ["b", "a"])]
    await eventually_async(lambda: tickets(owner) == ["a", "a", "b", "b"])
    await blockers["a"].release()
    with before_long(5):
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert {(await one).name for one in done} == {"a"}
        await blockers["b"].release()
        leases = [await one for one in waiting]
    assert {lease.name for lease in leases} == {"a", "b"}


@pytest.mark.second_stage
async def test_loss_of_one_lease_is_the_loss_of_the_set(clients: Clients, owner: psycopg.Connection) -> None:
    client = clients()
    locks = await client.lock_all(["a", "b"], ttl=6).acquire()
    losses: list[dblock.LeaseLost] = []
    locks.on_lost(losses.append)
    owner.execute("SELECT force_release('b', %s, now => true)", [locks.tokens["b"]])
    await eventually_async(locks.lost.is_set)
    assert (locks.lost.name, locks.lost.reason) == ("b", dblock.Reason.FORCED)
    assert locks.remaining() == 0
    with pytest.raises(dblock.LeaseLost, match="'b'"):
        locks.raise_if_lost()
    await eventually_async(lambda: losses)
    assert await locks.release() is False
    assert held(owner) == []
    assert [loss.name for loss in losses] == ["b"]


@pytest.mark.second_stage
async def test_body_that_lost_a_lease_ends_with_the_loss_and_frees_the_others(
    clients: Clients, owner: psycopg.Connection
) -> None:
    client = clients()
    with pytest.raises(dblock.LeaseLost, match="'a'"):
        async with client.lock_all(["a", "b"], ttl=6) as locks:
            owner.execute("SELECT force_release('a', %s, now => true)", [locks.tokens["a"]])
            await eventually_async(locks.lost.is_set)
            await asyncio.sleep(0.01)
    assert held(owner) == []


@pytest.mark.second_stage
async def test_release_of_a_set_leaves_a_lock_that_was_granted_again(
    clients: Clients, owner: psycopg.Connection
) -> None:
    mine, other = clients(), clients()
    locks = await mine.lock_all(["a", "b"]).acquire()
    owner.execute("SELECT force_release('b', %s, now => true)", [locks.tokens["b"]])
    theirs = await other.lock("b").acquire()
    assert await locks.release() is False
    assert held(owner) == ["b"]
    assert theirs.remaining() > 0


@pytest.mark.second_stage
async def test_lease_of_a_set_is_released_by_itself(clients: Clients, owner: psycopg.Connection) -> None:
    locks = await clients().lock_all(["a", "b"]).acquire()
    assert await locks["a"].release() is True
    assert held(owner) == ["b"]
    assert await locks.release() is True
    assert held(owner) == []


async def test_error_of_the_body_is_raised_and_the_locks_are_free(clients: Clients, owner: psycopg.Connection) -> None:
    with pytest.raises(KeyError):
        async with clients().lock_all(["a", "b"]):
            raise KeyError
    assert held(owner) == []


@pytest.mark.second_stage
async def test_waiting_set_that_loses_a_lease_takes_that_lock_again(
    clients: Clients, owner: psycopg.Connection
) -> None:
    mine, other = clients(), clients()
    blocker = await other.lock("c").acquire()
    waiting = asyncio.ensure_future(mine.lock_all(["a", "b", "c"], ttl=3).acquire())
    await eventually_async(lambda: tickets(owner) == ["c"])
    (old,) = owner.execute("SELECT token FROM distributed_locks WHERE name = 'a'").fetchone() or (0,)
    owner.execute("SELECT force_release('a', %s, now => true)", [old])
    await eventually_async(lambda: held(owner) == ["c"] or "a" in held(owner))
    await eventually_async(lambda: held(owner) == ["a", "b", "c"])
    await blocker.release()
    locks = await waiting
    assert locks.tokens["a"] > old
    locks.raise_if_lost()
    await locks.release()


@pytest.mark.second_stage
async def test_client_that_closes_leaves_nothing_of_a_waiting_set(clients: Clients, owner: psycopg.Connection) -> None:
    mine, other = clients(), clients()
    blocker = await other.lock("b").acquire()
    waiting = [asyncio.ensure_future(mine.lock_all(["a", "b"], ttl=TTL).acquire())]
    waiting.append(asyncio.ensure_future(mine.lock_any(["b"], ttl=TTL).acquire()))
    await eventually_async(lambda: tickets(owner) == ["b", "b"])
    await mine.close()
    await blocker.release()
    for one in waiting:
        with pytest.raises(dblock.ClientClosed):
            await one
    await nothing_stays(owner)


async def test_client_that_closes_while_a_set_is_released_leaves_nothing(
    clients: Clients, owner: psycopg.Connection
) -> None:
    mine = clients(presence=None)
    locks = await mine.lock_all(["a", "b"], ttl=TTL).acquire()
    with closing_before("release_all", clients, mine):
        assert await locks.release()
    assert held(owner) == []


async def test_client_that_closes_while_any_lock_leaves_its_queues_leaves_nothing(
    clients: Clients, owner: psycopg.Connection
) -> None:
    mine, other = clients(presence=None), clients()
    blockers = [await other.lock(name).acquire() for name in "ab"]
    waiting = asyncio.ensure_future(mine.lock_any(["a", "b"], ttl=TTL).acquire())
    await eventually_async(lambda: tickets(owner) == ["a", "b"])
    with closing_before("abandon_all", clients, mine):  # with the ticket for a, after b was granted
        await blockers.pop().release()
        with pytest.raises(dblock.ClientClosed):
            await waiting
    await blockers.pop().release()
    await nothing_stays(owner)


@pytest.mark.parametrize("in_a_cycle", [True, False])
async def test_client_that_closes_while_a_set_gives_way_leaves_nothing(
    clients: Clients, owner: psycopg.Connection, in_a_cycle: bool
) -> None:
    clients.timings = timings_with(keep_several_for=0.01, cycle_look_interval=0.02)
    mine, other = clients(presence=None), clients()
    blocker = await other.lock("b").acquire()
    waiting = asyncio.ensure_future(mine.lock_all(["a", "b"], ttl=TTL).acquire())
    await eventually_async(lambda: tickets(owner) == ["b"])
    with closing_before("give_way" if in_a_cycle else "abandon_all", clients, mine):
        # The task that holds b, or another one: only the first closes a cycle.
        single = other.lock("a").acquire(timeout=20)
        granted = await (single if in_a_cycle else asyncio.ensure_future(single))
    with pytest.raises(dblock.ClientClosed):
        await waiting
    await granted.release()
    await blocker.release()
    await nothing_stays(owner)


@pytest.mark.second_stage
@pytest.mark.parametrize("kind", ["lock_all", "lock_any"])
async def test_cancelled_at_any_await_leaves_nothing(dsn: str, owner: psycopg.Connection, kind: str) -> None:
    async with dblock.AsyncClient(dsn) as client:
        await client.lock("warm").holder()

        async def acquire(at: int) -> None:
            assert client._runtime.runner is not None
            if at % 2:
                client._runtime.runner._pool.drop_idle()  # so that the opening of a connection is cancelled too
            locks: Any = getattr(client, kind)([f"{at}:{number}" for number in range(3)], ttl=600)
            await (await locks.acquire()).release()

        async def check(at: int) -> None:
            await nothing_stays(owner)
            await idle_again(client, owner)

        assert await each_await(acquire, check) >= 2


@pytest.mark.second_stage
@pytest.mark.parametrize("kind", ["lock_all", "lock_any"])
async def test_waiter_cancelled_at_any_await_leaves_nothing(dsn: str, owner: psycopg.Connection, kind: str) -> None:
    async with dblock.AsyncClient(dsn) as client:
        await client.lock("warm").holder()

        def acquire(at: int) -> Any:
            names = [f"{at}:{number}" for number in range(3)]
            for name in names if kind == "lock_any" else names[1:]:
                owner.execute("SELECT try_acquire(%s, '10 min', attempt => gen_random_uuid())", [name])
            return wait(names)

        async def wait(names: list[str]) -> None:
            freeing = asyncio.ensure_future(free())
            try:
                locks: Any = getattr(client, kind)(names, ttl=600)
                await (await locks.acquire()).release()
            finally:
                freeing.cancel()

        async def free() -> None:
            await eventually_async(lambda: tickets(owner))
            release_others()

        def release_others() -> None:
            owner.execute(
                "SELECT release(name, token, durable => false) FROM distributed_locks"
                " WHERE expires_at > clock_timestamp() AND ttl = '10 min' AND holder LIKE '%backend%'"
            )

        async def check(at: int) -> None:
            release_others()
            await nothing_stays(owner)

        assert await each_await(acquire, check) >= 4


@pytest.mark.second_stage
async def test_lost_reply_is_found_again_and_grants_nothing_twice(
    clients: Clients, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = clients()
    await client.lock("warm").holder()
    for kind, names, granted in (("lock_all", ["a", "b"], ["a", "b"]), ("lock_any", ["c", "d"], ["c"])):
        (before,) = owner.execute("SELECT last_value FROM token_sequence").fetchone() or (0,)
        with losing_the_first_reply(monkeypatch, owner):
            got = await getattr(client, kind)(names, ttl=TTL).acquire()
        assert held(owner) == granted
        (after,) = owner.execute("SELECT last_value FROM token_sequence").fetchone() or (0,)
        assert after - before == len(granted) or after - before > 1_000, "no token was minted twice"
        await got.release()
    await nothing_stays(owner)


@contextmanager
def losing_the_first_reply(monkeypatch: pytest.MonkeyPatch, owner: psycopg.Connection) -> Iterator[None]:
    """Break the connection after the first call in the body has been executed, and before its reply is read."""
    from dblock._runtime.connection import RawConnection

    exchange = RawConnection.exchange
    lost = False

    def losing(self: Any, call: Call, *rest: Any) -> Any:
        nonlocal lost
        reply = yield from exchange(self, call, *rest)
        if not lost and b"acquire_a" in call.sql:
            lost = True
            raise psycopg.OperationalError("the connection is lost")
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(RawConnection, "exchange", losing)
        yield
    assert lost


def test_errors_survive_pickling() -> None:
    import pickle

    for error in (
        dblock.LockTimeout("b", 2.0, names=("a", "b")),
        dblock.LockTimeout("b", 2.0, own_token=7, names=("a", "b"), any_of=True),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert (str(copy), vars(copy)) == (str(error), vars(error))
