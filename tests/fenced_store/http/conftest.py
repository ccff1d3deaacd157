"""Fixtures and helpers for the tests of HTTP services."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import psycopg
import pytest
from sqlalchemy import NullPool, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fenced_store.http import FencingMiddleware
from tests.fenced_store.postgres.conftest import url

Handler = Callable[[Request], Awaitable[Response]]


RULES = {"* /things/{name}": "thing:{name}"}


@pytest.fixture
async def engine(dsn: str) -> AsyncIterator[AsyncEngine]:
    made = create_async_engine(url(dsn), poolclass=NullPool)
    yield made
    await made.dispose()


class Web:
    """Serves applications with one handler each behind the middleware, and makes clients for them."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._clients: list[httpx.AsyncClient] = []

    def serve(self, handler: Handler, rules: Any = None, **options: Any) -> httpx.AsyncClient:
        methods = ["GET", "PUT", "DELETE", "POST", "PATCH"]
        app = Starlette(routes=[Route("/things/{name}", handler, methods=methods)])
        app.add_middleware(FencingMiddleware, **{"fences": self.engine, "rules": rules or RULES, **options})
        return self.client(app)

    def client(self, app: Any) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._clients.append(httpx.AsyncClient(transport=transport, base_url="http://service", timeout=20))
        return self._clients[-1]

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()


@pytest.fixture
async def web(engine: AsyncEngine) -> AsyncIterator[Web]:
    made = Web(engine)
    yield made
    await made.close()


async def fine(request: Request) -> Response:
    return JSONResponse({"token": request.state.fencing.token, "write": request.state.fencing.write})


def shows(token: Any) -> dict[str, str]:
    return {"Fencing-Token": str(token)}


def is_problem(answer: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert problem["type"] == f"urn:fenced-store:{kind}"
    assert problem["status"] == status
    assert problem["title"]
    assert problem["detail"]
    return problem


@pytest.fixture
def rows(owner: psycopg.Connection) -> Callable[[], list[int]]:
    owner.execute("CREATE TABLE public.rows (token bigint)")
    return lambda: [token for (token,) in owner.execute("SELECT token FROM public.rows ORDER BY 1").fetchall()]


async def insert(request: Request) -> None:
    fencing = request.state.fencing
    await fencing.connection.execute(text("INSERT INTO public.rows VALUES (:token)"), {"token": fencing.token})
