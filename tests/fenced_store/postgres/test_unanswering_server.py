"""No call of a store waits without a bound for a server that does not answer."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo
from sqlalchemy import create_engine

import fenced_store
from dblock.embedded import Server
from fenced_store import AsyncFencedStore, FencedStore, OutcomeUnknown, Unavailable, _calls
from fenced_store.http import middleware
from tests.fenced_store.postgres.conftest import Stores, url
from tests.support.frozen import frozen
from tests.support.machine import soon
from tests.support.proxy import Proxy
from tests.support.servers import private_server

GIVES_UP = 12.0
"""Seconds after which a call on a frozen server must have ended: dblock's own calls take 5 to 10."""


@pytest.fixture(scope="module")
def frozen_server() -> Iterator[Server]:
    if not Path("/proc/self/task").exists():
        pytest.skip("finds the server's processes in /proc")
    with private_server({"fsync": "off"}, in_memory=True) as server:
        fenced_store.install(server.url)
        yield server


def run(call: Callable[[], Any]) -> tuple[str, float]:
    """Make a call in a thread. Return the name of its outcome, and the seconds that it took."""
    outcome = ["still waiting"]
    began = time.monotonic()

    async def awaited() -> None:
        made = call()
        if inspect.isawaitable(made):
            await made

    def work() -> None:
        try:
            asyncio.run(awaited())
            outcome[0] = "done"
        except Exception as error:
            outcome[0] = type(error).__name__

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(GIVES_UP + 3)
    return outcome[0], time.monotonic() - began


@pytest.mark.second_stage
@pytest.mark.parametrize("kind", [FencedStore, AsyncFencedStore])
def test_put_on_a_new_store_gives_up_on_a_frozen_server(frozen_server: Server, kind: type) -> None:
    with frozen(frozen_server.data):
        outcome, took = run(lambda: kind(frozen_server.url).put("k", 1, fence=1))
    assert (outcome, took < GIVES_UP) == ("Unavailable", True), took


@pytest.mark.second_stage
def test_put_on_an_open_connection_gives_up_on_a_frozen_server(frozen_server: Server) -> None:
    with FencedStore(frozen_server.url) as store:
        store.get("k")
        with frozen(frozen_server.data):
            outcome, took = run(lambda: store.put("k", 1, fence=1))
        assert (outcome, took < GIVES_UP) == ("OutcomeUnknown", True), took
        store.put("k", 2, fence=2)
        assert store.get("k").value == 2  # type: ignore[union-attr]


@pytest.mark.second_stage
def test_new_store_takes_the_second_host_if_the_first_is_frozen(frozen_server: Server, dsn: str) -> None:
    two = both(frozen_server.url, dsn)
    with FencedStore(two) as store, frozen(frozen_server.data):
        outcome, took = run(lambda: store.put("only on the second host", 1, fence=1))
    assert (outcome, took < GIVES_UP) == ("done", True), took
    with FencedStore(dsn) as store:
        assert store.get("only on the second host") is not None


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of a store that waits for less than half a second."""
    monkeypatch.setattr(_calls, "REPLY_MARGIN", 0.1)
    return {"patience": 0.2}


async def answered(store: Any) -> None:
    """Ask until the store has a connection that answers: to an impatient store, a machine that stalls is silent too."""
    for _ in range(20):
        with suppress(Unavailable):
            await store.get("k")
            return
    raise AssertionError("the store got no answer")


@pytest.mark.second_stage
async def test_call_over_a_silent_connection_ends_within_the_patience_of_its_store(
    stores: Stores, impatient: dict[str, Any]
) -> None:
    with Proxy(stores.dsn) as proxy:
        store = stores(proxy.dsn, **impatient)
        calls: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
            "put": (lambda: store.put("k", 1, fence=1), OutcomeUnknown),
            "delete": (lambda: store.delete("k", fence=1), OutcomeUnknown),
            "get": (lambda: store.get("k"), Unavailable),
            "history": (lambda: store.history("k"), Unavailable),
            "claim": (lambda: store.claim("k", fence=2, patience=0.2), Unavailable),
        }
        for call, outcome in calls.values():
            await answered(store)
            proxy.fall_silent()
            with soon(2), pytest.raises(outcome, match=r"has not answered for 0\.3 s"):
                await call()
            proxy.flow()


def test_engine_of_the_user_is_usable_after_a_silence_and_has_its_own_settings(
    dsn: str, impatient: dict[str, Any]
) -> None:
    with Proxy(dsn) as proxy:
        engine = create_engine(url(proxy.dsn), pool_size=1, max_overflow=0)
        store = FencedStore(engine, patience=20)
        store.put("k", 1, fence=1)
        with engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert "wait" not in vars(driver)
        proxy.fall_silent()
        with pytest.raises(OutcomeUnknown):
            FencedStore(engine, **impatient).put("k", 2, fence=1)
        assert driver is not None
        assert driver.closed
        proxy.flow()
        store.put("k", 3, fence=2)
        engine.dispose()


@pytest.mark.second_stage
def test_slow_value_is_not_taken_for_silence(dsn: str, impatient: dict[str, Any]) -> None:
    """The limit counts from the last byte, so that a large value over a slow line arrives."""
    with FencedStore(dsn) as store:
        store.put("k", "x" * 2_000_000, fence=1)
    # Longer than a machine stalls, and shorter than the value takes.
    limit = 1.2
    with Proxy(dsn) as proxy, FencedStore(proxy.dsn, **impatient | {"patience": limit - _calls.REPLY_MARGIN}) as store:
        store.get("another")
        proxy.delay = 0.06  # for each 64 KiB
        began = time.monotonic()
        found = store.get("k")
        assert found is not None
        assert len(found.value) == 2_000_000
        assert time.monotonic() - began > limit + 0.1


def test_unreachable_database_raises_an_error_of_ours(tmp_path: Path) -> None:
    for call in (
        lambda: FencedStore(f"host={tmp_path}", patience=0.1).get("k"),
        lambda: FencedStore(f"host={tmp_path}", patience=0.1).put("k", 1, fence=1),
        lambda: fenced_store.install(f"host={tmp_path}"),
        lambda: fenced_store.protected(f"host={tmp_path}"),
    ):
        with pytest.raises(Unavailable, match="could not be asked"):
            call()


@pytest.mark.second_stage
async def test_request_behind_a_silent_database_is_refused(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "REPLY_MARGIN", 0.1)

    async def handler(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("the fence was not taken")

    with Proxy(dsn) as proxy:
        guarded = middleware.FencingMiddleware(
            handler, fences=proxy.dsn, rules={"PUT /ledger": "ledger"}, patience=0.2, within=20.0
        )
        async with guarded.engine.connect():
            pass
        proxy.fall_silent()
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "PUT", "path": "/ledger", "raw_path": b"/ledger", "query_string": b"",
            "headers": [(b"fencing-token", b"5")],
        }  # fmt: skip
        began = time.monotonic()
        await guarded(scope, receive, send)
        assert time.monotonic() - began < 10
        assert sent[0]["status"] == 503
        await guarded._engine.dispose()


def both(first: str, second: str) -> str:
    """Return a DSN with two hosts, which have the same database and role."""
    one, other = (conninfo.conninfo_to_dict(each) for each in (first, second))
    hosts = ",".join(str(each["host"]) for each in (one, other))
    ports = ",".join(str(each.get("port") or 5432) for each in (one, other))
    database = str(other["dbname"])
    with psycopg.connect(first, autocommit=True) as connection, suppress(psycopg.errors.DuplicateDatabase):
        connection.execute(f'CREATE DATABASE "{database}"'.encode())
    return conninfo.make_conninfo("", host=hosts, port=ports, dbname=database, user=other["user"])
