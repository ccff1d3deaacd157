"""The chaos verbs on a real server: each does what it says, and is undone."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import dblock
from dblock._runtime import connection as connections
from dblock.testing import Chaos, MemoryClient
from dblock.testing.chaos import PostgresChaos
from dblock.testing.leaks import Watch
from dblock.testing.private_database import PrivateDatabase
from dblock.testing.warm_client import backends_of, listening_backend
from tests.support.eventually import eventually
from tests.support.timings import timings_with
from tests.support.waits import join_queue


def test_verbs_are_those_of_the_protocol(chaos: PostgresChaos) -> None:
    verbs: Chaos = chaos
    named = {name for name in vars(Chaos) if not name.startswith("_")}
    assert named == {
        "freeze", "thaw", "expire", "steal", "cut_listener", "kill_backend", "deny", "slow", "allow", "step_clock"
    }  # fmt: skip
    assert all(callable(getattr(verbs, name)) for name in named)


def test_expired_lease_is_lost_at_once_and_the_lock_is_free(
    chaos: PostgresChaos, holder: dblock.Client, other: dblock.Client
) -> None:
    lost = threading.Event()
    lease = holder.lock("a").acquire()
    lease.on_lost(lambda error: lost.set())
    chaos.expire(lease)
    with pytest.raises(dblock.LeaseLost, match="expired"):
        lease.raise_if_lost()
    assert lost.wait(20)
    with other.lock("a", timeout=0) as taken:
        assert taken.token > lease.token


def wait(owner: psycopg.Connection) -> None:
    """Take a ticket for the lock 'a', without a client that would check the lock by itself."""
    client = uuid.uuid4()
    owner.execute(f'LISTEN "dblock_{client.hex}"'.encode())
    join_queue(owner, "a", client=client)


def is_woken(owner: psycopg.Connection) -> bool:
    return bool(list(owner.notifies(timeout=10, stop_after=1)))


def test_expiry_wakes_the_first_waiter(chaos: PostgresChaos, holder: dblock.Client, owner: psycopg.Connection) -> None:
    lease = holder.lock("a", ttl=300).acquire()
    wait(owner)
    chaos.expire(lease)
    assert is_woken(owner)


def test_frozen_holder_believes_in_a_lease_that_others_have_taken(
    chaos: PostgresChaos, holder: dblock.Client, other: dblock.Client
) -> None:
    lease = holder.lock("a").acquire()
    chaos.freeze(lease)
    chaos.expire(lease)
    with other.lock("a", timeout=0):
        lease.raise_if_lost()
        assert lease.remaining() > 0
        chaos.thaw(lease)
        with pytest.raises(dblock.LeaseLost, match="superseded"):
            lease.raise_if_lost()


@pytest.mark.second_stage
def test_frozen_lease_is_not_renewed(
    chaos: PostgresChaos, holder: dblock.Client, other: dblock.Client, database: PrivateDatabase
) -> None:
    deadline = "SELECT expires_at FROM dblock.distributed_locks WHERE name = 'a'"
    lease = holder.lock("a", ttl=1).acquire()
    chaos.freeze(lease)
    before = database.connection.execute(deadline).fetchone()
    with other.lock("a", timeout=20):
        assert database.connection.execute(deadline).fetchone() > before  # type: ignore[operator]
        lease.raise_if_lost()


def test_lease_that_is_thawed_in_time_is_still_held(chaos: PostgresChaos, holder: dblock.Client) -> None:
    with holder.lock("a", ttl=60) as lease:
        chaos.freeze(lease)
        left = lease.remaining()
        time.sleep(0.002)
        assert lease.remaining() == left
        chaos.thaw(lease)
        assert 0 < lease.remaining() < left
        assert lease._state.keep_alive
        lease.renew()


def test_frozen_lease_is_thawed_at_the_end_of_the_test(chaos: PostgresChaos, holder: dblock.Client) -> None:
    with holder.lock("a", ttl=60) as lease:
        chaos.freeze(lease)
        left = lease.remaining()
        chaos.undo()
        assert lease.remaining() < left
        assert lease._state.keep_alive


def test_lease_stays_frozen_while_another_lease_of_its_client_is_thawed(
    chaos: PostgresChaos, holder: dblock.Client
) -> None:
    with holder.lock("a") as first, holder.lock("b") as second:
        chaos.freeze(first)
        chaos.freeze(second)
        left = second.remaining()
        chaos.thaw(first)
        time.sleep(0.002)
        assert second.remaining() == left
        chaos.thaw(second)
        assert second.remaining() < left


def test_thief_has_the_lock_and_its_holder_finds_out(chaos: PostgresChaos, holder: dblock.Client) -> None:
    lease = holder.lock("a").acquire()
    stolen = chaos.steal("a")
    assert stolen.token > lease.token
    with pytest.raises(dblock.LeaseLost, match=r"superseded|forced"):
        lease.renew()
    chaos.undo()
    with holder.lock("a", timeout=0):
        pass


def test_thief_passes_all_waiters(chaos: PostgresChaos, holder: dblock.Client, owner: psycopg.Connection) -> None:
    lease = holder.lock("a").acquire()
    wait(owner)
    assert chaos.steal("a").token > lease.token
    assert owner.execute("SELECT count(*) FROM lock_tickets").fetchone() == (1,)


def test_thief_takes_the_lock_from_a_waiter_that_was_faster(
    chaos: PostgresChaos, holder: dblock.Client, other: dblock.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = holder.lock("a").acquire()
    got: list[dblock.Lease] = []
    thread = threading.Thread(target=lambda: got.append(other.lock("a").acquire(timeout=30)))
    thread.start()
    eventually(other.lock("a").queue)
    execute = chaos._execute

    def let_the_waiter_be_faster(statement: str, parameters: Any) -> list[tuple[Any, ...]]:
        rows = execute(statement, parameters)
        if "force_release" in statement:
            thread.join(20)
        return rows

    monkeypatch.setattr(chaos, "_execute", let_the_waiter_be_faster)
    stolen = chaos.steal("a")
    assert lease.token < got[0].token < stolen.token
    assert holder.lock("a").try_acquire() is None


def test_lock_that_is_free_can_be_stolen_too(chaos: PostgresChaos, holder: dblock.Client) -> None:
    assert chaos.steal("free").token
    assert holder.lock("free").try_acquire() is None


def sessions(database: PrivateDatabase) -> set[int]:
    """Return the sessions of all clients."""
    rows = database.connection.execute(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'dblock%'"
    )
    return {pid for (pid,) in rows}


def test_client_survives_a_cut_of_its_listener(
    chaos: PostgresChaos, holder: dblock.Client, database: PrivateDatabase
) -> None:
    with holder.lock("a"):
        eventually(lambda: listening_backend(holder))
    (listener,) = listening_backend(holder)
    others = sessions(database) - {listener}
    assert others
    assert chaos.cut_listener() == 1
    eventually(lambda: listener not in sessions(database))
    assert others <= sessions(database)
    # Not used as a lease, because a slow machine may not restore its presence in time.
    assert holder.lock("a", timeout=10).acquire().token


def test_client_survives_the_end_of_all_its_sessions(
    chaos: PostgresChaos, watch: Watch, dsn: str, database: PrivateDatabase
) -> None:
    with dblock.Client(dsn, presence=None) as client:
        lease = client.lock("a").acquire()
        runner: Any = client._runtime.runner
        in_use = runner._pool.take()
        before = sessions(database)
        assert in_use.connection.info.backend_pid in before
        assert chaos.kill_backend() >= 1
        eventually(lambda: not before & sessions(database))
        runner._pool.give(in_use)
        lease.renew()
        assert lease.release()


def test_end_of_sessions_spares_those_of_clients_that_are_not_watched(
    client: dblock.Client, chaos: PostgresChaos, watch: Watch, dsn: str, database: PrivateDatabase
) -> None:
    # Without a lasting lease: the keep-alive would open a connection of its own.
    with dblock.Client(dsn, timings=timings_with(lasting=1000.0)) as holder:
        with holder.lock("a"):
            eventually(lambda: listening_backend(holder))
        with client.lock("b", ttl=60) as lease:
            theirs, ours = {*backends_of(client)}, {*backends_of(holder)}
            assert len(ours) == 2
            database.exclusive = False
            assert chaos.kill_backend() >= 2
            eventually(lambda: not ours & sessions(database))
            assert theirs
            assert theirs <= sessions(database)
            lease.renew()


@pytest.mark.parametrize(
    ("sqlstate", "kind"),
    [("53300", dblock.Unavailable), ("42501", dblock.AccessDenied), ("XX000", dblock.DatabaseError)],
)
def test_denied_call_raises_the_error_of_its_sqlstate(
    chaos: PostgresChaos, holder: dblock.Client, sqlstate: str, kind: type[Exception]
) -> None:
    with holder.lock("before"):
        pass
    chaos.deny(sqlstate)
    with pytest.raises(kind) as raised:
        holder.lock("a").try_acquire()
    cause = raised.value.__cause__
    assert isinstance(cause, psycopg.Error)
    assert cause.sqlstate == sqlstate
    chaos.allow()
    chaos.slow(1)  # does not bring the refusal back
    with holder.lock("a"):
        pass


def test_denied_call_can_be_slow_too(chaos: PostgresChaos, holder: dblock.Client) -> None:
    with holder.lock("before"):
        pass
    chaos.slow(60)
    chaos.deny("42501")
    began = time.monotonic()
    with pytest.raises(dblock.AccessDenied):
        holder.lock("a").try_acquire()
    assert time.monotonic() - began >= 0.06


async def test_denied_call_of_an_async_client_raises_too(chaos: PostgresChaos, dsn: str) -> None:
    async with dblock.AsyncClient(dsn) as client:
        chaos.deny("42501")
        with pytest.raises(dblock.AccessDenied):
            await client.lock("a").try_acquire()
        chaos.slow(1)
        chaos.undo()
        async with client.lock("a"):
            pass


def test_slow_call_takes_longer(chaos: PostgresChaos, holder: dblock.Client) -> None:
    chaos.slow(60)
    began = time.monotonic()
    lease = holder.lock("a").acquire()
    assert time.monotonic() - began >= 0.06
    chaos.slow(0)
    lease.release()


def test_slowness_ends_with_the_test(chaos: PostgresChaos) -> None:
    before = connections.RawConnection.exchange
    chaos.slow(10)
    assert connections.RawConnection.exchange is not before
    chaos.undo()
    assert connections.RawConnection.exchange is before


def test_clock_that_is_stepped_lets_leases_expire(
    chaos: PostgresChaos, holder: dblock.Client, other: dblock.Client
) -> None:
    # A renewal between the two steps would extend the lease.
    lease = holder.lock("a", ttl=60, keep_alive=False).acquire()
    chaos.step_clock(30)
    assert other.lock("a").try_acquire() is None
    chaos.step_clock(31)
    with other.lock("a", timeout=0) as taken:
        assert taken.token > lease.token


def test_clock_that_is_stepped_wakes_the_waiters_of_leases_that_expire(
    chaos: PostgresChaos, holder: dblock.Client, owner: psycopg.Connection
) -> None:
    lease = holder.lock("a", ttl=60, keep_alive=False).acquire()
    wait(owner)
    owner.execute("UPDATE lock_clients SET seen_until = seen_until + interval '1 hour'")  # still alive after the step
    chaos.step_clock(61)
    assert is_woken(owner)
    assert lease.token


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda c: c.deny("bad"), "such as '53300'; got 'bad'"),
        (lambda c: c.deny(53300), "text .* such as '53300'; got 53300"),
        (lambda c: c.deny("00000"), "means success"),
        (lambda c: c.slow(-1), "0 ms longer or more, as a number; got -1"),
        (lambda c: c.slow("5"), "as a number; got '5'"),
        (lambda c: c.freeze("a"), r"which lock.acquire\(\) returns; got 'a'"),
        (lambda c: c.steal(5), "name is text; got int 5"),
    ],
)
def test_wrong_arguments_are_refused(chaos: PostgresChaos, wrong: Callable[[PostgresChaos], None], says: str) -> None:
    with pytest.raises(dblock.InvalidArgument, match=says):
        wrong(chaos)


def test_lease_of_a_memory_client_is_refused_by_each_verb(chaos: PostgresChaos) -> None:
    with MemoryClient() as client, client.lock("a") as lease:
        for verb in (chaos.freeze, chaos.expire):
            with pytest.raises(dblock.InvalidArgument, match="lock 'a' is one of a memory client"):
                verb(lease)
        lease.raise_if_lost()


def test_lease_of_a_client_that_is_not_watched_cannot_be_frozen(client: dblock.Client, chaos: PostgresChaos) -> None:
    with client.lock("a") as lease, pytest.raises(dblock.InvalidArgument, match="made before the test"):
        chaos.freeze(lease)
