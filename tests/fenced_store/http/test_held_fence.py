"""HTTP: what holds while the handler runs, and what it writes in the transaction of the fence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

import fenced_store
from fenced_store import AsyncFencedStore, InvalidArgument
from fenced_store.http import middleware
from tests.fenced_store.http.conftest import Web, insert, is_problem, shows
from tests.fenced_store.postgres.conftest import url
from tests.support.eventually import eventually_async
from tests.support.loop_clock import pass_time
from tests.support.stages import first


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
    client = web.serve(handler.serve, hold=hold, patience=60)
    stale = asyncio.create_task(client.put("/things/a", headers=shows(7)))
    await handler.halfway.wait()
    elsewhere = await client.put("/things/b", headers=shows(8))
    assert elsewhere.status_code == 200, "another resource does not wait"
    ledger.clear()
    newer = asyncio.create_task(client.put("/things/a", headers=shows(8)))
    done, _ = await asyncio.wait([newer], timeout=0.5 if hold else 60)
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
    store = AsyncFencedStore(dsn, patience=60)
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
        owner.execute("SELECT pg_terminate_backend(%s, 60000)", [pid])
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


@pytest.mark.parametrize("services", first(1, [2, 1]))
async def test_slow_handler_is_cancelled_before_the_next_request_is_served(
    web: Web, rows: Callable[[], list[int]], services: int
) -> None:
    order: list[str] = []
    inserted = asyncio.Event()

    async def handler(request: Request) -> Response:
        token = request.state.fencing.token
        try:
            await insert(request)
            if token == 7:
                inserted.set()
                await asyncio.sleep(600)
            order.append(f"{token} is done")
        except asyncio.CancelledError:
            order.append(f"{token} is cancelled")
            raise
        return PlainTextResponse("")

    client = web.serve(handler, within=30, patience=60)
    slow = asyncio.create_task(client.put("/things/a", headers=shows(7)))
    await inserted.wait()
    other = client if services == 1 else web.serve(handler, patience=60)
    waiting = asyncio.create_task(other.put("/things/a", headers=shows(8)))
    pass_time(30)
    assert (await waiting).status_code == 200
    is_problem(await slow, 503, "too-late")
    assert order == ["7 is cancelled", "8 is done"]
    assert rows() == [8]


async def test_waiting_request_holds_no_connection(web: Web, dsn: str) -> None:
    small = create_async_engine(url(dsn), pool_size=2, max_overflow=0, pool_timeout=60)

    async def nothing(request: Request) -> None:
        pass

    handler = Halfway(nothing)
    handler.stops = {7}
    client = web.serve(handler.serve, fences=small, patience=60)
    waits = [asyncio.create_task(client.put("/things/a", headers=shows(7))) for _ in range(4)]
    await handler.halfway.wait()
    await asyncio.sleep(0.1)
    assert (await client.put("/things/b", headers=shows(8))).status_code == 200
    handler.go_on.set()
    assert {(await one).status_code for one in waits} == {200}
    await small.dispose()


@pytest.mark.second_stage
async def test_statements_count_towards_the_handlers_time_limit(web: Web) -> None:
    async def handler(request: Request) -> Response:
        for _ in range(100):
            await request.state.fencing.connection.execute(text("SELECT pg_sleep(0.1)"))
        return PlainTextResponse("")

    is_problem(await web.serve(handler, within=2.2).put("/things/a", headers=shows(7)), 503, "too-late")


@pytest.mark.second_stage
async def test_deadline_ends_with_the_response(web: Web) -> None:
    done = []

    async def later() -> None:
        await asyncio.sleep(2.5)
        done.append(1)

    async def handler(request: Request) -> Response:
        return PlainTextResponse("said", background=BackgroundTask(later))

    assert (await web.serve(handler, within=2.3).put("/things/a", headers=shows(7))).text == "said"
    assert done == [1]


async def test_request_that_waits_too_long_gets_a_503(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "REPLY_MARGIN", 20.0)

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
    client = web.serve(handler.serve, patience=60)
    gone = asyncio.create_task(client.put("/things/a", headers=shows(7)))
    await handler.halfway.wait()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert (await client.put("/things/a", headers=shows(8))).status_code == 200
    idle = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"
    # A backend that ends gives its locks back a moment before it leaves the list.
    await eventually_async(lambda: not owner.execute(idle).fetchone(), "the end of every transaction")
