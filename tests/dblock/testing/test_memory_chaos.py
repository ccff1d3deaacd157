"""The chaos verbs on memory: the same as on Postgres, and undone at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dblock
from dblock.testing import Chaos, MemoryChaos, MemoryClient


@pytest.fixture
def client() -> Iterator[MemoryClient]:
    with MemoryClient() as client:
        yield client


@pytest.fixture
def chaos(client: MemoryClient) -> Iterator[MemoryChaos]:
    with MemoryChaos(client.database) as chaos:
        yield chaos


def test_verbs_are_those_of_the_protocol(chaos: MemoryChaos) -> None:
    verbs: Chaos = chaos
    assert verbs.cut_listener() == verbs.kill_backend() == 0


def test_frozen_holder_does_not_know_that_its_lock_was_stolen(client: MemoryClient, chaos: MemoryChaos) -> None:
    lease = client.lock("a").acquire()
    chaos.freeze(lease)
    chaos.expire(lease)
    assert chaos.steal("a").token > lease.token
    client.clock.tick(3600)
    lease.raise_if_lost()
    chaos.thaw(lease)
    with pytest.raises(dblock.LeaseLost, match="superseded"):
        lease.raise_if_lost()


def test_thawed_holder_goes_on_if_it_still_holds_the_lock(client: MemoryClient, chaos: MemoryChaos) -> None:
    lease = client.lock("a", ttl=30).acquire()
    chaos.freeze(lease)
    client.clock.tick(20)
    chaos.thaw(lease)
    client.clock.tick(60)
    assert lease.remaining() > 0


def test_expired_lease_is_lost_at_once_and_its_waiter_is_served(client: MemoryClient, chaos: MemoryChaos) -> None:
    lost: list[str] = []
    lease = client.lock("a").acquire()
    lease.on_lost(lambda error: lost.append(error.reason))
    chaos.expire(lease)
    assert lost == ["expired"]
    assert client.lock("a").try_acquire()


def test_holder_learns_of_a_theft_with_its_next_renewal(client: MemoryClient, chaos: MemoryChaos) -> None:
    lease = client.lock("a", ttl=30).acquire()
    thief = chaos.steal("a")
    assert lease.remaining() > 0
    client.clock.tick(10)
    assert lease.lost.reason is dblock.Reason.SUPERSEDED
    chaos.undo()
    assert thief.remaining() == 0
    assert client.lock("a").try_acquire()


def test_denied_calls_raise_the_error_of_their_sqlstate(client: MemoryClient, chaos: MemoryChaos) -> None:
    kept = client.lock("kept", ttl=30).acquire()
    chaos.deny("42501")
    with pytest.raises(dblock.AccessDenied):
        client.lock("a").try_acquire()
    chaos.deny("53300")
    with pytest.raises(dblock.DatabaseError):
        client.lock("a").try_acquire()
    client.clock.tick(31)
    assert kept.lost.reason is dblock.Reason.UNREACHABLE
    chaos.allow()
    assert client.lock("a").try_acquire()
    with pytest.raises(dblock.InvalidArgument, match="SQLSTATE"):
        chaos.deny("no")


def test_slow_calls_take_time_of_the_clock(client: MemoryClient, chaos: MemoryChaos) -> None:
    chaos.slow(250)
    lease = client.lock("a", ttl=30).acquire()
    assert client.clock() == pytest.approx(0.25)
    assert lease.remaining() == pytest.approx(29.15), "counted from before the request"
    assert client.lock("b", ttl=0.2).try_acquire() is None, "its reply comes after its trust window"
    chaos.slow(0)
    assert client.lock("b", ttl=0.2).try_acquire()
    with pytest.raises(dblock.InvalidArgument):
        chaos.slow(-1)


def test_stepped_clock_lets_leases_expire_in_the_database_alone(client: MemoryClient, chaos: MemoryChaos) -> None:
    lease = client.lock("a", ttl=30, keep_alive=False).acquire()
    chaos.step_clock(31)
    assert lease.remaining() > 29
    with MemoryClient(client.database) as other:
        assert other.lock("a").try_acquire()
    with pytest.raises(dblock.LeaseLost):
        lease.renew()
