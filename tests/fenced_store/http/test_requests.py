"""HTTP: which requests are served, and what happens without a database."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI
from fastapi import Request as FastRequest
from sqlalchemy import NullPool
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import fenced_store
from fenced_store import AsyncFencedStore, FencedStore, NotInstalled
from fenced_store.http import FencingMiddleware
from tests.fenced_store.http.conftest import RULES, Web, fine, is_problem, shows
from tests.fenced_store.postgres.conftest import url


async def test_request_with_a_current_token_is_served(web: Web) -> None:
    client = web.serve(fine)
    for token in (7, 7, 8, 2**63 - 1):
        answer = await client.put("/things/a", headers=shows(token))
        assert (answer.status_code, answer.json()) == (200, {"token": token, "write": None})


async def test_stale_request_gets_a_409_with_details(web: Web, dsn: str) -> None:
    client = web.serve(fine)
    await client.put("/things/a", headers=shows(8))
    for method in ("PUT", "POST", "PATCH", "DELETE"):
        answer = await client.request(method, "/things/a", headers=shows(7))
        problem = is_problem(answer, 409, "stale-token")
        assert (problem["resource"], problem["offered"], problem["stored"]) == ("thing:a", 7, 8)
        assert problem["stored_at"]
        assert "Acquire the lock again" in problem["detail"]
        assert "pid" not in answer.text, "the document does not name the newer writer"
    noted = fenced_store.rejections(dsn)[0]
    assert (noted.resource, noted.offered, noted.stored) == ("thing:a", 7, 8)
    assert "DELETE '/things/a'" in str(noted.rejected)


async def test_request_without_a_token_is_refused(web: Web) -> None:
    problem = is_problem(await web.serve(fine).put("/things/a"), 428, "token-required")
    assert problem["resource"] == "thing:a"


BAD = [
    b"", b" ", b"abc", b"0", b"-1", b"+7", b"007", b"1.5", b"1e3", b"0x10", b"7 8", b"7,8", b"7;", b"\"7\"", b"\xb2",
    b"\xd9\xa7", b"9223372036854775808", b"9" * 19, b"9" * 8000, b"NaN", b"inf", b"True", b"null", b"7_0", b"'; --",
]  # fmt: skip


@pytest.mark.parametrize("header", ["Fencing-Token", "Fencing-Write"])
@pytest.mark.parametrize("value", BAD, ids=lambda value: ascii(value[:12]))
async def test_malformed_header_is_refused(web: Web, header: str, value: bytes) -> None:
    client = web.serve(fine)
    sent = [(b"Fencing-Token", b"7")] if header != "Fencing-Token" else []
    answer = await client.put("/things/a", headers=[*sent, (header.encode(), value)])
    problem = is_problem(answer, 400, "malformed-header")
    assert header in problem["title"]
    assert len(answer.content) < 600


async def test_request_with_two_tokens_is_refused(web: Web) -> None:
    answer = await web.serve(fine).put("/things/a", headers=[("Fencing-Token", "7"), ("fencing-token", "8")])
    assert "2 of them" in is_problem(answer, 400, "malformed-header")["detail"]


async def test_write_number_is_read_from_its_header(web: Web) -> None:
    answer = await web.serve(fine).put("/things/a", headers={**shows(7), "FENCING-WRITE": " 12 "})
    assert answer.json() == {"token": 7, "write": 12}


async def test_request_without_a_database_is_refused(web: Web) -> None:
    called = []

    async def handler(request: Request) -> Response:
        called.append(1)
        return PlainTextResponse("")

    nowhere = create_async_engine("postgresql+psycopg://user@127.0.0.1:1/nothing")
    answer = await web.serve(handler, fences=nowhere).put("/things/a", headers=shows(7))
    is_problem(answer, 503, "unreachable")
    assert called == []
    await nowhere.dispose()


async def test_missing_schema_names_the_command_to_run(bare_dsn: str) -> None:
    engine = create_async_engine(url(bare_dsn), poolclass=NullPool)
    app = FencingMiddleware(Starlette(), fences=engine, rules=RULES)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        with pytest.raises(NotInstalled, match="dblock fence setup"):
            await client.put("/things/a", headers=shows(7))
    await engine.dispose()


async def test_middleware_works_around_the_whole_application(web: Web, dsn: str) -> None:
    """The framework has already sent a 500 for an error that the middleware translates."""
    store = AsyncFencedStore(dsn)
    await store.put("ledger", 0, fence=9)

    async def handler(request: Request) -> Response:
        await store.put("ledger", 1, fence=request.state.fencing)
        return PlainTextResponse("")

    inner = Starlette(routes=[Route("/things/{name}", handler, methods=["PUT"])])
    for hold in (True, False):
        client = web.client(FencingMiddleware(inner, fences=web.engine, rules=RULES, hold=hold))
        is_problem(await client.put("/things/a", headers=shows(8)), 409, "stale-token")
    await store.close()


async def test_fastapi_application_is_fenced(web: Web, dsn: str) -> None:
    app = FastAPI()
    store = FencedStore(dsn)
    app.add_middleware(
        FencingMiddleware, fences=web.engine, rules={"PUT /ledgers/{ledger}": "web:{ledger}"}, hold=False
    )

    @app.put("/ledgers/{ledger}")
    def put(ledger: str, total: int, request: FastRequest) -> dict[str, int]:
        stored = store.put(ledger, total, fence=request.state.fencing)
        return {"version": stored.version}

    client = web.client(app)
    answer = await client.put("/ledgers/a", params={"total": 5}, headers=shows(7))
    assert (answer.status_code, answer.json()) == (200, {"version": 1})
    assert (await client.put("/ledgers/a", params={"total": "x"}, headers=shows(7))).status_code == 422
    store.claim("a", fence=9)
    is_problem(await client.put("/ledgers/a", params={"total": 5}, headers=shows(8)), 409, "stale-token")
    is_problem(await client.put("/ledgers/a", params={"total": 5}), 428, "token-required")
    store.close()
