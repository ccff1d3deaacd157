"""Efficiency locks: they are faster, a crash forgets them, and they have no token for a fence."""

from __future__ import annotations

import logging
import pickle

import psycopg
import pytest

import dblock
from tests.support.facade import Clients
from tests.support.renewals import TTL, renewed
from tests.support.stages import sync_first


async def test_efficiency_locks_exclude_each_other_and_durable_locks(clients: Clients) -> None:
    client = clients()
    quick = client.efficiency_lock("a")
    async with quick:
        assert await quick.try_acquire() is None
        assert await client.lock("a").try_acquire() is None
    async with client.lock("a"):
        assert await quick.try_acquire() is None


async def test_efficiency_leases_have_no_token_and_a_type_of_their_own(clients: Clients) -> None:
    client = clients()
    quick, durable = await client.efficiency_lock("a").acquire(), await client.lock("b").acquire()
    with pytest.raises(dblock.NoFencingToken, match="efficiency lock"):
        quick.token  # noqa: B018
    kinds = (dblock.EfficiencyLease, dblock.AsyncEfficiencyLease)
    inner = [getattr(lease, "_inner", lease) for lease in (quick, durable)]
    assert isinstance(inner[0], kinds)
    assert not isinstance(inner[0], (dblock.Lease, dblock.AsyncLease))
    assert not isinstance(inner[1], kinds)
    assert (await client.lock("a").holder()).token is None
    assert "token" not in repr(inner[0])


@pytest.mark.usefixtures("patient")
async def test_number_of_an_efficiency_grant_is_nowhere_shown_as_a_token(
    clients: Clients, caplog: pytest.LogCaptureFixture, owner: psycopg.Connection
) -> None:
    caplog.set_level(logging.DEBUG, "dblock")
    client = clients()
    lock = client.efficiency_lock("a")
    lease = await lock.acquire()
    with pytest.raises(dblock.LockTimeout, match="this client itself holds it. Release") as caught:
        await lock.acquire(timeout=0.1)
    assert caught.value.own_token is None
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.own_token) == (str(caught.value), None)
    assert [message for message in caplog.messages if "already holds lock 'a'" in message]
    assert await lease.release()
    lease = await lock.acquire()
    owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp()")
    with pytest.raises(dblock.LeaseLost):
        await lease.renew()
    messages = [message for message in caplog.messages if "lock 'a'" in message]
    for event in ("granted", "released", "lost"):
        assert [message for message in messages if event in message]
    assert [message for message in messages if "token" in message] == []


@pytest.mark.usefixtures("known_tokens")
async def test_efficiency_locks_take_no_token_from_the_sequence(clients: Clients) -> None:
    client = clients()
    first = await client.lock("a").acquire()
    for _ in range(5):
        await (await client.efficiency_lock("b").acquire()).release()
    assert (await client.lock("c").acquire()).token == first.token + 1


@sync_first
@pytest.mark.second_stage
async def test_efficiency_leases_are_kept_alive_and_released(clients: Clients, owner: psycopg.Connection) -> None:
    lease = await clients().efficiency_lock("a", ttl=TTL).acquire()
    await renewed(lease)
    await lease.renew()
    assert await lease.release() is True
    assert owner.execute("SELECT count(*) FROM holder('a')").fetchone() == (0,)


async def test_previous_holder_cannot_renew_or_release_the_next_lease(
    clients: Clients, owner: psycopg.Connection
) -> None:
    client = clients()
    old = await client.efficiency_lock("a", ttl=60).acquire()
    owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp()")
    new = await client.efficiency_lock("a").acquire()
    with pytest.raises(dblock.LeaseLost) as lost:
        await old.renew()
    assert lost.value.token is None
    assert await old.release() is False
    await new.renew()


@pytest.mark.parametrize("default", ["on", "off", "local", "remote_write", "remote_apply"])
def test_each_kind_of_grant_sets_its_own_synchronous_commit(owner: psycopg.Connection, default: str) -> None:
    """A grant with a token waits for the disk. A grant without a token need not wait."""

    def setting(statement: str) -> str:
        with owner.transaction():
            owner.execute(statement.encode())
            row = owner.execute("SHOW synchronous_commit").fetchone()
            assert row is not None
            return str(row[0])

    owner.execute(f"SET synchronous_commit = {default}".encode())
    strict = default if default == "remote_apply" else "on"
    assert setting("SELECT try_acquire('a')") == strict
    assert setting("SELECT renew('a', 1)") == strict
    assert setting("SELECT renew_all('{a,b}', ARRAY[token, -1], '{1 s,1 s}') FROM holder('a')") == strict
    assert setting("SELECT renew_all('{b}', '{-1}', '{1 s}')") == "off"
    assert setting("SELECT release('a', 1)") == default
    assert setting("SELECT release('a', 1, durable => false)") == "off"
    assert setting("SELECT try_acquire('b', durable => false)") == "off"
    assert setting("SELECT release_all('{a}', '{1}')") == "off"
    for quick in ("try_acquire('c', durable => false)", "release('x', 1, durable => false)", "abandon('x', NULL)"):
        assert setting(f"SELECT try_acquire('d{quick[0]}'), {quick}") == strict, "the first token is not durable"
