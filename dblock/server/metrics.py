"""`/metrics`, for Prometheus: what the database knows of all processes, and what this server does.

The path needs the role `see`, unless the settings open it. The text is written without a metrics library. If the
database does not reply, the text has `dblock_database_up 0` and the metrics of this server. The server queries the
database at most once a second, for any number of scrapers. Labels are templates of paths and classes of statuses, so
their number is bounded.
"""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dblock._core.observation import Observation
from dblock._core.outage import Outage
from dblock._core.replies import array
from dblock.observability import catalogue
from dblock.observability.catalogue import Metric
from dblock.observability.database import down, families_of
from dblock.observability.metrics import MetricsObserver
from dblock.observability.store import CONTENT_TYPE, Counter, Family, Groups, Histogram, render
from dblock.server.access import require
from dblock.server.api.openapi import OPERATIONS
from dblock.server.service import Service, service_of

logger = logging.getLogger("dblock")

ASK_EVERY = 1.0
"""Seconds for which a reply of the database serves all scrapers."""

REQUESTS = Metric(
    "dblock_http_requests_total", "counter", ("route", "code"), "server", "Requests that the HTTP server has handled."
)
REQUEST_SECONDS = Metric(
    "dblock_http_request_seconds",
    "histogram",
    (),
    "server",
    "Time until a reply of the HTTP server was complete, waits for locks included.",
    catalogue.WAITS,
)
METRICS = (REQUESTS, REQUEST_SECONDS)

PAGES = ("/healthz", "/readyz", "/metrics")
CODES = ("1xx", "2xx", "3xx", "4xx", "5xx", "none")
"""The class of a reply's status. `none` if the client disconnected before the reply."""


class ServerMetrics:
    """The metrics of one server."""

    def __init__(self, service: Service) -> None:
        flows = service.database.flows
        self.observer = MetricsObserver()
        flows.observation = Observation([self.observer], flows.holder_name, flows.clock)
        self._database = service.database
        self._prefix = service.settings.prefix
        self._requests = Counter(REQUESTS)
        self._seconds = Histogram(REQUEST_SECONDS)
        self._groups = Groups()
        self._asking = asyncio.Lock()
        self._asked_at = float("-inf")
        self._answer: list[Family] = []
        self._outage = Outage("metrics: the database replies again")

    async def families(self) -> list[Family]:
        """Return all current values."""
        return [*await self._of_database(), *self.observer.families(), self._requests.family(), self._seconds.family()]

    def count(self, scope: Scope, status: int | None, seconds: float) -> None:
        """Count a request and its reply."""
        self._requests.add(self._route(scope), "none" if status is None else f"{status // 100}xx")
        self._seconds.observe(seconds)

    def _route(self, scope: Scope) -> str:
        """Return the template of a path, and `other` for a path that the server does not know."""
        raw = bytes(scope.get("raw_path") or scope["path"].encode()).partition(b"?")[0]
        raw = raw.removeprefix(self._prefix.encode())
        if raw.startswith(b"/v1/"):
            segments = raw.removeprefix(b"/v1/").split(b"/")
            found = [operation.path for operation in OPERATIONS if operation.match(segments) is not None]
            return f"/v1{found[0]}" if found else "other"
        return raw.decode() if raw in [page.encode() for page in PAGES] else "other"

    async def _of_database(self) -> list[Family]:
        async with self._asking:
            if time.monotonic() - self._asked_at < ASK_EVERY:
                return self._answer
            try:
                rows = await self._database.read("lock_metrics", array(self._groups.known), str(catalogue.MAX_GROUPS))
            except Exception as error:
                self._outage.failed("metrics: the database could not be queried: %s", error)
                self._answer = down()
            else:
                self._outage.worked()
                self._answer = families_of([tuple(row[column] for column in _COLUMNS) for row in rows], self._groups)
            self._asked_at = time.monotonic()
            return self._answer


_COLUMNS = ("group", "held", "oldest_hold", "waiting", "oldest_wait", "overdue")


class CountRequests:
    """Counts every request, also those that are refused."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status: int | None = None

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            self._metrics.count(scope, status, time.monotonic() - began)


def routes(counted: ServerMetrics) -> list[BaseRoute]:
    """Return the routes."""

    async def metrics(request: Request) -> Response:
        """Return the text that Prometheus reads."""
        settings = service_of(request).settings
        if not settings.open_metrics:
            require(request.scope, settings, "see")
        return Response(render(await counted.families()), headers={"Content-Type": CONTENT_TYPE})

    return [Route("/metrics", metrics, methods=["GET"])]
