"""HTTP: which requests a rule matches, and which rules and options are valid."""

from __future__ import annotations

import uuid
from typing import Any
from urllib.parse import quote

import httpx
import psycopg
import pytest
from fastapi import FastAPI
from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match, Mount, Route

from fenced_store import InvalidArgument
from fenced_store.http import FencingMiddleware
from fenced_store.http.rules import compile_rules
from tests.fenced_store.http.conftest import RULES, Web, fine, is_problem, shows
from tests.support.eventually import eventually_async


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
    others = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND backend_type = 'client backend'"
    )
    assert owner.execute(others).fetchone() == (1,)
    said = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Any:
        return next(said)

    async def send(message: Any) -> None:
        pass

    await app({"type": "lifespan", "app": inner, "state": {}}, receive, send)
    await eventually_async(lambda: owner.execute(others).fetchone() == (0,), "the end of the engine's connections")
