"""A closed store stays closed: it opens no connection, and every call says that the store is closed."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest
from psycopg import conninfo
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from fenced_store import AsyncFencedStore, FencedStore, OutcomeUnknown, StoreClosed, _calls
from tests.fenced_store.postgres.conftest import Stores, settled, url
from tests.support.eventually import eventually

CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "put": ("put", ("k", 1), {"fence": 1}),
    "delete": ("delete", ("k",), {"fence": 1}),
    "get": ("get", ("k",), {}),
    "history": ("history", ("k",), {}),
    "claim": ("claim", ("k",), {"fence": 1}),
    "claims": ("claims", ("k",), {}),
}
"""One call of every method, by name."""

NAME = "closed store"


def connections(owner: psycopg.Connection) -> int:
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
    found = owner.execute(query, [NAME]).fetchone()
    assert found
    return int(found[0])


def wait_until_gone(owner: psycopg.Connection) -> None:
    """Wait for the backends of closed connections, which take a moment to end."""
    eventually(lambda: connections(owner) == 0, "the end of the connections")


@pytest.mark.parametrize("call", CALLS)
async def test_call_after_close_raises_and_opens_no_connection(
    stores: Stores, owner: psycopg.Connection, call: str
) -> None:
    store = stores(conninfo.make_conninfo(stores.dsn, application_name=NAME))
    await store.put("before", 1, fence=1)
    await store.close()
    wait_until_gone(owner)
    method, values, options = CALLS[call]
    with pytest.raises(StoreClosed) as caught:
        await getattr(store, method)(*values, **options)
    assert f"{stores.kind.__name__} on schema 'fenced_store' is closed" in str(caught.value)
    assert "Create a new one" in str(caught.value)
    assert connections(owner) == 0


async def test_claims_of_a_store_that_was_closed_later_raise(stores: Stores) -> None:
    store = stores()
    claims = store.inner.claims("k")
    await store.close()
    with pytest.raises(StoreClosed):
        await settled(claims.claim(1))


async def test_close_is_idempotent(stores: Stores) -> None:
    store = stores()
    await store.get("k")
    for _ in range(3):
        await store.close()
    with pytest.raises(StoreClosed):
        await store.get("k")


async def test_closed_store_cannot_be_entered(stores: Stores) -> None:
    store = stores().inner
    if isinstance(store, FencedStore):
        with store:
            store.get("k")
        with pytest.raises(StoreClosed):
            store.get("k")
        with pytest.raises(StoreClosed), store:
            pass
    else:
        async with store:
            await store.get("k")
        with pytest.raises(StoreClosed):
            await store.get("k")
        with pytest.raises(StoreClosed):
            async with store:
                pass


async def test_engine_of_the_user_outlives_the_closed_store(engine: Engine, dsn: str) -> None:
    store = FencedStore(engine)
    store.close()
    with pytest.raises(StoreClosed):
        store.get("k")
    with engine.connect() as connection:
        assert connection.execute(text("SELECT 1")).scalar() == 1
    asynchronous = create_async_engine(url(dsn))
    other = AsyncFencedStore(asynchronous)
    await other.close()
    with pytest.raises(StoreClosed):
        await other.get("k")
    async with asynchronous.connect() as users:
        assert (await users.execute(text("SELECT 1"))).scalar() == 1
    await asynchronous.dispose()


@pytest.mark.parametrize("sent", [False, True], ids=["not sent", "sent"])
def test_store_that_is_closed_between_two_tries_does_not_try_again(
    dsn: str, monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    """A write that may have arrived has an unknown outcome, also if it is the close that ends its retries."""
    store = FencedStore(dsn)
    paused, go = threading.Event(), threading.Event()

    def pause(call: _calls.Call, error: Exception) -> float:
        call.sent = sent
        paused.set()
        assert go.wait(60)
        return 0.0

    monkeypatch.setattr(store, "_delay_or_raise", pause)
    monkeypatch.setattr(store, "_statement", lambda given: text("SELECT 1 / 0"))
    raised: list[BaseException] = []

    def put() -> None:
        try:
            store.put("k", 1, fence=1)
        except Exception as error:
            raised.append(error)

    writer = threading.Thread(target=put)
    writer.start()
    assert paused.wait(60)
    store.close()
    go.set()
    writer.join(60)
    assert [type(error) for error in raised] == [OutcomeUnknown if sent else StoreClosed]


def test_connection_of_a_call_that_was_running_is_closed_when_the_call_ends(
    dsn: str, owner: psycopg.Connection
) -> None:
    store = FencedStore(conninfo.make_conninfo(dsn, application_name=NAME), patience=60)
    store.put("k", 1, fence=1)
    with psycopg.connect(dsn) as other:
        other.execute("SELECT FROM fenced_store.fences WHERE resource = 'k' FOR UPDATE")
        writer = threading.Thread(target=store.put, args=("k", 2), kwargs={"fence": 1})
        writer.start()
        waiting = "SELECT FROM pg_stat_activity WHERE application_name = %s AND wait_event_type = 'Lock'"
        eventually(lambda: owner.execute(waiting, [NAME]).fetchone() is not None, "the write waits")
        store.close()
    writer.join(60)
    wait_until_gone(owner)
    with FencedStore(dsn) as again:
        found = again.get("k")
    assert found is not None
    assert found.value == 2
