"""HTTP: whatever happens to a request, its response is true, and its fence stays raised."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

import fenced_store
from fenced_store import AsyncFencedStore, FencedStore, StaleTokenError
from fenced_store.http import FencingAuth, FencingMiddleware
from tests.fenced_store.http.conftest import RULES, Web, fine, insert, is_problem, shows
from tests.fenced_store.postgres.conftest import url
from tests.support.eventually import eventually_async
from tests.support.loop_clock import pass_time


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
        owner.execute("SELECT pg_terminate_backend(%s, 60000)", [pid])
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
            await asyncio.sleep(60)
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
        await asyncio.sleep(60)

    guarded = FencingMiddleware(app, fences=web.engine, rules=RULES, within=0.3)
    sent = await call(guarded, [])
    await asyncio.gather(*late, return_exceptions=True)
    told = [message["status"] for message in sent if message["type"] == "http.response.start"]
    assert told[:1] == ([200] if rows() else [503])


@pytest.mark.second_stage
async def test_slow_commit_is_reported_as_fence_lost(web: Web, owner: psycopg.Connection) -> None:
    owner.execute("CREATE TABLE public.slow (id int)")
    owner.execute(
        "CREATE FUNCTION public.slowly() RETURNS trigger LANGUAGE plpgsql"
        " AS $$BEGIN PERFORM pg_sleep(30); RETURN NULL; END$$"
    )
    owner.execute(
        "CREATE CONSTRAINT TRIGGER slowly AFTER INSERT ON public.slow DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION public.slowly()"
    )

    async def handler(request: Request) -> Response:
        await request.state.fencing.connection.execute(text("INSERT INTO public.slow VALUES (1)"))
        return PlainTextResponse("")

    began = asyncio.get_running_loop().time()
    is_problem(await web.serve(handler, within=2.5).put("/things/a", headers=shows(7)), 503, "fence-lost")
    assert asyncio.get_running_loop().time() - began < 15


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
        pass_time(30)
        for step in ("one", "two"):
            try:
                await asyncio.sleep(600)
                done.append(step)
            except asyncio.CancelledError:
                done.append(f"{step} cancelled")
        await asyncio.sleep(60)
        done.append("something elsewhere")
        return PlainTextResponse("")

    is_problem(await web.serve(handler, within=30).put("/things/a", headers=shows(7)), 503, "too-late")
    assert done == ["one cancelled", "two cancelled"]


async def test_cancellation_by_another_caller_is_kept(web: Web) -> None:
    cancelled = asyncio.Event()

    async def handler(request: Request) -> Response:
        pass_time(30)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)
        cancelled.set()
        return PlainTextResponse("", background=BackgroundTask(asyncio.sleep, 600))

    app = FencingMiddleware(
        Starlette(routes=[Route("/things/{name}", handler, methods=["PUT"])]),
        fences=web.engine,
        rules=RULES,
        within=30,
    )
    task = asyncio.create_task(call(app, [{"type": "http.request", "body": b""}]))
    await cancelled.wait()
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_request_cancelled_at_any_point_blocks_no_other(web: Web) -> None:
    """The request is cancelled at each point where it waits."""
    for hold in (True, False):
        client = web.serve(fine, hold=hold, patience=60)
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
        await asyncio.sleep(600)
        return PlainTextResponse("")

    client = web.serve(handler, within=30)
    request = asyncio.create_task(client.put("/things/a", headers=shows(8)))
    await entered.wait()
    if how == "too late":
        pass_time(30)
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
    small = create_async_engine(url(dsn), pool_size=1, max_overflow=0, pool_timeout=60)
    go_on = asyncio.Event()

    served: list[str] = []

    async def handler(request: Request) -> Response:
        served.append(request.path_params["name"])
        if request.path_params["name"] == "a":
            return PlainTextResponse("said", background=BackgroundTask(go_on.wait))
        return PlainTextResponse("said")

    client = web.serve(handler, fences=small, patience=60)
    waits = [asyncio.create_task(client.put("/things/a", headers=shows(7))) for _ in range(4)]
    await eventually_async(lambda: served == ["a"] * 4, "no request waits for the background task of another")
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

    clients = [web.serve(handler, fences=strict, patience=60) for _ in range(2)]  # like two processes of a service
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
