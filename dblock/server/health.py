"""Whether the server lives, and whether it can serve: for a supervisor or a load balancer, without authentication."""

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
    """Answer as long as the process runs, whatever the database does: a restart would not help."""
    return PlainTextResponse("ok\n")


async def ready(request: Request) -> Response:
    """Answer 200 if the database replies, else 503."""
    if not service_of(request).stopping.is_set() and await service_of(request).database.is_there():
        return PlainTextResponse("ok\n")
    return PlainTextResponse("the database is away\n", 503, {"Retry-After": str(RETRY_AFTER)})
