"""HTTP: which requests are served, and what holds while the handler writes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import quote

import httpx
import psycopg
import pytest
from fastapi import FastAPI
from fastapi import Request as FastRequest
from sqlalchemy import NullPool, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Match, Mount, Route

import dblock
import fenced_store
from fenced_store import AsyncFencedStore, FencedStore, InvalidArgument, NotInstalled, StaleTokenError
from fenced_store.http import FencingAuth, FencingMiddleware
from fenced_store.http.rules import compile_rules
from tests.fenced_store.postgres.conftest import url
from tests.support.backends import TABLE
from tests.support.service import running_service

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


# Which requests are served.


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


# Which requests a rule matches.


async def unguarded(request: Request) -> Response:
    return PlainTextResponse("fencing" if hasattr(request.state, "fencing") else "free")


async def asked(client: httpx.AsyncClient, method: str, path: str) -> str:
    answer = await client.request(method, path, headers=shows(1))
    return answer.text


async def test_rule_matches_method_and_path(web: Web) -> None:
    client = web.serve(unguarded, {"PUT,PATCH /things/{name}": "thing:{name}", "POST /things/special": "special"})
    assert [await asked(client, method, "/things/a") for method in ("GET", "PUT", "PATCH", "POST", "DELETE")] == [
        "free", "fencing", "fencing", "free", "free",
    ]  # fmt: skip
    assert await asked(client, "POST", "/things/special") == "fencing"
    assert await asked(client, "HEAD", "/things/a") == ""


async def test_reads_need_no_token_under_a_rule_for_writes(web: Web) -> None:
    client = web.serve(unguarded)
    for method in ("GET", "HEAD"):
        assert (await client.request(method, "/things/a")).status_code == 200


async def test_rules_may_be_a_function(web: Web) -> None:
    client = web.serve(fine, lambda scope: scope["path"].upper() if scope["method"] == "PUT" else None)
    await client.put("/things/a", headers=shows(8))
    problem = is_problem(await client.put("/things/a", headers=shows(7)), 409, "stale-token")
    assert problem["resource"] == "/THINGS/A"


@pytest.mark.parametrize("name", ["ü", "a b", "a%25b", "%2e%2e", "'; DROP TABLE x", "{name}", "\\1", "a\nb", "\x7f"])
async def test_path_of_any_name_is_a_resource(web: Web, name: str) -> None:
    client, path = web.serve(fine), f"/things/{quote(name, safe='')}"
    assert (await client.put(path, headers=shows(8))).status_code == 200
    problem = is_problem(await client.put(path, headers=shows(7)), 409, "stale-token")
    assert problem["resource"] == f"thing:{name}"


@pytest.mark.parametrize("path", ["/things/%00", "/things/" + "x" * 1100])
async def test_path_that_names_no_resource_is_refused(web: Web, path: str) -> None:
    is_problem(await web.serve(fine).put(path, headers=shows(7)), 400, "bad-resource")


async def test_mounted_application_is_fenced(web: Web) -> None:
    inner = Starlette(routes=[Route("/things/{name}", fine, methods=["PUT"])])
    inner.add_middleware(FencingMiddleware, fences=web.engine, rules=RULES)
    client = web.client(Starlette(routes=[Mount("/sub", inner)]))
    await client.put("/sub/things/a", headers=shows(8))
    is_problem(await client.put("/sub/things/a", headers=shows(7)), 409, "stale-token")


async def test_rule_cannot_be_bypassed_by_spelling_the_path_differently(web: Web) -> None:
    """For every spelling of the path that the router accepts."""

    async def reached(request: Request) -> Response:
        return PlainTextResponse("reached")

    methods = ["GET", "PUT"]
    app = Starlette(
        routes=[
            Route("/ledgers/{name}/close", reached, methods=methods),
            Route("/orders/{id:int}", reached, methods=methods),
            Route("/prices/{price:float}", reached, methods=methods),
            Route("/things/{id:uuid}", reached, methods=methods),
            Route("/files/{rest:path}", reached, methods=methods),
            Route("/pop", reached, methods=["GET"]),
        ]
    )
    rules = {
        "PUT /ledgers/{name}/close": "ledger:{name}",
        "PUT /orders/{id:int}": "order:{id}",
        "put /prices/{price:float}": "price:{price}",
        "PUT /things/{id:uuid}": "thing:{id}",
        "* /files/{rest:path}": "file:{rest}",
        "GET /pop": "pop",
    }
    app.add_middleware(FencingMiddleware, fences=web.engine, rules=rules)
    client = web.client(app)
    name = "0F0F0F0F-0000-0000-0000-00000000000A"
    ways = [
        "/ledgers/a/close", "/ledgers/a/close%0A", "/ledgers/a%0A/close", "/orders/7", "/orders/007",
        "/prices/1.50", f"/things/{name}", f"/things/{name.replace('-', '').lower()}", "/files/", "/files/a//b/%0A",
    ]  # fmt: skip
    for way in ways:
        assert (await client.put(way)).status_code == 428, way
        assert (await client.put(way, headers=shows(7))).text == "reached", way
    is_problem(await client.put("/orders/7%0A", headers=shows(7)), 400, "bad-resource")
    digits = "7" * 5000
    assert (await client.put(f"/orders/{digits}", headers=shows(7))).status_code in (200, 400, 404)
    for method in ("GET", "HEAD"):
        assert (await client.request(method, "/pop")).status_code == 428
    await client.put("/orders/7", headers=shows(9))
    await client.put(f"/things/{name}", headers=shows(9))
    for alias in ("/orders/007", f"/things/{name.replace('-', '').lower()}"):
        is_problem(await client.put(alias, headers=shows(8)), 409, "stale-token")


def test_line_break_in_a_path_selects_no_other_rule() -> None:
    resource_of = compile_rules({"PUT /ledgers/main": "ledger", "* /{rest:path}": "file:{rest}"})
    scope = {"type": "http", "method": "PUT", "headers": []}
    assert resource_of(scope | {"path": "/ledgers/main\n"}) == "ledger"
    assert resource_of(scope | {"path": "/ledgers/main", "method": "put"}) == "ledger"
    assert resource_of(scope | {"path": "/other\n"}) == "file:other\n"


@pytest.mark.parametrize(
    ("root", "path", "fits"),
    [
        ("", "/things/a", True),
        ("/", "/things/a", True),
        ("/api", "/api/things/a", True),
        ("/api", "/things/a", True),
        ("/api", "/apis/things/a", False),
        ("/api/", "/api/things/a", False),
        ("/things", "/things/a", False),
    ],
)
def test_rules_match_as_the_router_matches(root: str, path: str, fits: bool) -> None:
    scope = {"type": "http", "method": "PUT", "path": path, "root_path": root, "headers": []}
    assert (compile_rules(RULES)(scope) is not None) == fits
    found, _ = Route("/things/{name}", fine, methods=["PUT"]).matches(scope)
    assert (found == Match.FULL) == fits


@pytest.mark.parametrize(
    "rules",
    [
        {"PUT": "a"},
        {"/things": "a"},
        {"PUT things": "a"},
        {"PUT /a": ""},
        {"PUT /{a}": "{b}"},
        {"": "a"},
        {"*,GET /a": "a"},
        {"PUT,* /a": "a"},
        {"PUT /a ": "a"},
        {"PUT  /a": "a"},
        {"PUT /{a}/{a}": "a"},
        {1: "a"},
        {"PUT /{a:slug}": "a"},
        {"PUT /{a": "a"},
        {"PUT /a}": "a"},
        {"PUT /{}": "a"},
        {"PUT /a": "{a"},
        {"PUT /a": 1},
        {"PUT, PATCH /a": "a"},
        {", /a": "a"},
        {"PUTT /a": "a"},
        {},
        [],
        "PUT /a",
        None,
    ],
    ids=str,
)
async def test_invalid_rule_is_refused(engine: AsyncEngine, rules: Any) -> None:
    with pytest.raises(InvalidArgument):
        FencingMiddleware(fine, fences=engine, rules=rules)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [{"connections": 0}, {"connections": "5"}, {"connections": True}, {"hold": "no"}, {"hold": None}],
    ids=str,
)
async def test_invalid_option_is_refused(dsn: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"connections|hold"):
        FencingMiddleware(fine, fences=dsn, rules=RULES, **options)  # type: ignore[arg-type]


async def test_path_with_the_shape_of_a_rule_is_refused(web: Web) -> None:
    """A handler may parse a number or a UUID that the rule does not."""
    app = FastAPI()

    @app.put("/orders/{id}")
    async def order(id: int) -> int:  # noqa: A002
        return id

    @app.post("/orders/search")
    async def search() -> str:
        return "found"

    @app.put("/users/{id}")
    async def user(id: uuid.UUID) -> str:  # noqa: A002
        return str(id)

    rules = {
        "POST /orders/search": None,
        "* /orders/{id:int}": "order:{id}",
        "* /users/{id:uuid}": "user:{id}",
    }
    app.add_middleware(FencingMiddleware, fences=web.engine, rules=rules)
    client = web.client(app)
    assert (await client.put("/orders/7", headers=shows(7))).json() == 7
    name = "12345678-1234-5678-1234-567812345678"
    for path in ("/orders/+7", "/orders/%207", "/orders/7.0", "/orders/7_0", "/orders/-7", f"/users/{{{name}}}"):
        is_problem(await client.put(path), 400, "bad-resource")
        is_problem(await client.put(path, headers=shows(7)), 400, "bad-resource")
    assert (await client.post("/orders/search")).json() == "found"


async def test_function_rule_with_an_invalid_result_is_a_server_error(web: Web) -> None:
    client = web.serve(fine, lambda scope: 7)
    assert (await client.put("/things/a", headers=shows(7))).status_code == 500


@pytest.mark.parametrize("options", [{"within": 0}, {"patience": -1}, {"within": "1"}, {"patience": True}], ids=str)
async def test_invalid_time_limit_is_refused(engine: AsyncEngine, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="number of seconds"):
        FencingMiddleware(fine, fences=engine, rules=RULES, **options)  # type: ignore[arg-type]


async def test_websocket_and_lifespan_pass_through(engine: AsyncEngine) -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    guarded = FencingMiddleware(app, fences=engine, rules=RULES)
    for kind in ("websocket", "lifespan"):
        await guarded({"type": kind, "path": "/things/a"}, None, None)  # type: ignore[arg-type]
    assert seen == ["websocket", "lifespan"]


async def test_own_engine_is_disposed_of_at_shutdown(dsn: str, owner: psycopg.Connection) -> None:
    inner = Starlette(routes=[Route("/things/{name}", fine, methods=["PUT"])])
    app = FencingMiddleware(inner, fences=dsn, rules=RULES)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        assert (await client.put("/things/a", headers=shows(7))).status_code == 200
    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    assert owner.execute(others).fetchone() == (1,)
    said = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Any:
        return next(said)

    async def send(message: Any) -> None:
        pass

    await app({"type": "lifespan", "app": inner, "state": {}}, receive, send)
    await asyncio.sleep(0.1)
    assert owner.execute(others).fetchone() == (0,)


# What holds while the handler writes.


class Halfway:
    """A handler that pauses for the given tokens, and then writes."""

    def __init__(self, write: Callable[[Request], Awaitable[None]]) -> None:
        self.write = write
        self.stops: set[int] = set()
        self.halfway, self.go_on = asyncio.Event(), asyncio.Event()
        self.order: list[str] = []

    async def serve(self, request: Request) -> Response:
        token = request.state.fencing.token
        self.order.append(f"{token} begins")
        if token in self.stops:
            self.halfway.set()
            await self.go_on.wait()
        await self.write(request)
        self.order.append(f"{token} writes")
        return JSONResponse({})


@pytest.mark.parametrize("hold", [True, False])
async def test_fence_is_held_while_the_handler_runs(web: Web, hold: bool) -> None:
    """The handler writes to an unfenced resource. If the fence is held, it finishes before the next request starts. If
    not, it overwrites its successor.
    """
    ledger: list[int] = []

    async def write(request: Request) -> None:
        ledger.append(request.state.fencing.token)

    handler = Halfway(write)
    handler.stops = {7}
    client = web.serve(handler.serve, hold=hold)
    stale = asyncio.create_task(client.put("/things/a", headers=shows(7)))
    await handler.halfway.wait()
    elsewhere = await client.put("/things/b", headers=shows(8))
    assert elsewhere.status_code == 200, "another resource does not wait"
    ledger.clear()
    newer = asyncio.create_task(client.put("/things/a", headers=shows(8)))
    done, _ = await asyncio.wait([newer], timeout=0.5)
    assert bool(done) != hold
    handler.go_on.set()
    assert [(await one).status_code for one in (stale, newer)] == [200, 200]
    assert ledger == ([7, 8] if hold else [8, 7]), "in token order, if the fence is held"
    is_problem(await client.put("/things/a", headers=shows(7)), 409, "stale-token")


async def test_claim_waits_for_the_handler(web: Web, dsn: str) -> None:
    async def nothing(request: Request) -> None:
        pass

    handler = Halfway(nothing)
    handler.stops = {7}
    client = web.serve(handler.serve)
    stale = asyncio.create_task(client.put("/things/a", headers=shows(7)))
    await handler.halfway.wait()
    store = AsyncFencedStore(dsn)
    claim = asyncio.create_task(store.claim("thing:a", fence=8))
    done, _ = await asyncio.wait([claim], timeout=0.3)
    assert not done
    handler.go_on.set()
    assert (await stale).status_code == 200
    await claim
    await store.close()


async def test_stale_token_presented_again_with_the_write_is_refused(web: Web, dsn: str) -> None:
    store = AsyncFencedStore(dsn)

    async def write(request: Request) -> None:
        await store.put("ledger", request.state.fencing.token, fence=request.state.fencing)

    handler = Halfway(write)
    handler.stops = {7}
    client = web.serve(handler.serve, hold=False)
    stale = asyncio.create_task(client.put("/things/a", headers=shows(7)))
    await handler.halfway.wait()
    assert (await client.put("/things/a", headers=shows(8))).status_code == 200
    handler.go_on.set()
    problem = is_problem(await stale, 409, "stale-token")
    assert (problem["resource"], problem["offered"], problem["stored"]) == ("ledger", 7, 8)
    found = await store.get("ledger")
    assert found is not None
    assert found.value == 8
    await store.close()


async def test_repeated_request_is_stored_once(web: Web, dsn: str) -> None:
    """The caller numbers the write, so the store recognises a repeat in any process of the service."""
    store = AsyncFencedStore(dsn)

    async def handler(request: Request) -> Response:
        done = await store.put("thing:a", (await request.body()).decode(), fence=request.state.fencing)
        return JSONResponse({"repeated": done.repeated})

    client = web.serve(handler, hold=False)
    headers = {**shows(7), "Fencing-Write": "5"}
    told = [(await client.put("/things/a", content=b"one", headers=headers)).json()["repeated"] for _ in range(2)]
    assert told == [False, True]
    other = await client.put("/things/a", content=b"two", headers={**shows(7), "Fencing-Write": "4"})
    is_problem(other, 409, "stale-token")
    await store.close()


# The handler writes in the transaction that holds the fence.


@pytest.fixture
def rows(owner: psycopg.Connection) -> Callable[[], list[int]]:
    owner.execute("CREATE TABLE public.rows (token bigint)")
    return lambda: [token for (token,) in owner.execute("SELECT token FROM public.rows ORDER BY 1").fetchall()]


async def insert(request: Request) -> None:
    fencing = request.state.fencing
    await fencing.connection.execute(text("INSERT INTO public.rows VALUES (:token)"), {"token": fencing.token})


@pytest.mark.parametrize("status", [200, 201, 303, 400, 404, 409, 500])
async def test_handlers_writes_are_stored_if_the_response_succeeds(
    web: Web, rows: Callable[[], list[int]], status: int
) -> None:
    async def handler(request: Request) -> Response:
        await insert(request)
        return PlainTextResponse("said", status_code=status, headers={"x-said": "yes"})

    client = web.serve(handler)
    answer = await client.put("/things/a", headers=shows(7))
    assert (answer.status_code, answer.text, answer.headers["x-said"]) == (status, "said", "yes")
    assert rows() == ([7] if status < 400 else [])
    is_problem(await client.put("/things/a", headers=shows(6)), 409, "stale-token")


async def test_failed_request_is_rolled_back_and_its_fence_stays(web: Web, rows: Callable[[], list[int]]) -> None:
    async def handler(request: Request) -> Response:
        await insert(request)
        raise RuntimeError("gone wrong")

    client = web.serve(handler)
    answer = await client.put("/things/a", headers=shows(7))
    assert answer.status_code == 500
    assert rows() == []
    is_problem(await client.put("/things/a", headers=shows(6)), 409, "stale-token")


async def test_failed_statement_rolls_back_and_keeps_the_fence(web: Web, rows: Callable[[], list[int]]) -> None:
    async def handler(request: Request) -> Response:
        await insert(request)
        try:
            await request.state.fencing.connection.execute(text("SELECT 1 / 0"))
        except Exception:
            return PlainTextResponse("failed", status_code=422)
        raise AssertionError

    client = web.serve(handler)
    assert (await client.put("/things/a", headers=shows(7))).status_code == 422
    assert rows() == []
    is_problem(await client.put("/things/a", headers=shows(6)), 409, "stale-token")


async def test_failed_commit_replaces_the_response(
    web: Web, rows: Callable[[], list[int]], owner: psycopg.Connection
) -> None:
    """The response waits for the commit. If the commit fails, the caller gets a refusal."""

    async def handler(request: Request) -> Response:
        await insert(request)
        pid = (await request.state.fencing.connection.execute(text("SELECT pg_backend_pid()"))).scalar_one()
        owner.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
        return PlainTextResponse("all is well")

    problem = is_problem(await web.serve(handler).put("/things/a", headers=shows(7)), 503, "fence-lost")
    assert "unknown" in problem["detail"]
    assert rows() == []


async def test_streamed_response_waits_for_the_commit(
    web: Web, rows: Callable[[], list[int]], owner: psycopg.Connection
) -> None:
    async def handler(request: Request) -> Response:
        await insert(request)

        async def parts() -> AsyncIterator[bytes]:
            for part in (b"one ", b"two ", b"three"):
                await asyncio.sleep(0.01)
                assert rows() == []
                yield part

        return StreamingResponse(parts())

    answer = await web.serve(handler).put("/things/a", headers=shows(7))
    assert (answer.status_code, answer.content) == (200, b"one two three")
    assert rows() == [7]


async def test_background_task_runs_outside_the_fence(web: Web, rows: Callable[[], list[int]]) -> None:
    seen = []

    async def later() -> None:
        seen.append(rows())

    async def handler(request: Request) -> Response:
        await insert(request)
        return PlainTextResponse("said", background=BackgroundTask(later))

    await web.serve(handler).put("/things/a", headers=shows(7))
    assert seen == [[7]], "it runs after the commit and the release of the fence"


async def test_slow_handler_is_cancelled_before_the_next_request_is_served(
    web: Web, rows: Callable[[], list[int]]
) -> None:
    order: list[str] = []

    async def handler(request: Request) -> Response:
        token = request.state.fencing.token
        try:
            await insert(request)
            await asyncio.sleep(5 if token == 7 else 0)
            order.append(f"{token} is done")
        except asyncio.CancelledError:
            order.append(f"{token} is cancelled")
            raise
        return PlainTextResponse("")

    client = web.serve(handler, within=0.3)
    slow = asyncio.create_task(client.put("/things/a", headers=shows(7)))
    await asyncio.sleep(0.1)
    newer = await client.put("/things/a", headers=shows(8))
    assert newer.status_code == 200
    is_problem(await slow, 503, "too-late")
    assert order == ["7 is cancelled", "8 is done"]
    assert rows() == [8]


async def test_waiting_request_holds_no_connection(web: Web, dsn: str) -> None:
    small = create_async_engine(url(dsn), pool_size=2, max_overflow=0, pool_timeout=0.5)

    async def nothing(request: Request) -> None:
        pass

    handler = Halfway(nothing)
    handler.stops = {7}
    client = web.serve(handler.serve, fences=small)
    waits = [asyncio.create_task(client.put("/things/a", headers=shows(7))) for _ in range(4)]
    await handler.halfway.wait()
    await asyncio.sleep(0.1)
    assert (await client.put("/things/b", headers=shows(8))).status_code == 200
    handler.go_on.set()
    assert {(await one).status_code for one in waits} == {200}
    await small.dispose()


async def test_statements_count_towards_the_handlers_time_limit(web: Web) -> None:
    async def handler(request: Request) -> Response:
        for _ in range(10):
            await request.state.fencing.connection.execute(text("SELECT pg_sleep(0.1)"))
        return PlainTextResponse("")

    is_problem(await web.serve(handler, within=0.3).put("/things/a", headers=shows(7)), 503, "too-late")


async def test_deadline_ends_with_the_response(web: Web) -> None:
    done = []

    async def later() -> None:
        await asyncio.sleep(0.4)
        done.append(1)

    async def handler(request: Request) -> Response:
        return PlainTextResponse("said", background=BackgroundTask(later))

    assert (await web.serve(handler, within=0.2).put("/things/a", headers=shows(7))).text == "said"
    assert done == [1]


async def test_request_that_waits_too_long_gets_a_503(web: Web) -> None:
    async def nothing(request: Request) -> None:
        pass

    handler = Halfway(nothing)
    handler.stops = {7}
    client = web.serve(handler.serve, patience=0.2)
    slow = asyncio.create_task(client.put("/things/a", headers=shows(7)))
    await handler.halfway.wait()
    answer = await client.put("/things/a", headers=shows(8))
    is_problem(answer, 503, "busy")
    assert answer.headers["retry-after"] == "1"
    handler.go_on.set()
    assert (await slow).status_code == 200
    assert (await client.put("/things/a", headers=shows(8))).status_code == 200


async def test_timeouts_of_the_fence_do_not_apply_to_the_handler(web: Web) -> None:
    async def handler(request: Request) -> Response:
        ask = text("SELECT current_setting('lock_timeout'), current_setting('synchronous_commit')")
        return JSONResponse(list((await request.state.fencing.connection.execute(ask)).one()))

    async with web.engine.begin() as connection:
        name = (await connection.execute(text("SELECT current_database()"))).scalar_one()
        await connection.execute(text(f'ALTER DATABASE "{name}" SET synchronous_commit = off'))
        await connection.execute(text(f'ALTER DATABASE "{name}" SET lock_timeout = 12345'))
    assert (await web.serve(handler).put("/things/a", headers=shows(7))).json() == ["12345ms", "on"]


async def test_request_that_would_wait_for_itself_is_refused_at_once(web: Web, dsn: str) -> None:
    store = AsyncFencedStore(dsn)
    told: list[str] = []

    async def handler(request: Request) -> Response:
        fencing = request.state.fencing
        for act in (
            store.put("thing:a", 1, fence=fencing),
            store.put("thing:a", 1, fence=fencing.token),
            store.claim("thing:a", fence=fencing),
        ):
            with pytest.raises(InvalidArgument, match=r"wait for itself.*hold=False") as caught:
                await act
            told.append(str(caught.value))
        async with web.engine.connect() as another:
            with pytest.raises(InvalidArgument, match="wait for itself"):
                fenced_store.fence(another, "thing:a", fencing)
        async with fenced_store.fence(fencing.connection, "thing:a", fencing):
            pass
        async with (
            AsyncSession(bind=fencing.connection) as session,
            fenced_store.fence(session, "thing:a", fencing),
        ):
            pass
        await store.put("another", 1, fence=fencing)
        return PlainTextResponse("")

    assert (await web.serve(handler).put("/things/a", headers=shows(7))).status_code == 200
    assert len(told) == 3
    await store.close()


async def test_disconnected_caller_leaves_no_fence_held(web: Web, owner: psycopg.Connection) -> None:
    async def nothing(request: Request) -> None:
        pass

    handler = Halfway(nothing)
    handler.stops = {7}
    client = web.serve(handler.serve)
    gone = asyncio.create_task(client.put("/things/a", headers=shows(7)))
    await handler.halfway.wait()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert (await client.put("/things/a", headers=shows(8))).status_code == 200
    idle = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"
    assert owner.execute(idle).fetchone() == (0,)


# Whatever happens to a request, its response is true, and its fence stays raised.


async def seven_is_refused(client: httpx.AsyncClient) -> None:
    is_problem(await client.put("/things/a", headers=shows(7)), 409, "stale-token")


@pytest.mark.parametrize("word", ["commit", "rollback"])
async def test_handler_that_commits_gets_fence_lost(web: Web, rows: Callable[[], list[int]], word: str) -> None:
    async def handler(request: Request) -> Response:
        if request.state.fencing.token == 8:
            await getattr(request.state.fencing.connection, word)()
            await insert(request)
        return PlainTextResponse("all is well")

    client = web.serve(handler)
    is_problem(await client.put("/things/a", headers=shows(8)), 503, "fence-lost")
    assert rows() == []
    await seven_is_refused(client)


async def test_lost_connection_that_the_handler_ignores_is_reported(
    web: Web, rows: Callable[[], list[int]], owner: psycopg.Connection
) -> None:
    async def handler(request: Request) -> Response:
        connection = request.state.fencing.connection
        await insert(request)
        pid = (await connection.execute(text("SELECT pg_backend_pid()"))).scalar_one()
        owner.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
        with contextlib.suppress(Exception):
            await connection.execute(text("SELECT 'of no importance'"))
        return PlainTextResponse("all is well")

    client = web.serve(handler)
    is_problem(await client.put("/things/a", headers=shows(8)), 503, "fence-lost")
    assert rows() == []
    await seven_is_refused(client)


async def test_failed_statement_that_the_handler_ignores_is_reported(web: Web, rows: Callable[[], list[int]]) -> None:
    async def handler(request: Request) -> Response:
        await insert(request)
        with contextlib.suppress(Exception):
            await request.state.fencing.connection.execute(text("SELECT 1 / 0"))
        return PlainTextResponse("all is well")

    client = web.serve(handler)
    is_problem(await client.put("/things/a", headers=shows(8)), 500, "undone")
    assert rows() == []
    await seven_is_refused(client)


async def call(
    app: Any,
    messages: list[Any],
    into: list[Any] | None = None,
    then: Callable[[Any], None] = lambda message: None,
    **scope: Any,
) -> list[Any]:
    """Call an application as a server does, and return the messages that it sent."""
    sent: list[Any] = [] if into is None else into

    async def receive() -> Any:
        return messages.pop(0) if messages else await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)
        then(message)

    usual = {
        "type": "http", "method": "PUT", "path": "/things/a", "headers": [(b"fencing-token", b"7")], "client": None,
        "query_string": b"", "http_version": "1.1", "scheme": "http", "server": None,
    }  # fmt: skip
    await app(usual | scope, receive, send)
    return sent


async def test_stream_cut_off_by_a_disconnect_is_not_stored(web: Web, rows: Callable[[], list[int]]) -> None:
    """A framework may end the response in the middle without raising."""

    async def handler(request: Request) -> Response:
        await insert(request)

        async def parts() -> AsyncIterator[bytes]:
            yield b"one"
            await asyncio.sleep(5)
            await insert(request)
            yield b"two"

        return StreamingResponse(parts())

    app = FencingMiddleware(
        Starlette(routes=[Route("/things/{name}", handler, methods=["PUT"])]), fences=web.engine, rules=RULES
    )
    said = [{"type": "http.request", "body": b""}, {"type": "http.disconnect"}]
    await call(app, said, asgi={"spec_version": "2.3", "version": "3.0"})
    assert rows() == []


async def test_application_that_only_starts_its_response_stores_nothing(
    web: Web, rows: Callable[[], list[int]]
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await insert(Request(scope))
        await send({"type": "http.response.start", "status": 200, "headers": []})

    await call(FencingMiddleware(app, fences=web.engine, rules=RULES), [])
    assert rows() == []


async def test_response_from_another_task_does_not_report_rolled_back_work(
    web: Web, rows: Callable[[], list[int]]
) -> None:
    """The response arrives from another task while the request is being rolled back."""
    late: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await insert(Request(scope))

        async def answers() -> None:
            await asyncio.sleep(0.3)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"stored"})

        late.append(asyncio.create_task(answers()))
        await asyncio.sleep(5)

    guarded = FencingMiddleware(app, fences=web.engine, rules=RULES, within=0.3)
    sent = await call(guarded, [])
    await asyncio.gather(*late, return_exceptions=True)
    told = [message["status"] for message in sent if message["type"] == "http.response.start"]
    assert told[:1] == ([200] if rows() else [503])


async def test_slow_commit_is_reported_as_fence_lost(web: Web, owner: psycopg.Connection) -> None:
    owner.execute("CREATE TABLE public.slow (id int)")
    owner.execute(
        "CREATE FUNCTION public.slowly() RETURNS trigger LANGUAGE plpgsql"
        " AS $$BEGIN PERFORM pg_sleep(3); RETURN NULL; END$$"
    )
    owner.execute(
        "CREATE CONSTRAINT TRIGGER slowly AFTER INSERT ON public.slow DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION public.slowly()"
    )

    async def handler(request: Request) -> Response:
        await request.state.fencing.connection.execute(text("INSERT INTO public.slow VALUES (1)"))
        return PlainTextResponse("")

    began = asyncio.get_running_loop().time()
    is_problem(await web.serve(handler, within=0.3).put("/things/a", headers=shows(7)), 503, "fence-lost")
    assert asyncio.get_running_loop().time() - began < 2


async def test_refusal_at_commit_is_reported_as_not_stored(web: Web, owner: psycopg.Connection) -> None:
    owner.execute("CREATE TABLE public.once (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    owner.execute("INSERT INTO public.once VALUES (1)")

    async def handler(request: Request) -> Response:
        await request.state.fencing.connection.execute(text("INSERT INTO public.once VALUES (1)"))
        return PlainTextResponse("")

    is_problem(await web.serve(handler).put("/things/a", headers=shows(7)), 500, "undone")


async def test_handler_that_ignores_its_cancellation_is_cancelled_again(web: Web) -> None:
    done: list[str] = []

    async def handler(request: Request) -> Response:
        for step in ("one", "two"):
            try:
                await asyncio.sleep(3)
                done.append(step)
            except asyncio.CancelledError:
                done.append(f"{step} cancelled")
        await asyncio.sleep(3)
        done.append("something elsewhere")
        return PlainTextResponse("")

    is_problem(await web.serve(handler, within=0.2).put("/things/a", headers=shows(7)), 503, "too-late")
    assert done == ["one cancelled", "two cancelled"]


async def test_cancellation_by_another_caller_is_kept(web: Web) -> None:
    entered = asyncio.Event()

    async def handler(request: Request) -> Response:
        entered.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3)
        return PlainTextResponse("", background=BackgroundTask(asyncio.sleep, 5))

    app = FencingMiddleware(
        Starlette(routes=[Route("/things/{name}", handler, methods=["PUT"])]),
        fences=web.engine,
        rules=RULES,
        within=0.2,
    )
    task = asyncio.create_task(call(app, [{"type": "http.request", "body": b""}]))
    await entered.wait()
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_request_cancelled_at_any_point_blocks_no_other(web: Web) -> None:
    """The request is cancelled at each point where it waits."""
    for hold in (True, False):
        client = web.serve(fine, hold=hold, patience=0.5)
        for steps in range(40):
            request = asyncio.create_task(client.put("/things/a", headers=shows(7)))
            for _ in range(steps):
                await asyncio.sleep(0)
            await asyncio.sleep(0.0005 * (steps % 20))
            request.cancel()
            await asyncio.wait([request])
        assert (await client.put("/things/a", headers=shows(7))).status_code == 200


async def test_response_that_breaks_off_is_not_sent_as_success(web: Web, rows: Callable[[], list[int]]) -> None:
    async def handler(request: Request) -> Response:
        await insert(request)

        async def parts() -> AsyncIterator[bytes]:
            yield b"one"
            raise RuntimeError("gone wrong")

        return StreamingResponse(parts())

    client = web.serve(handler)
    assert (await client.put("/things/a", headers=shows(8))).status_code == 500
    assert rows() == []
    await seven_is_refused(client)


@pytest.mark.parametrize("how", ["too late", "cancelled", "killed"])
async def test_interrupted_request_still_supersedes_lower_tokens(web: Web, owner: psycopg.Connection, how: str) -> None:
    entered = asyncio.Event()

    async def handler(request: Request) -> Response:
        entered.set()
        if how == "killed":
            owner.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            raise SystemError("as good as dead")
        await asyncio.sleep(5)
        return PlainTextResponse("")

    client = web.serve(handler, within=0.3)
    request = asyncio.create_task(client.put("/things/a", headers=shows(8)))
    await entered.wait()
    if how == "cancelled":
        request.cancel()
    await asyncio.wait([request])
    await seven_is_refused(client)


async def test_fence_is_durably_raised_before_the_handler_starts(web: Web, owner: psycopg.Connection) -> None:
    seen = []

    async def handler(request: Request) -> Response:
        seen.append(owner.execute("SELECT token FROM fenced_store.fences WHERE resource = 'thing:a'").fetchone())
        return PlainTextResponse("")

    await web.serve(handler).put("/things/a", headers=shows(8))
    assert seen == [(8,)]


async def test_stale_write_of_a_protected_row_is_a_409(web: Web, owner: psycopg.Connection, dsn: str) -> None:
    owner.execute("CREATE TABLE public.accounts (id int PRIMARY KEY, total int)")
    owner.execute("INSERT INTO public.accounts VALUES (1, 0)")
    fenced_store.protect(dsn, "public.accounts")
    with FencedStore(dsn) as store:
        store.claim(fenced_store.row("public.accounts", 1), fence=9)

    async def handler(request: Request) -> Response:
        await request.state.fencing.connection.execute(text("UPDATE public.accounts SET total = 1 WHERE id = 1"))
        return PlainTextResponse("")

    client = web.serve(handler)
    problem = is_problem(await client.put("/things/a", headers=shows(8)), 409, "stale-token")
    assert (problem["resource"], problem["stored"]) == ("public.accounts:1", 9)
    assert (await client.put("/things/a", headers=shows(9))).status_code == 200


async def test_overtaken_write_of_the_same_holder_is_reported_as_such(web: Web, dsn: str) -> None:
    store = AsyncFencedStore(dsn)

    async def handler(request: Request) -> Response:
        await store.put("k", "draft", fence=request.state.fencing)
        await store.put("k", "final", fence=request.state.fencing)
        return PlainTextResponse("")

    client = web.serve(handler, hold=False)
    answer = await client.put("/things/a", headers={**shows(7), "Fencing-Write": "5"})
    problem = is_problem(answer, 409, "stale-token")
    assert problem["numbers"] == [5, 5]
    assert "may still be valid" in problem["detail"]
    with pytest.raises(StaleTokenError, match="another write under the same number") as caught:
        await client.put("/things/a", auth=FencingAuth(7))
    assert caught.value.numbers is not None
    await store.close()


async def test_connection_is_gone_after_the_response(web: Web, dsn: str) -> None:
    store = AsyncFencedStore(dsn)
    seen: list[Any] = []

    async def handler(request: Request) -> Response:
        async def later() -> None:
            seen.append(request.state.fencing.connection)
            seen.append((await store.put("thing:a", 1, fence=request.state.fencing)).token)

        return PlainTextResponse("said", background=BackgroundTask(later))

    await web.serve(handler).put("/things/a", headers=shows(7))
    assert seen == [None, 7]
    await store.close()


async def test_background_tasks_and_waiting_requests_keep_no_connection(web: Web, dsn: str) -> None:
    small = create_async_engine(url(dsn), pool_size=1, max_overflow=0, pool_timeout=0.5)
    go_on = asyncio.Event()

    served: list[str] = []

    async def handler(request: Request) -> Response:
        served.append(request.path_params["name"])
        if request.path_params["name"] == "a":
            return PlainTextResponse("said", background=BackgroundTask(go_on.wait))
        return PlainTextResponse("said")

    client = web.serve(handler, fences=small)
    waits = [asyncio.create_task(client.put("/things/a", headers=shows(7))) for _ in range(4)]
    gives_up = asyncio.get_running_loop().time() + 20
    while len(served) < 4 and asyncio.get_running_loop().time() < gives_up:
        await asyncio.sleep(0.01)
    assert served == ["a"] * 4, "no request waits for the background task of another"
    assert (await client.put("/things/b", headers=shows(7))).status_code == 200
    go_on.set()
    assert {(await one).status_code for one in waits} == {200}
    await small.dispose()


async def test_isolation_level_of_the_engine_does_not_matter(web: Web, dsn: str) -> None:
    """A handler sees the commits of the requests before it."""
    strict = create_async_engine(url(dsn), isolation_level="SERIALIZABLE", pool_size=10)

    async def handler(request: Request) -> Response:
        await asyncio.sleep(0.05)
        return PlainTextResponse("")

    clients = [web.serve(handler, fences=strict) for _ in range(2)]  # like two processes of a service
    sent = [one.put("/things/a", headers=shows(7 + number)) for number in range(3) for one in clients]
    assert {(await one).status_code for one in [asyncio.create_task(each) for each in sent]} <= {200, 409}
    await strict.dispose()


@pytest.mark.parametrize("client", [None, ("host",), ("ho\ud800st", 1), ("\0", 0), ["::1", 5, 0, 0]], ids=ascii)
async def test_request_with_any_client_address_is_checked(engine: AsyncEngine, dsn: str, client: Any) -> None:
    app = FencingMiddleware(
        Starlette(routes=[Route("/things/{name}", fine, methods=["PUT"])]), fences=engine, rules=RULES
    )
    for token, status in ((b"8", 200), (b"7", 409)):
        said = [{"type": "http.request", "body": b""}]
        sent = await call(app, said, headers=[(b"Fencing-TOKEN", token)], client=client)
        assert sent[0]["status"] == status


async def test_failed_send_sends_no_message_twice(engine: AsyncEngine) -> None:
    app = FencingMiddleware(
        Starlette(routes=[Route("/things/{name}", fine, methods=["PUT"])]), fences=engine, rules=RULES
    )
    sent: list[Any] = []

    def fails(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise OSError("the caller has gone")

    with contextlib.suppress(OSError):
        await call(app, [{"type": "http.request", "body": b""}], sent, fails)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


# Missing parts.


async def test_request_without_a_database_is_refused(web: Web) -> None:
    called = []

    async def handler(request: Request) -> Response:
        called.append(1)
        return PlainTextResponse("")

    nowhere = create_async_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
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


# The caller's side: FencingAuth.


async def test_auth_sends_the_token_of_a_lease_and_raises_when_refused(web: Web, dsn: str) -> None:
    client = web.serve(fine)
    async with dblock.AsyncClient(dsn) as locks:
        async with locks.lock("a") as lease:
            first = (await client.put("/things/a", auth=FencingAuth(lease))).json()
            again = (await client.put("/things/a", auth=FencingAuth(lease))).json()
            assert first["token"] == again["token"] == lease.token
            assert first["write"] < again["write"]
            await client.put("/things/a", headers=shows(lease.token + 1))
            with pytest.raises(StaleTokenError) as caught:
                await client.put("/things/a", auth=FencingAuth(lease))
            assert (caught.value.resource, caught.value.offered) == ("thing:a", lease.token)
            assert caught.value.stored == lease.token + 1
            assert caught.value.stored_at is not None
        with pytest.raises(dblock.LeaseLost):
            await client.put("/things/a", auth=FencingAuth(lease))


def test_auth_works_in_threads_and_with_another_auth() -> None:
    seen: list[httpx.Request] = []
    stale = {"type": "urn:fenced-store:stale-token", "resource": "r", "offered": 7, "stored": 8, "stored_at": None}
    kind = {"content-type": "application/problem+json"}
    answers = iter(
        [
            httpx.Response(200),
            httpx.Response(409, json=stale),  # not a problem document
            httpx.Response(409, headers=kind, json={"type": "about:blank", "title": "somebody else's"}),
            httpx.Response(409, headers=kind, text="not even a document"),
            httpx.Response(409, headers=kind, json={"type": "urn:fenced-store:stale-token"}),
            httpx.Response(409, headers=kind, json=[1]),
            httpx.Response(409, headers=kind, text=json.dumps(stale).replace("7", "Infinity")),
            httpx.Response(409, headers=kind, json=stale | {"numbers": [1]}),
            httpx.Response(409, headers=kind, json=stale),
        ]
    )

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return next(answers)

    auth = FencingAuth(7, httpx.BasicAuth("me", "secret"))
    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://service", auth=auth) as client:
        assert [client.put("/").status_code for _ in range(8)] == [200] + [409] * 7
        with pytest.raises(StaleTokenError, match="refuses token 7: token 8"):
            client.put("/")
    assert {request.headers["fencing-token"] for request in seen} == {"7"}
    assert all(request.headers["authorization"].startswith("Basic ") for request in seen)
    assert len({request.headers["fencing-write"] for request in seen}) == 9


def test_auth_lets_another_auth_repeat_requests() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if "authorization" not in request.headers:
            challenge = 'Digest realm="r", nonce="n", qop="auth", algorithm=MD5'
            return httpx.Response(401, headers={"www-authenticate": challenge})
        return httpx.Response(200, text=request.headers["fencing-token"])

    auth = FencingAuth(7, httpx.DigestAuth("me", "secret"))
    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        assert client.put("http://service/", auth=auth).text == "7"


def test_auth_refuses_objects_without_a_token() -> None:
    for fence in (0, None, "7", object()):
        with pytest.raises(InvalidArgument):
            FencingAuth(fence)  # type: ignore[arg-type]


# Many clients at once, on a real server.


@pytest.fixture
def service(dsn: str, owner: psycopg.Connection) -> Iterator[str]:
    owner.execute(TABLE.format("public.things").encode())
    with running_service(dsn) as address:
        yield address


CLIENTS = 64


@pytest.mark.second_stage
@pytest.mark.parametrize("folder", ["held", "stored"])
async def test_sixty_four_clients_are_served_in_token_order(
    service: str, owner: psycopg.Connection, folder: str
) -> None:
    """Accepted tokens rise, every refusal has its reason, and no response is a 500."""
    told: Counter[int] = Counter()
    accepted: list[tuple[float, float, int]] = []
    clock = asyncio.get_running_loop().time
    start = clock()

    async def caller(client: httpx.AsyncClient, number: int) -> None:
        for round_ in range(4):
            token = 1 + int((clock() - start) * 400) + random.randint(0, 60)
            headers = {**shows(token), "Fencing-Write": str(round_ * CLIENTS + number + 1)}
            kind = random.randrange(6)
            if kind == 0:
                headers["Fencing-Token"] = random.choice(["-1", "x", "9" * 40, "0"])
            elif kind == 1:
                del headers["Fencing-Token"]
            began = clock()
            answer = await client.put(f"/{folder}/one", content=f"{token}".encode(), headers=headers)
            told[answer.status_code] += 1
            if answer.status_code == 200:
                accepted.append((began, clock(), token))
            else:
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.json()["status"] == answer.status_code

    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=service, timeout=60, limits=limits) as client:
        await asyncio.gather(*(caller(client, number) for number in range(CLIENTS)))
    assert set(told) <= {200, 400, 409, 428}, told
    assert min(told[status] for status in (200, 400, 409, 428)) > 5, told
    for began, _, token in accepted:
        assert not [one for one in accepted if one[1] < began and one[2] > token], "accepted tokens rise"
    async with httpx.AsyncClient(base_url=service) as client:
        assert int((await client.get(f"/{folder}/one")).content) == max(token for _, _, token in accepted)
