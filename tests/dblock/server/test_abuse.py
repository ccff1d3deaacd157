"""Requests that are made to harm the server: they cost little, and are refused without harm to others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from dblock.server.settings import Limits
from tests.dblock.server.by_hand import ByHand
from tests.dblock.server.conftest import Http, serving
from tests.support.eventually import eventually_async


async def a_body_that_stops() -> AsyncIterator[bytes]:
    yield b"token="
    await asyncio.sleep(3600)


@pytest.mark.parametrize("path", ["/v1/locks/a", "/signin", "/break?name=a"])
async def test_body_that_does_not_arrive_ends_the_request(path: str, dsn: str) -> None:
    async with serving(dsn, limits=Limits(body_within=0.1)) as http:
        response = await asyncio.wait_for(http.post(path, content=a_body_that_stops()), 30)
        assert response.status_code == 408


@pytest.mark.parametrize("path", ["/v1/locks/a", "/signin", "/break"])
async def test_client_that_leaves_within_its_body_is_no_error(
    path: str, http: Http, caplog: pytest.LogCaptureFixture
) -> None:
    request = ByHand(http.app, path, None)
    request.leave()
    await request.task
    assert request.status == 400
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("path", ["/lock?name=a&broken=--5", "/lock?name=a&broken=-", "/break?name=a&token=--5"])
async def test_number_that_is_none_counts_as_not_given(path: str, http: Http) -> None:
    assert (await http.get(path)).status_code in (404, 409)


async def test_unexpected_error_of_a_page_is_counted_and_has_the_usual_headers(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise ArithmeticError

    monkeypatch.setattr(http.service.feed, "current", fail)
    response = await http.get("/")
    assert (response.status_code, response.headers["x-content-type-options"]) == (500, "nosniff")
    assert "default-src" in response.headers["content-security-policy"]
    assert 'dblock_http_requests_total{route="other",code="5xx"} 1' in (await http.get("/metrics")).text


async def test_streams_that_open_at_the_same_moment_have_a_limit(dsn: str) -> None:
    async with serving(dsn, limits=Limits(streams=3)) as http:
        streams = [ByHand(http.app, "/events", {}, method="GET") for _ in range(10)]
        await eventually_async(lambda: all(one.status for one in streams), "a reply to each")
        assert sorted(one.status or 0 for one in streams) == [200] * 3 + [503] * 7
        for one in streams:
            one.leave()
            await one.task
        again = ByHand(http.app, "/events", {}, method="GET")
        await eventually_async(lambda: again.status, "a reply")
        assert again.status == 200, "a stream that has ended does not count"
        again.leave()
        await again.task


async def test_request_for_the_headers_of_a_stream_opens_none(http: Http) -> None:
    request = ByHand(http.app, "/events", {}, method="HEAD")
    await asyncio.wait_for(request.task, 30)
    assert request.status == 200
