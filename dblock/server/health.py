"""Whether the process runs (/healthz), and whether it can serve (/readyz). Neither needs authentication."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from dblock.server.problems import RETRY_AFTER
from dblock.server.service import service_of


def routes() -> list[BaseRoute]:
    """Return the routes."""
    return [Route("/healthz", alive, methods=["GET"]), Route("/readyz", ready, methods=["GET"])]


async def alive(request: Request) -> Response:
    """Reply 200 while the process runs, even if the database does not reply: a restart would not help."""
    return PlainTextResponse("ok\n")


async def ready(request: Request) -> Response:
    """Reply 200 if the database replies and the server does not stop, else 503."""
    if not service_of(request).stopping.is_set() and await service_of(request).database.is_there():
        return PlainTextResponse("ok\n")
    return PlainTextResponse(
        "not ready: the database does not reply, or the server stops\n", 503, {"Retry-After": str(RETRY_AFTER)}
    )
