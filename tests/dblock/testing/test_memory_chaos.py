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


def test_thawed_holder_continues_if_it_still_holds_the_lock(client: MemoryClient, chaos: MemoryChaos) -> None:
    lease = client.lock("a", ttl=30).acquire()
    chaos.freeze(lease)
    client.clock.tick(20)
    chaos.thaw(lease)
    client.clock.tick(60)
    assert lease.remaining() > 0


def test_frozen_client_renews_no_other_lease_and_finds_the_loss_when_it_thaws(
    client: MemoryClient, chaos: MemoryChaos
) -> None:
    calls: list[tuple[str, float]] = []
    frozen, other = client.lock("a", ttl=30).acquire(), client.lock("b", ttl=30).acquire()
    other.on_lost(lambda error: calls.append((error.name, client.clock())))
    chaos.freeze(frozen)
    client.clock.tick(40)
    assert other.remaining() > 0, "its clock has stopped"
    with MemoryClient(client.database) as successor:
        assert successor.lock("b").try_acquire()
    assert calls == []
    chaos.thaw(frozen)
    assert calls == [("b", 40.0)]
    with pytest.raises(dblock.LeaseLost):
        frozen.raise_if_lost()


def test_thawed_holder_is_warned_at_once_and_loses_its_lease_at_the_usual_moment(
    client: MemoryClient, chaos: MemoryChaos
) -> None:
    calls: list[float] = []
    lease = client.lock("a", ttl=30, keep_alive=False).acquire()
    lease.on_danger(lambda left: calls.append(client.clock()), before=5)
    lease.on_lost(lambda error: calls.append(client.clock()))
    client.clock.tick(1)
    chaos.freeze(lease)
    client.clock.tick(25)
    assert calls == []
    chaos.thaw(lease)
    client.clock.tick(20)
    assert calls == [pytest.approx(26), pytest.approx(29.4)]


def test_clock_passes_quickly_for_a_client_frozen_just_before_its_end(client: MemoryClient, chaos: MemoryChaos) -> None:
    lease = client.lock("a", ttl=30, keep_alive=False).acquire()
    lease.on_lost(lambda error: None)
    client.clock.tick(29.4 - 1e-6)
    chaos.freeze(lease)
    client.clock.tick(60)
    lease.raise_if_lost()


def test_lease_of_another_kind_of_client_is_refused(chaos: MemoryChaos) -> None:
    from dblock._core.lease_state import LeaseState
    from dblock._core.replies import Grant

    with pytest.raises(dblock.InvalidArgument, match="is not one of this database"):
        chaos.freeze(LeaseState(Grant("a", 1, 0.0, 30.0, 0.0), 30.0))
    with pytest.raises(dblock.InvalidArgument, match="takes a lease, .*; got 'a'"):
        chaos.freeze("a")


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


def test_lease_of_another_database_is_refused(client: MemoryClient, chaos: MemoryChaos) -> None:
    with MemoryClient() as other, other.lock("a") as lease:
        for verb in (chaos.freeze, chaos.thaw, chaos.expire):
            with pytest.raises(dblock.InvalidArgument, match="lock 'a' is not one of this database"):
                verb(lease)
        lease.raise_if_lost()


def test_client_in_place_of_its_database_is_refused(client: MemoryClient) -> None:
    with pytest.raises(dblock.InvalidArgument, match=r"which is client\.database; got <MemoryClient>"):
        MemoryChaos(client)  # type: ignore[arg-type]


def test_name_of_a_stolen_lock_is_text(client: MemoryClient, chaos: MemoryChaos) -> None:
    with client.lock("a") as lease, pytest.raises(dblock.InvalidArgument, match="name is text"):
        chaos.steal(lease)  # type: ignore[arg-type]


def test_undone_step_leaves_the_clock_as_it_was(client: MemoryClient) -> None:
    before = client.database.now()
    with MemoryChaos(client.database) as chaos:
        chaos.step_clock(60)
        assert client.database.now() == before + 60
    assert client.database.now() == before


def test_lease_is_frozen_as_long_as_another_lease_of_its_client(client: MemoryClient, chaos: MemoryChaos) -> None:
    first, second = client.lock("a", ttl=30).acquire(), client.lock("b", ttl=30).acquire()
    chaos.freeze(first)
    chaos.freeze(second)
    chaos.thaw(first)
    client.clock.tick(40)
    assert second.remaining() > 0
    chaos.thaw(second)
    assert second.lost.is_set()
