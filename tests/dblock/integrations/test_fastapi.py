"""FastAPI and Starlette: locks of requests, and start-up work that one worker does."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import httpx
import psycopg
import pytest
from fastapi import APIRouter, Depends, FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import dblock
from dblock.integrations.fastapi import locked, open_client, request_lock, run_at_start_up
from tests.support.eventually import eventually_async
from tests.support.machine import before_long

Lease = dblock.AsyncLease

STARTS = """
import asyncio, sys
import dblock
from dblock.integrations.fastapi import run_at_start_up

async def prepare():
    print("begun", flush=True)
    await asyncio.sleep(60)

async def main():
    async with dblock.AsyncClient(sys.argv[1]) as client:
        await run_at_start_up(client, "prepare", "v1", prepare)

asyncio.run(main())
"""


@asynccontextmanager
async def calling(app: Any, dsn: str) -> AsyncIterator[httpx.AsyncClient]:
    """Start the application, and yield a client that sends requests to it."""
    transport = httpx.ASGITransport(app)
    async with open_client(app, dsn), httpx.AsyncClient(transport=transport, base_url="http://app") as caller:
        yield caller


@pytest.fixture
def running() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
def may_end() -> asyncio.Event:
    """Requests for item 42 are answered when a test sets it."""
    return asyncio.Event()


@pytest.fixture
def app(running: asyncio.Event, may_end: asyncio.Event) -> FastAPI:
    made = FastAPI()

    @made.post("/items/{item}")
    async def work(item: str, lease: Annotated[Lease, locked("item:{item}")]) -> dict[str, Any]:
        running.set()
        if item == "42":
            await may_end.wait()
        return {"token": lease.token, "name": lease.name}

    @made.post("/patient/{item}")
    async def wait(item: str, lease: Annotated[Lease, locked("item:{item}", timeout=10)]) -> int:
        return lease.token

    @made.post("/endless/{item}")
    async def endless(item: str, lease: Annotated[Lease, locked("item:{item}", ttl=0.5)]) -> None:
        running.set()
        await asyncio.sleep(60)

    return made


async def test_request_holds_its_lock_until_the_endpoint_has_returned(
    app: FastAPI, dsn: str, may_end: asyncio.Event
) -> None:
    may_end.set()
    async with calling(app, dsn) as caller:
        reply = await caller.post("/items/42")
        assert reply.json()["name"] == "item:42"
        lease = await app.state.dblock.lock("item:42").try_acquire()
        assert lease is not None, "the lock was released before the response"
        assert lease.token > reply.json()["token"]
        await lease.release()


async def test_busy_lock_is_answered_with_423_and_other_locks_are_free(
    app: FastAPI, dsn: str, running: asyncio.Event, may_end: asyncio.Event
) -> None:
    async with calling(app, dsn) as caller:
        first = asyncio.create_task(caller.post("/items/42"))
        await running.wait()
        busy, free = await caller.post("/items/42"), await caller.post("/items/43")
        may_end.set()
        assert (busy.status_code, busy.headers["Retry-After"]) == (423, "1")
        assert free.status_code == 200
        assert (await first).status_code == 200


async def test_request_with_a_timeout_waits_for_its_turn(
    app: FastAPI, dsn: str, running: asyncio.Event, may_end: asyncio.Event
) -> None:
    async with calling(app, dsn) as caller:
        first = asyncio.create_task(caller.post("/items/42"))
        await running.wait()
        second = asyncio.create_task(caller.post("/patient/42"))
        await eventually_async(app.state.dblock.lock("item:42").queue, "the second request waits")
        may_end.set()
        assert (await second).json() > (await first).json()["token"]


@pytest.mark.second_stage
async def test_lost_lease_ends_the_endpoint_and_is_answered_with_503(
    app: FastAPI, dsn: str, running: asyncio.Event, owner: psycopg.Connection
) -> None:
    async with calling(app, dsn) as caller:
        request = asyncio.create_task(caller.post("/endless/42"))
        await running.wait()
        owner.execute("SELECT force_release('item:42', token) FROM holder('item:42')")
        reply = await asyncio.wait_for(request, 20)
        assert reply.status_code == 503
        assert "forced" in reply.text or "operator" in reply.text


async def test_response_is_not_sent_if_the_lease_turns_out_to_be_lost_at_the_end(
    dsn: str, owner: psycopg.Connection
) -> None:
    app = FastAPI()

    @app.post("/{item}")
    async def lose(item: str, lease: Annotated[Lease, locked("item:{item}")]) -> str:
        owner.execute("SELECT force_release(%s, %s, now => true)", [lease.name, lease.token])
        return "done"

    async with calling(app, dsn) as caller:
        assert (await caller.post("/42")).status_code == 503


async def test_endpoint_that_fails_releases_its_lock(dsn: str) -> None:
    app = FastAPI()

    @app.post("/{item}")
    async def fail(item: str, lease: Annotated[Lease, locked("item:{item}")]) -> None:
        raise ZeroDivisionError

    async with calling(app, dsn) as caller:
        with pytest.raises(ZeroDivisionError):
            await caller.post("/42")
        lease = await app.state.dblock.lock("item:42").try_acquire()
        assert lease is not None
        await lease.release()


def through(lease: Annotated[Lease, locked("item:{itme}")]) -> Lease:
    return lease


async def endpoint(item: str, lease: Annotated[Lease, Depends(through)]) -> None: ...


@pytest.mark.parametrize("included", [False, True])
async def test_placeholder_that_is_not_in_the_path_fails_at_the_start(dsn: str, included: bool) -> None:
    app, router = FastAPI(), APIRouter()
    (router if included else app).post("/{item}")(endpoint)
    app.include_router(router, prefix="/items")
    with pytest.raises(dblock.InvalidArgument, match=r"\{itme\} in 'item:\{itme\}' names no parameter .* item"):
        async with calling(app, dsn):
            pass


async def test_endpoint_of_starlette_holds_a_lock(dsn: str) -> None:
    async def work(request: Request) -> JSONResponse:
        async with request_lock(request, "item:{item}", timeout=0) as lease:
            return JSONResponse({"name": lease.name})

    app = Starlette(routes=[Route("/items/{item}", work, methods=["POST"])])
    async with calling(app, dsn) as caller:
        assert (await caller.post("/items/42")).json() == {"name": "item:42"}
        async with app.state.dblock.lock("item:42"):
            assert (await caller.post("/items/42")).status_code == 423


async def test_application_without_a_client_says_what_to_do(app: FastAPI) -> None:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as caller:
        with pytest.raises(dblock.ConfigurationError, match="open_client"):
            await caller.post("/items/42")


@pytest.fixture
async def workers(dsn: str) -> AsyncIterator[list[dblock.AsyncClient]]:
    """The clients of four workers."""
    made = [dblock.AsyncClient(dsn) for _ in range(4)]
    yield made
    for client in made:
        await client.close()


async def test_start_up_runs_once_over_four_workers_and_all_wait_for_it(workers: list[dblock.AsyncClient]) -> None:
    events: list[str] = []

    async def prepare() -> None:
        events.append("begun")
        await asyncio.sleep(0.05)
        events.append("done")

    async def start(client: dblock.AsyncClient) -> bool:
        ran = await run_at_start_up(client, "prepare", "v1", prepare)
        events.append("started")
        return ran

    assert sorted(await asyncio.gather(*map(start, workers))) == [False, False, False, True]
    assert events == ["begun", "done", *["started"] * 4]
    assert not await run_at_start_up(workers[0], "prepare", "v1", prepare), "a restart of the same release"
    assert await run_at_start_up(workers[0], "prepare", "v2", prepare), "the next release"


async def test_start_up_that_fails_is_run_by_the_next_worker(workers: list[dblock.AsyncClient]) -> None:
    tries: list[int] = []

    def prepare() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run_at_start_up(workers[0], "prepare", "v1", prepare)
    assert await run_at_start_up(workers[1], "prepare", "v1", prepare)
    assert len(tries) == 2


async def test_start_up_that_is_done_waits_for_no_other_release(workers: list[dblock.AsyncClient]) -> None:
    assert await run_at_start_up(workers[0], "prepare", "v1", lambda: None)
    async with workers[1].lock("start-up:prepare"):
        assert not await run_at_start_up(workers[0], "prepare", "v1", lambda: None, timeout=0)


@pytest.mark.second_stage
async def test_start_up_of_a_killed_worker_is_run_by_another(workers: list[dblock.AsyncClient], dsn: str) -> None:
    command = [sys.executable, "-c", STARTS, dsn]
    killed = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert killed.stdout is not None
    assert await asyncio.wait_for(killed.stdout.readline(), 60) == b"begun\n"
    other = asyncio.create_task(run_at_start_up(workers[0], "prepare", "v1", lambda: None))
    await eventually_async(workers[1].lock("start-up:prepare").queue, "the other worker waits")
    killed.kill()
    with before_long(5):  # the lease would last for 30 s
        assert await asyncio.wait_for(other, 60)
    await killed.wait()
