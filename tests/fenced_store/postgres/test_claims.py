"""Claims with a grant: a stale holder is refused before the new holder's first write. Each case runs sync and async."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql

import dblock
import fenced_store
from dblock.admin import schema
from fenced_store import AsyncFencedStore, FencedStore, StaleTokenError, _calls
from tests.support.eventually import eventually_async
from tests.support.facade import AsyncClients, Clients
from tests.support.proxy import Proxy
from tests.support.sessions import Sessions
from tests.support.stages import sync_first

AHEAD = 2**52
"""A token above those that follow the clock of this century."""


def elsewhere(clients: Clients, dsn: str) -> Any:
    return AsyncFencedStore(dsn) if isinstance(clients, AsyncClients) else FencedStore(dsn)


def fences(owner: psycopg.Connection) -> dict[str, int]:
    return dict(owner.execute("SELECT resource, token FROM fenced_store.fences").fetchall())


async def test_grant_raises_the_fences(clients: Clients, owner: psycopg.Connection, store: FencedStore) -> None:
    lock = clients().lock("a", claims=["one", "two"])
    first = await lock.try_acquire()
    store.put("one", "by the first", fence=first.token)
    await first.release()
    second = await lock.acquire()
    assert fences(owner) == {"one": second.token, "two": second.token}
    with pytest.raises(StaleTokenError):
        store.put("one", "stale", fence=first.token)
    store.put("one", "by the second", fence=second.token)
    (noted,) = fenced_store.rejections(clients.dsn)
    assert (noted.lock, noted.stored) == ("a", second.token)
    assert noted.holder == noted.stored_by
    assert noted.holder is not None
    assert "pid" in noted.holder
    await second.release()
    (noted,) = fenced_store.rejections(clients.dsn)
    assert (noted.lock, noted.holder) == ("a", None), "the log still names the lock after its release"
    assert noted.stored_by is not None
    assert "pid" in noted.stored_by


async def test_grant_from_the_queue_raises_the_fences(clients: Clients, owner: psycopg.Connection) -> None:
    holder, waiter = clients(), clients()
    held = await holder.lock("a").acquire()
    waiting = asyncio.ensure_future(waiter.lock("a", claims=["r"]).acquire())
    await eventually_async(holder.lock("a").queue, "a waiter")
    assert fences(owner) == {}, "a waiter claims nothing"
    await held.release()
    lease = await waiting
    assert fences(owner) == {"r": lease.token}
    await lease.release()
    crowded = waiter.lock("a", claims=["s"])
    crowded_inner = getattr(crowded, "_inner", crowded)
    crowded_inner._crowded = True  # lines up at once, and is granted there
    lease = await crowded.acquire()
    assert fences(owner)["s"] == lease.token


@pytest.mark.usefixtures("patient")
async def test_refused_acquire_claims_nothing(clients: Clients, owner: psycopg.Connection) -> None:
    await clients().lock("a").acquire()
    lock = clients().lock("a", claims=["r"])
    assert await lock.try_acquire() is None
    with pytest.raises(dblock.LockTimeout):
        await lock.acquire(timeout=0.1)
    assert fences(owner) == {}


async def test_failed_claim_undoes_the_grant(clients: Clients, store: FencedStore, owner: psycopg.Connection) -> None:
    store.put("r", 1, fence=AHEAD)
    lock = clients().lock("a", claims=["before", "r"])
    for _ in range(2):
        with pytest.raises(dblock.DatabaseError, match=f"dblock token raise --above {AHEAD}"):
            await lock.try_acquire()
        with pytest.raises(dblock.DatabaseError, match=f"dblock token raise --above {AHEAD}"):
            await lock.acquire(timeout=60)
    assert await lock.holder() is None
    assert fences(owner) == {"r": AHEAD}
    owner.execute("SELECT dblock.raise_tokens(%s)", (AHEAD,))
    assert (await lock.acquire(timeout=60)).token > AHEAD


async def test_grant_with_claims_whose_reply_was_lost_is_retried(clients: Clients, owner: psycopg.Connection) -> None:
    with Proxy(clients.dsn) as proxy:
        lock = clients(proxy.dsn).lock("the lock in question", claims=["r"])
        await lock.holder()
        proxy.lose_reply_to(b".claim(")
        lease = await lock.try_acquire()
        assert proxy.lost == 1
        assert fences(owner) == {"r": lease.token}
        assert (await lock.holder()).token == lease.token


async def test_grant_waits_for_a_transaction_past_the_fence(clients: Clients, sessions: Sessions) -> None:
    """The work of two holders does not overlap, even if the lease of the first has expired."""
    older = sessions.open()
    older.do("BEGIN")
    older.do("SELECT fenced_store.raise_fence('r', 1)")
    lock = clients().lock("a", claims=["r"])
    waiting = asyncio.ensure_future(lock.acquire())
    await asyncio.to_thread(sessions.wait_until_a_session_waits)
    assert not waiting.done()
    older.do("COMMIT")
    assert (await waiting).token > 0


@sync_first
@pytest.mark.usefixtures("patient")
@pytest.mark.second_stage
async def test_acquire_times_out_behind_a_transaction_past_the_fence(clients: Clients, sessions: Sessions) -> None:
    older = sessions.open()
    older.do("BEGIN")
    older.do("SELECT fenced_store.raise_fence('r', 1)")
    lock = clients().lock("a", claims=["r"])
    with pytest.raises(dblock.LockTimeout):
        await lock.acquire(timeout=1.2)
    assert await lock.try_acquire() is None
    assert await lock.holder() is None
    older.do("COMMIT")
    assert await lock.try_acquire() is not None


async def test_claim_of_a_store_raises_claim_timeout_after_its_patience(
    clients: Clients, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_calls, "REPLY_MARGIN", 20.0)
    older = sessions.open()
    older.do("BEGIN")
    older.do("SELECT fenced_store.raise_fence('r', 1)")
    store = elsewhere(clients, clients.dsn)
    with pytest.raises(fenced_store.ClaimTimeout):
        answer = store.claim("r", fence=9, patience=0.2)
        if answer is not None:
            await answer
    older.do("COMMIT")
    closing = store.close()
    if closing is not None:
        await closing


@pytest.mark.second_stage
@sync_first
@pytest.mark.usefixtures("patient")
async def test_claim_in_another_database_honours_the_timeout_of_acquire(
    clients: Clients, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_calls, "REPLY_MARGIN", 20.0)
    older = sessions.open()
    older.do("BEGIN")
    older.do("SELECT fenced_store.raise_fence('r', 1)")
    store = elsewhere(clients, clients.dsn)
    lock = clients().lock("a", claims=[store.claims("r")], ttl=60)
    began = time.monotonic()
    with pytest.raises(dblock.LockTimeout, match="passed the fence of a resource that it claims"):
        await lock.acquire(timeout=1)
    assert time.monotonic() - began < 10
    assert await lock.try_acquire() is None
    assert await lock.holder() is None
    older.do("COMMIT")
    closing = store.close()
    if closing is not None:
        await closing


@pytest.mark.parametrize("error", [dblock.DatabaseError("no"), RuntimeError("no")], ids=repr)
async def test_failed_claim_in_another_database_releases_the_lock(clients: Clients, error: Exception) -> None:
    class Failing:
        def claim(self, token: int, patience: float) -> None:
            raise error

    class AsyncFailing:
        async def claim(self, token: int, patience: float) -> None:
            raise error

    lock = clients().lock("a", claims=[AsyncFailing() if isinstance(clients, AsyncClients) else Failing()])
    for call in (lock.acquire, lock.try_acquire):
        with pytest.raises(type(error)):
            await call()
        assert await lock.holder() is None


@pytest.mark.second_stage
async def test_lease_that_expired_while_claiming_is_not_returned(clients: Clients) -> None:
    class Slow:
        def claim(self, token: int, patience: float) -> None:
            time.sleep(0.6)

    class AsyncSlow:
        async def claim(self, token: int, patience: float) -> None:
            await asyncio.sleep(0.6)

    slow = AsyncSlow() if isinstance(clients, AsyncClients) else Slow()
    lock = clients().lock("a", claims=[slow], ttl=0.3, keep_alive=False)
    with pytest.raises(dblock.LeaseLost):
        await lock.acquire()
    with pytest.raises(dblock.LeaseLost):
        # The server may have granted it later than the client knows. A reply that comes too late is no grant.
        await eventually_async(lock.try_acquire, "a grant")


async def test_fence_in_another_database_is_claimed_before_acquire_returns(clients: Clients, bare_dsn: str) -> None:
    fenced_store.install(bare_dsn)
    store = elsewhere(clients, bare_dsn)
    with psycopg.connect(bare_dsn, autocommit=True) as there:
        lock = clients().lock("a", claims=[store.claims("r", "s"), "here"])
        lease = await lock.try_acquire()
        assert fences(there) == {"r": lease.token, "s": lease.token}
        await lease.release()
        lease = await lock.acquire()
        assert fences(there) == {"r": lease.token, "s": lease.token}
        await lease.release()
        there.execute("SELECT fenced_store.raise_fence('s', %s)", (AHEAD,))
        for _ in range(2):
            with pytest.raises(fenced_store.FenceAhead):
                await lock.acquire()
            assert await lock.holder() is None, "a failed claim releases the lock"
        there.execute("DROP SCHEMA fenced_store CASCADE")
        with pytest.raises(fenced_store.NotInstalled):
            await lock.try_acquire()
        assert await lock.holder() is None
    closing = store.close()
    if closing is not None:
        await closing


async def test_claims_of_the_other_kind_of_store_are_refused(dsn: str) -> None:
    """A Client would never await asynchronous claims. An AsyncClient would be blocked by synchronous claims."""
    asynchronous, synchronous = AsyncFencedStore("host=/nowhere"), FencedStore("host=/nowhere")
    with pytest.raises(dblock.InvalidArgument, match="claims of a FencedStore"):
        dblock.Client("host=/nowhere").lock("a", claims=[asynchronous.claims("r")])
    with pytest.raises(dblock.InvalidArgument, match="claims of an AsyncFencedStore"):
        dblock.AsyncClient("host=/nowhere").lock("a", claims=[synchronous.claims("r")])


async def test_cancelled_claim_in_another_database_releases_the_lock(dsn: str) -> None:
    class Never:
        async def claim(self, token: int, patience: float) -> None:
            await asyncio.sleep(60)

    async with dblock.AsyncClient(dsn) as client:
        lock = client.lock("a", claims=[Never()])
        acquiring = asyncio.ensure_future(lock.acquire())
        await eventually_async(lock.holder, "a holder")
        acquiring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acquiring
        assert await lock.holder() is None


async def test_missing_fenced_store_names_the_command_to_run(
    clients: Clients, owner: psycopg.Connection, role: str
) -> None:
    owner.execute("DROP SCHEMA fenced_store CASCADE")
    lock = clients().lock("a", claims=["r"])
    for call in (lock.try_acquire, lock.acquire):
        with pytest.raises(dblock.SchemaError, match="dblock fence setup"):
            await call()
    assert await lock.holder() is None
    fenced_store.install(clients.dsn)
    owner.execute(sql.SQL("GRANT USAGE ON SCHEMA dblock TO {}").format(sql.Identifier(role)))
    schema.grant(clients.dsn, role)
    app = clients(conninfo.make_conninfo(clients.dsn, user=role, password="app")).lock("a", claims=["r"])
    with pytest.raises(dblock.SchemaError, match="dblock fence grant"):
        await app.acquire()
    fenced_store.grant(clients.dsn, role)
    assert await app.acquire()


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ("name", "a list of resources"),
        (None, "a list of resources"),
        ([""], "1 to 1024 bytes"),
        (["x" * 1025], "1 to 1024 bytes"),
        (["nul\0"], "without NUL"),
        ([42], "a resource's name"),
        ([b"r"], "a resource's name"),
    ],
    ids=repr,
)
def test_invalid_claims_are_refused_before_acquiring(claims: Any, said: str) -> None:
    with pytest.raises(dblock.InvalidArgument, match=said):
        dblock.Client("host=/nowhere").lock("a", claims=claims)


def test_efficiency_lock_refuses_claims() -> None:
    client: Any = dblock.Client("host=/nowhere")
    with pytest.raises(TypeError, match="claims"):
        client.efficiency_lock("a", claims=["r"])


async def test_hostile_names_are_claimed_as_they_are(clients: Clients, owner: psycopg.Connection) -> None:
    names = ["'; DROP TABLE x; --", 'a"b', "a,b", "{}", "\\", "ü\N{SNOWMAN}", "NULL", "x" * 1024, " "]
    lease = await clients().lock("a", claims=names).acquire()
    assert fences(owner) == dict.fromkeys(names, lease.token)


@sync_first
async def test_claims_name_the_store_of_the_client(clients: Clients, owner: psycopg.Connection, dsn: str) -> None:
    fenced_store.install(dsn, schema='other "store"')
    lease = await clients(fences='other "store"').lock("a", claims=["ledger"]).acquire()
    found = owner.execute('SELECT resource, token FROM "other ""store""".fences').fetchall()
    assert found == [("ledger", lease.token)]
    assert owner.execute("SELECT count(*) FROM fenced_store.fences").fetchone() == (0,)


@sync_first
async def test_claims_that_could_mean_two_stores_are_refused(
    clients: Clients, owner: psycopg.Connection, dsn: str
) -> None:
    """Otherwise a claim in another store than the writers' would protect nothing."""
    fenced_store.install(dsn, schema="other")
    client = clients()
    for acquire in (client.lock("a", claims=["ledger"]).try_acquire, client.lock("a", claims=["ledger"]).acquire):
        with pytest.raises(dblock.InvalidArgument, match=r"fenced_store, other.*fences="):
            await acquire()
    assert await client.lock("a").holder() is None
    for fenced in ("fenced_store", "other"):
        async with clients(fences=fenced).lock("a", claims=["ledger"]) as lease:
            found = owner.execute(f"SELECT token FROM {fenced}.fences WHERE resource = 'ledger'".encode()).fetchone()
            assert found == (lease.token,)
    # A lock without claims, and claims that name their store, need no choice.
    async with client.lock("b"):
        pass


async def test_store_that_a_role_cannot_use_is_no_second_meaning(
    clients: Clients, dsn: str, role: str, owner: psycopg.Connection
) -> None:
    fenced_store.install(dsn, schema="other")
    fenced_store.grant(dsn, role)
    owner.execute(sql.SQL("GRANT USAGE ON SCHEMA dblock TO {0}").format(sql.Identifier(role)))
    owner.execute(sql.SQL("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA dblock TO {0}").format(sql.Identifier(role)))
    client = clients(conninfo.make_conninfo(dsn, user=role, password="app"))
    async with client.lock("a", claims=["ledger"]):
        pass


async def test_missing_store_of_the_client_names_the_command_to_run(clients: Clients) -> None:
    with pytest.raises(dblock.SchemaError, match='"nowhere" does not exist.*dblock fence setup'):
        await clients(fences="nowhere").lock("a", claims=["ledger"]).acquire()


@pytest.mark.parametrize("fences", ["", "pg_catalog", "public", 5, "a\0"])
def test_invalid_schema_of_fences_is_refused(fences: Any) -> None:
    with pytest.raises(dblock.InvalidArgument):
        dblock.Client("host=/nowhere", fences=fences)
