"""The server as one ASGI application: the API, the dashboard, health and metrics.

Every request passes `_Entry` first, which removes the proxy's prefix from the path, refuses requests that a browser
sends for pages of other sites, and sets the headers that every reply has.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders, State
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dblock.server import dashboard, health, metrics
from dblock.server.access import refuse_cross_site
from dblock.server.api.app import Api
from dblock.server.problems import Problem
from dblock.server.service import Service
from dblock.server.settings import Settings

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
}
"""The headers of every reply, unless its handler sets others."""


def create_app(settings: Settings) -> Starlette:
    """Return the application. Nothing is opened before the first request."""
    service = Service(settings)
    counted = metrics.ServerMetrics(service)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await service.close()

    async def refuse(request: Request, error: Exception) -> Response:
        return service.refusal(error)

    app = Starlette(
        routes=[*health.routes(), *metrics.routes(counted), *dashboard.routes()],
        middleware=[Middleware(metrics.CountRequests, metrics=counted), Middleware(_Entry, service=service)],
        exception_handlers={HTTPException: _http_error, Problem: refuse, Exception: refuse},
        lifespan=lifespan,
    )
    app.state = State({"service": service})
    return app


class _Entry:
    """Checks a request, and passes it on to the API or to the pages."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._api = Api(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        scope = self._without_prefix(scope)
        try:
            refuse_cross_site(scope, self._service.settings)
        except Problem as problem:
            await problem.response()(scope, receive, send_with_headers)
            return
        # The path before decoding decides, because a lock's name may contain any character.
        app = self._api if scope["dblock.raw_path"].startswith(b"/v1/") else self._app
        await app(scope, receive, send_with_headers)

    def _without_prefix(self, scope: Scope) -> Scope:
        """Remove the prefix from the path. A proxy may have removed it already."""
        prefix = self._service.settings.prefix
        path, raw = scope["path"], scope.get("raw_path") or scope["path"].encode()
        if prefix and (path == prefix or path.startswith(f"{prefix}/")):
            path = path.removeprefix(prefix) or "/"
            raw = raw.removeprefix(prefix.encode()) or b"/"
        # Starlette expects `path` to include `root_path`, so the prefix has a key of its own.
        return {**scope, "path": path, "raw_path": raw, "dblock.raw_path": raw, "dblock.prefix": prefix}


async def _http_error(request: Request, error: Exception) -> Response:
    """Return the problem for a request that Starlette refuses."""
    assert isinstance(error, HTTPException)
    return Problem(
        error.status_code,
        "unknown-path" if error.status_code == 404 else "refused",
        "The request was refused",
        str(error.detail),
        "See /v1/openapi.json for what the server offers.",
        error.headers,
    ).response()
