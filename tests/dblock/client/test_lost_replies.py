"""Requests that the database carries out, and whose replies are lost: none counts as if nothing had been done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest

import dblock
from tests.support.eventually import eventually
from tests.support.facade import Clients
from tests.support.pooler import needs_pgbouncer, pooled
from tests.support.proxy import SERVER_CRASHED, Proxy, fatal
from tests.support.stages import first

NAME = "the name in question"
HELD = "SELECT count(*) FROM distributed_locks WHERE expires_at > clock_timestamp()"

Ask = Callable[[Any], Awaitable[Any]]

REQUESTS: dict[str, Ask] = {
    "lock": lambda client: client.lock(NAME, ttl=600).acquire(),
    "permit": lambda client: client.semaphore(NAME, permits=2, ttl=600).acquire(),
    "all": lambda client: client.lock_all([NAME, "another"], ttl=600).acquire(),
    "try": lambda client: client.lock(NAME, ttl=600).try_acquire(),
    "efficiency": lambda client: client.efficiency_lock(NAME, ttl=600).acquire(),
    "reader": lambda client: client.read_lock(NAME, ttl=600).acquire(),
    "any": lambda client: client.lock_any([NAME, "another"], ttl=600).acquire(),
}
"""Each kind of request for a lock."""

LAST_MESSAGES = {
    "nothing": b"",
    "pooler": SERVER_CRASHED,
    "old pooler": SERVER_CRASHED.replace(b"FATAL", b"ERROR"),
    "log full": fatal("58030", "could not write to file"),
    "another pooler": fatal("58000", "connection to the server is lost", severity="SFATAL\0"),
    "timeout": fatal("25P04", "terminating connection due to transaction timeout"),
}
"""What the client may be told instead of the reply."""


@pytest.fixture
def proxy(dsn: str) -> Any:
    with Proxy(dsn) as proxy:
        yield proxy


@pytest.mark.parametrize("told", first(3, LAST_MESSAGES))
async def test_session_that_ends_after_the_grant_costs_one_retry(
    clients: Clients, proxy: Proxy, told: str, owner: psycopg.Connection
) -> None:
    client = clients(proxy.dsn)
    proxy.last_message = LAST_MESSAGES[told]
    proxy.lose_reply_to(NAME.encode())
    lease = await client.lock(NAME, ttl=600).try_acquire()
    assert (lease.token, proxy.lost) == ((await clients().lock(NAME).holder()).token, 1)
    await client.close()


@pytest.mark.parametrize("told", ["nothing", "pooler"])
@pytest.mark.parametrize("request_of", first(3, REQUESTS))
async def test_grant_whose_two_replies_were_lost_is_given_back(
    clients: Clients, proxy: Proxy, request_of: str, told: str, owner: psycopg.Connection
) -> None:
    client = clients(proxy.dsn, presence=None)
    held: list[Any] = []
    proxy.before_cut = lambda: held.append(owner.execute(HELD).fetchone())
    proxy.last_message = LAST_MESSAGES[told]
    proxy.lose_reply_to(NAME.encode(), times=2)
    with pytest.raises(dblock.Unavailable) as caught:
        await REQUESTS[request_of](client)
    assert caught.value.may_be_done
    assert held[0] != (0,), "the database had granted the request"
    assert (len(held), owner.execute(HELD).fetchone()) == (2, (0,))
    await client.close()


@pytest.mark.parametrize("told", ["nothing", "pooler"])
async def test_writer_whose_downgrade_may_be_done_believes_in_no_lease(
    clients: Clients, proxy: Proxy, told: str, owner: psycopg.Connection
) -> None:
    client = clients(proxy.dsn, presence=None)
    writer = await client.write_lock("a", ttl=600).acquire()
    proxy.last_message = LAST_MESSAGES[told]
    proxy.lose_reply_to(str(writer.token).encode(), times=2)
    with pytest.raises(dblock.Unavailable):
        await writer.downgrade()
    assert (proxy.lost, writer.remaining(), owner.execute(HELD).fetchone()) == (2, 0, (0,))
    assert await clients().write_lock("a").try_acquire()
    await client.close()


async def test_slot_whose_claim_may_be_done_is_given_back(dsn: str, proxy: Proxy, owner: psycopg.Connection) -> None:
    """It counts as died at once, and not after its ttl."""
    runs: list[str] = []
    with dblock.Client(proxy.dsn, presence=None) as client, dblock.Client(dsn) as other:

        def job(one: dblock.Client, who: str) -> Any:
            return one.once(NAME, delay=3600, ttl=600, delivery="at-least-once")(lambda: runs.append(who))

        proxy.lose_reply_to(NAME.encode(), times=2)
        with pytest.raises(dblock.Unavailable):
            job(client, "first")()
        assert (proxy.lost, owner.execute(HELD).fetchone()) == (2, (0,))
        job(other, "other")()
    assert runs == ["other"]


def test_candidate_whose_grant_may_be_done_leaves_the_election_to_others(
    dsn: str, proxy: Proxy, owner: psycopg.Connection
) -> None:
    with dblock.Client(proxy.dsn, presence=None) as client, dblock.Client(dsn) as other:
        proxy.lose_reply_to(b"election:", times=2)
        with pytest.raises(dblock.Unavailable):
            client.election(NAME, ttl=600).campaign(timeout=30)
        assert (proxy.lost, owner.execute(HELD).fetchone()) == (2, (0,))
        other.election(NAME, ttl=600).campaign(timeout=30).end()


@needs_pgbouncer
@pytest.mark.second_stage
@pytest.mark.parametrize("breaks", [1, 2])
async def test_downgrade_behind_a_pooler_that_loses_its_server_is_found_or_given_back(
    clients: Clients, proxy: Proxy, breaks: int, owner: psycopg.Connection
) -> None:
    with pooled(proxy.dsn) as through:
        client = clients(through, presence=None)
        writer = await client.write_lock("a", ttl=600).acquire()
        proxy.lose_reply_to(str(writer.token).encode(), breaks)
        if breaks == 1:
            reader = await writer.downgrade()
            assert [one.token for one in await client.read_lock("a").holders()] == [reader.token]
        else:
            with pytest.raises(dblock.Unavailable, match="server conn crashed"):
                await writer.downgrade()
            assert owner.execute(HELD).fetchone() == (0,)
        assert (proxy.lost, writer.remaining()) == (breaks, 0)
        await client.close()


def test_interrupt_while_a_grant_is_given_back_leaves_it_to_the_listener(
    dsn: str, proxy: Proxy, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dblock.Client(proxy.dsn, presence=None) as client:

        def interrupt(flow: Any) -> None:
            raise KeyboardInterrupt

        proxy.lose_reply_to(NAME.encode(), times=2)
        client.lock("warm").holder()
        monkeypatch.setattr(client._runtime, "run_even_if_closed", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.lock(NAME, ttl=600).acquire()
        monkeypatch.undo()
        eventually(lambda: owner.execute(HELD).fetchone() == (0,), "the listener has given the grant back")


async def test_retry_of_a_closed_client_says_that_it_is_one(
    clients: Clients, proxy: Proxy, owner: psycopg.Connection
) -> None:
    """A release frees the lock, its reply is lost, and the client is closed before the retry: nothing is lost."""
    client = clients(proxy.dsn, presence=None)
    lease = await client.lock(NAME, ttl=600).acquire()
    runtime = getattr(client, "_inner", client)._runtime

    def close() -> None:
        runtime.closed = True
        runtime.runner._pool._refuse_calls()

    proxy.before_cut = close
    proxy.lose_reply_to(str(lease.token).encode())
    assert await lease.release() is True
    assert proxy.lost == 1
    await client.close()
