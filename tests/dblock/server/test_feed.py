"""However many streams watch, the database is asked once a second."""

from __future__ import annotations

import asyncio
import time

import pytest

from dblock.server.feed import Feed, Snapshot
from tests.dblock.server.conftest import Http, serving


@pytest.mark.second_stage
async def test_hundred_watchers_cost_no_more_than_one(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    read = http.service.database.read

    async def counted(*arguments: str, **options: str) -> object:
        nonlocal asked
        asked += 1
        return await read(*arguments, **options)

    monkeypatch.setattr(http.service.database, "read", counted)
    await http.acquire("a")
    feed = Feed(http.service.database, asyncio.Event(), interval=0.1)

    async def watch() -> int:
        seen = 0
        async for snapshot in feed.snapshots():
            assert [lock["name"] for lock in snapshot.locks] == ["a"]
            seen += 1
            if seen == 5:
                break
        return seen

    began = time.monotonic()
    assert await asyncio.gather(*(watch() for _ in range(100))) == [5] * 100
    assert 4 <= asked <= (time.monotonic() - began) / 0.1 * 1.1 + 2
    assert feed._task is not None
    await feed._task  # no stream is open, so the database is left alone
    await feed.close()


async def test_snapshot_has_each_lock_with_its_queue(http: Http) -> None:
    await http.acquire("a", holder="the holder")
    await http.post("/v1/locks/a", json={"wait": 0.05, "holder": "a waiter"})
    snapshot = await http.service.feed.current()
    (lock,) = snapshot.locks
    assert (lock["holder"], lock["waiting"], lock["queue"][0]["holder"]) == ("the holder", 1, "a waiter")


async def test_snapshot_of_a_database_that_is_away_keeps_its_age() -> None:
    async with serving("postgresql://app@127.0.0.1:1/none") as http:
        feed = http.service.feed
        feed.latest = Snapshot(1, [{"name": "a"}], time.monotonic() - 60)
        snapshot = await feed.current()
        assert snapshot.error is not None
        assert snapshot.locks == [{"name": "a"}]
        assert (snapshot.age or 0) >= 60


async def test_feed_survives_an_error_that_is_not_of_the_database(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    await http.acquire("a")
    read = http.service.database.read
    replies = [ArithmeticError("a reply that cannot be read")]

    async def fails_once(*arguments: str, **options: str) -> object:
        if replies:
            raise replies.pop()
        return await read(*arguments, **options)

    monkeypatch.setattr(http.service.database, "read", fails_once)
    feed = Feed(http.service.database, asyncio.Event(), interval=0.05)
    snapshots = feed.snapshots()
    first = await asyncio.wait_for(anext(snapshots), 30)
    assert first.error is not None, "the streams are told"
    second = await asyncio.wait_for(anext(snapshots), 30)
    assert [lock["name"] for lock in second.locks] == ["a"]
    await snapshots.aclose()
    await feed.close()
