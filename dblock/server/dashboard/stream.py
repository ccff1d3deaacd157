"""The stream of events: one for each browser, all from one snapshot a second.

Every event has the number of its snapshot as its ID, so a browser that reconnects gets all missed changes in one event.
If the database does not reply, the events say so, with the age of the last snapshot. The streams end when the server
stops.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from dblock.server.dashboard.live import MOST_QUERIES, LiveTables, lock_stamp
from dblock.server.dashboard.rows import Query
from dblock.server.feed import Feed, Snapshot
from dblock.server.problems import Problem
from dblock.server.service import Service

PING = 15.0
"""Seconds without an event after which a comment is sent, so that no proxy closes the connection."""

PAGE_LASTS = 5
"""Seconds after which a page without a table is read again."""

_BOOT = secrets.token_hex(4)
"""Distinguishes the numbers of this process from those of another."""


def stream(request: Request, service: Service, tables: LiveTables) -> Response:
    """Return the stream for a page."""
    feed = service.feed
    if feed.streams >= service.settings.limits.streams:
        raise Problem(
            503,
            "too-many-streams",
            "Too many browsers watch",
            f"This server has {service.settings.limits.streams} streams open, which is its limit.",
            "Close some, or reload the page to see the current state.",
            {"Retry-After": "10"},
        )
    content = _Content(request, tables)
    if content.query is not None and tables.is_full(content.query):
        raise Problem(
            503,
            "too-many-queries",
            "Too many different tables are watched",
            f"Browsers watch {MOST_QUERIES} different searches, filters or pages of the locks, which is the limit.",
            "Close some, or reload the page to see the current state.",
            {"Retry-After": "10"},
        )
    last = request.headers.get("last-event-id") or request.query_params.get("last", "")
    boot, _, number = last.partition(".")
    since = int(number) if boot == _BOOT and number.isascii() and number.isdecimal() and len(number) < 16 else None
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    if request.method == "HEAD":
        return Response(None, 200, headers, "text/event-stream")
    return _Stream(feed, content, since, headers)


class _Stream(StreamingResponse):
    """The stream for one browser. It counts before its first event, so that the limit holds for those that follow."""

    def __init__(self, feed: Feed, content: _Content, since: int | None, headers: dict[str, str]) -> None:
        super().__init__(_events(feed, content, since), 200, headers, "text/event-stream")
        self._feed = feed
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._feed.streams += 1
        try:
            with self._content.counted():
                await super().__call__(scope, receive, send)
        finally:
            self._feed.streams -= 1


def page_stamp() -> str:
    """Return a text that changes when pages without a table have to be read again, for all browsers together."""
    return str(int(time.time()) // PAGE_LASTS)


class _Content:
    """What the events of one stream contain."""

    def __init__(self, request: Request, tables: LiveTables) -> None:
        given = request.query_params
        self._view = given.get("view", "page")
        self._name = given.get("name", "")
        self.query = Query.parse(given) if self._view == "table" else None
        """What the table shows, None for a page without a table."""
        self._tables = tables

    def counted(self) -> AbstractContextManager[None]:
        """Return a context in which the stream counts as one that has its query."""
        return nullcontext() if self.query is None else self._tables.watched(self.query)

    def of(self, snapshot: Snapshot, since: int | None) -> str:
        """Return the content of the event for a snapshot that succeeded."""
        if self.query is not None:
            return self._tables.of(self.query, snapshot).since(since)
        stamp = lock_stamp(snapshot, self._name) if self._view == "lock" else page_stamp()
        return json.dumps({"stamp": stamp})


async def _events(feed: Feed, content: _Content, since: int | None) -> AsyncIterator[bytes]:
    yield b"retry: 1000\n\n"
    async with aclosing(feed.snapshots()) as snapshots:
        while True:
            coming = asyncio.ensure_future(anext(snapshots))
            try:
                while not (await asyncio.wait([coming], timeout=PING))[0]:
                    yield b": ping\n\n"
                snapshot = coming.result()
            except StopAsyncIteration:
                return
            finally:
                if not coming.done():
                    coming.cancel()
                    with suppress(asyncio.CancelledError, StopAsyncIteration):
                        await coming
            age = -1.0 if snapshot.age is None else round(snapshot.age, 1)
            if snapshot.error is not None:
                yield f'event: away\ndata: {{"age":{age}}}\n\n'.encode()
                continue
            yield f"id: {_BOOT}.{snapshot.number}\nevent: tick\ndata: {content.of(snapshot, since)}\n\n".encode()
            since = snapshot.number
