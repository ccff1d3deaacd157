"""The stream of the dashboard: differences, how browsers catch up, what it costs, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import psycopg
import pytest

from dblock.errors import Unavailable
from dblock.server.dashboard.live import MOST_QUERIES, LiveTables
from dblock.server.dashboard.rows import Query, make_table
from dblock.server.feed import Snapshot
from tests.dblock.server.conftest import Served, serving
from tests.support.eventually import eventually_async
from tests.support.machine import measured

StartServer = Callable[..., Served]


def lock(name: str, **more: Any) -> dict[str, Any]:
    """Return a held lock as a snapshot has it."""
    return {
        "name": name, "token": 7, "holder": "ann", "meta": None, "granted_at": "t0", "expires_at": "t1",
        "released_at": None, "forced_at": None, "remaining": 30.0, "waiting": 0, "kind": None, "head": None,
        "permits": None, "held": None, "held_for": 5.0, "queue": [], "alive": None, "session": None, **more,
    }  # fmt: skip


class Browser:
    """Applies differences as the script does."""

    def __init__(self, tables: LiveTables, query: Query | None = None) -> None:
        self.tables = tables
        self.query = query or Query()
        self.rows: dict[str, str] = {}
        self.order: list[str] = []
        self.last: int | None = None

    def take(self, snapshot: Snapshot) -> dict[str, Any]:
        tick: dict[str, Any] = json.loads(self.tables.of(self.query, snapshot).since(self.last))
        self.last = snapshot.number
        self.rows.update(tick.get("rows", {}))
        gone = set(self.rows) - set(tick["times"]) if tick.get("full") else tick.get("gone", [])
        for name in gone:
            self.rows.pop(name, None)  # a row may come and go while a browser sleeps
        self.order = tick.get("order", self.order)
        assert set(self.order) == set(self.rows)
        return tick


def test_tick_has_only_what_changed() -> None:
    tables = LiveTables()
    browser = Browser(tables, Query(sort="name"))
    locks = [lock(f"l{number:03}") for number in range(50)]
    assert len(browser.take(Snapshot(1, locks, 0.0))["rows"]) == 50
    assert browser.take(Snapshot(2, locks, 0.0)).keys() == {"figures"}, "nothing changed"
    locks[3] = lock("l003", expires_at="t2", remaining=60.0)
    renewed = browser.take(Snapshot(3, list(locks), 0.0))
    assert renewed.keys() == {"figures", "times"}, "a renewal moves a time only"
    assert list(renewed["times"]) == ["l003"]
    locks[4] = lock("l004", holder="bob", token=8)
    assert list(browser.take(Snapshot(4, list(locks), 0.0))["rows"]) == ["l004"]
    del locks[5]
    gone = browser.take(Snapshot(5, list(locks), 0.0))
    assert (gone["gone"], "rows" in gone) == (["l005"], False)


@pytest.mark.parametrize("seconds", [100, pytest.param(3600, marks=[pytest.mark.second_stage])])
def test_browser_that_slept_catches_up_in_one_tick(seconds: int) -> None:
    tables = LiveTables()
    awake, asleep = Browser(tables), Browser(tables)
    for browser in (awake, asleep):
        browser.take(Snapshot(1, [lock("a"), lock("b")], 0.0))
    for number in range(2, seconds + 2):
        awake.take(Snapshot(number, [lock("b", token=number), lock(f"n{number}", waiting=number % 3)], 0.0))
    asleep.take(tables._made[0] if tables._made else Snapshot())
    assert (asleep.rows, asleep.order) == (awake.rows, awake.order)
    stranger = Browser(tables)
    stranger.last = 999_999
    assert stranger.take(tables._made[0] if tables._made else Snapshot())["full"], "an unknown number gets everything"


def test_hundred_browsers_share_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def counted(snapshot: Snapshot) -> Any:
        nonlocal made
        made += 1
        return make_table(snapshot)

    monkeypatch.setattr("dblock.server.dashboard.live.make_table", counted)
    tables = LiveTables()
    browsers = [Browser(tables) for _ in range(100)]
    for number in range(1, 6):
        snapshot = Snapshot(number, [lock("a", token=number)], 0.0)
        ticks = [browser.take(snapshot) for browser in browsers]
        assert all(tick == ticks[0] for tick in ticks)
    assert made == 5


async def events(response: httpx.Response) -> AsyncIterator[dict[str, str]]:
    """Yield the events of a stream, each as its fields."""
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        if line:
            name, _, value = line.partition(":")
            fields[name or "comment"] = value.removeprefix(" ")
        elif fields:
            yield fields
            fields = {}


@pytest.mark.second_stage
async def test_stream_resumes_after_its_last_event(start_server: StartServer, owner: psycopg.Connection) -> None:
    owner.execute("SELECT try_acquire('a', '1 min', 'ann')")
    served = start_server()
    async with served.client() as client:
        async with client.stream("GET", "/events?view=table") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["x-accel-buffering"] == "no"
            found = events(response)
            assert "retry" in await anext(found)
            first = await anext(found)
            assert json.loads(first["data"])["full"]
            second = await anext(found)
            assert "rows" not in json.loads(second["data"])
        owner.execute("SELECT try_acquire('b', '1 min', 'bob')")
        async with client.stream("GET", "/events?view=table", headers={"last-event-id": second["id"]}) as response:
            async for event in events(response):
                tick = json.loads(event.get("data", "{}"))
                assert "full" not in tick, "the server knows what the browser has"
                if "rows" in tick:
                    assert list(tick["rows"]) == ["b"]
                    break


@pytest.mark.second_stage
async def test_database_sees_one_query_a_second_for_a_hundred_browsers(
    start_server: StartServer, owner: psycopg.Connection
) -> None:
    """The database counts the calls, and a browser the snapshots: one call for each, and one of each a second."""
    served = start_server()
    calls = "SELECT coalesce(sum(calls), 0) FROM pg_stat_user_functions WHERE funcname = 'list_locks'"
    try:
        owner.execute("ALTER DATABASE " + owner.info.dbname + " SET track_functions = 'all'")
    except psycopg.errors.InsufficientPrivilege:
        pytest.skip("the role may not count calls of functions")
    ticks = [asyncio.Semaphore(0) for _ in range(100)]

    async def watch(client: httpx.AsyncClient, seen: asyncio.Semaphore) -> None:
        async with client.stream("GET", "/events?view=table") as response:
            async for event in events(response):
                if "id" in event:
                    seen.release()

    async with served.client() as client:
        watching = [asyncio.create_task(watch(client, seen)) for seen in ticks]
        for seen in ticks:
            await seen.acquire()
        with measured() as lateness:
            while not ticks[0].locked():
                await ticks[0].acquire()
            before, began, count = _count(owner, calls), time.monotonic(), 12
            for _ in range(count):
                await ticks[0].acquire()
            # The first snapshot may be due at once, and this process may have read it late.
            assert time.monotonic() - began >= 0.9 * (count - 1) - 3 * lateness()
            # The database counts a call up to a second later, so it may count one or two of those before.
            assert _count(owner, calls) - before <= count + 2
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        # The database counts a call up to a second later.
        counts = [-1, _count(owner, calls)]
        while counts[-1] != counts[-2]:
            await asyncio.sleep(3)
            counts.append(_count(owner, calls))
            assert len(counts) < 8, f"no browser watches: {counts}"


def _count(owner: psycopg.Connection, calls: str) -> int:
    owner.execute("SELECT pg_stat_clear_snapshot()")
    return int((owner.execute(calls.encode()).fetchone() or (0,))[0])


@pytest.mark.alone
@pytest.mark.second_stage
async def test_sigterm_ends_fifty_streams_within_two_seconds(start_server: StartServer) -> None:
    served = start_server()
    async with served.client() as client:
        opened = asyncio.Semaphore(0)

        async def watch() -> None:
            async with client.stream("GET", "/events?view=table") as response:
                async for event in events(response):
                    if "data" in event:
                        opened.release()

        watching = [asyncio.create_task(watch()) for _ in range(50)]
        for _ in watching:
            await opened.acquire()
        with measured() as lateness:
            served.process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            code = await asyncio.to_thread(served.process.wait, 30)
            assert time.monotonic() - began <= 2 + 3 * lateness()
        assert code == 0
        await asyncio.gather(*watching)


async def test_server_limits_its_streams(dsn: str) -> None:
    async with serving(dsn) as http:
        http.service.feed.streams = http.service.settings.limits.streams
        response = await http.get("/events")
        assert response.status_code == 503
        assert "watch" in response.text


@pytest.mark.second_stage
async def test_server_limits_the_different_tables_that_are_watched(start_server: StartServer) -> None:
    """Each costs time of the one process that also renews leases."""
    served = start_server()
    async with served.client() as client, contextlib.AsyncExitStack() as opened:

        async def watch(search: int) -> int:
            response = await opened.enter_async_context(client.stream("GET", f"/events?view=table&q={search}"))
            return response.status_code

        assert {await watch(number) for number in range(MOST_QUERIES)} == {200}
        assert (await watch(MOST_QUERIES), await watch(0)) == (503, 200)
        refused = await client.get("/events?view=table&q=one+more")
        assert refused.headers["retry-after"] == "10"
        assert "different" in refused.text
        await opened.aclose()

        async def accepted() -> bool:
            async with client.stream("GET", "/events?view=table&q=one+more") as response:
                return response.status_code == 200

        await eventually_async(accepted, "the stream is accepted")


@pytest.mark.second_stage
async def test_feed_tells_within_an_interval_that_the_database_does_not_reply(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(dsn) as http:
        feed = http.service.feed
        first = await feed.current()
        assert first.error is None

        async def hang(*arguments: object, **options: object) -> list[dict[str, Any]]:
            await asyncio.sleep(60)
            return []

        monkeypatch.setattr(http.service.database, "read", hang)
        with measured() as lateness:
            began = time.monotonic()
            async for snapshot in feed.snapshots():
                if snapshot.error is not None:
                    break
            assert time.monotonic() - began <= 2.2 + 3 * lateness()
        assert isinstance(snapshot.error, Unavailable)
        assert snapshot.taken_at == first.taken_at
        await feed.close()
