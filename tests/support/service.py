"""A service behind FencingMiddleware that stores things, run by uvicorn in a separate process.

/stored/…   the handler presents the request's token to a fenced store
/held/…     the handler writes to its own table, on the connection that holds the fence
/bare/…     the token is ignored
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fenced_store import AsyncFencedStore
from fenced_store._postgres.engines import async_engine_of
from fenced_store.http import FencingMiddleware
from tests.support.backends import FOUND, OVERWRITE, WRITE, is_repeated, values
from tests.support.orphans import die_with_parent


def things(dsn: str, **options: Any) -> Starlette:
    """Return the service."""
    store = AsyncFencedStore(dsn)
    engine: AsyncEngine = async_engine_of(dsn)[0]

    async def stored(request: Request) -> Response:
        name = f"stored:{request.path_params['name']}"
        if request.method == "GET":
            found = await store.get(name)
            return Response(status_code=404) if found is None else Response(found.value)
        fence = request.state.fencing
        if request.method == "POST":
            return JSONResponse({})
        if request.method == "DELETE":
            done = await store.delete(name, fence=fence)
        else:
            done = await store.put(name, await request.body(), fence=fence)
        return JSONResponse({"repeated": done.repeated})

    async def held(request: Request) -> Response:
        name = request.path_params["name"]
        if request.method == "GET":
            async with engine.connect() as connection:
                found = (await connection.execute(FOUND, {"name": name})).one_or_none()
            return Response(status_code=404) if found is None or found.data is None else Response(found.data)
        if request.method == "POST":
            return JSONResponse({})
        fencing = request.state.fencing
        data = None if request.method == "DELETE" else await request.body()
        sent = (name, data, fencing.token, fencing.write or 0)
        repeated = False
        if not (await fencing.connection.execute(WRITE, values(*sent))).one_or_none():
            found = (await fencing.connection.execute(FOUND, {"name": name})).one()
            repeated = is_repeated(*sent, found)
        return JSONResponse({"repeated": repeated})

    async def bare(request: Request) -> Response:
        name = request.path_params["name"]
        async with engine.begin() as connection:
            if request.method == "GET":
                return Response((await connection.execute(FOUND, {"name": name})).one().data)
            await connection.execute(OVERWRITE, values(name, await request.body(), 0, 0))
        return JSONResponse({})

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await store.close()
        await engine.dispose()

    methods = ["GET", "PUT", "DELETE", "POST"]
    app = Starlette(
        routes=[
            Route("/stored/{name:path}", stored, methods=methods),
            Route("/held/{name:path}", held, methods=methods),
            Route("/bare/{name:path}", bare, methods=methods),
        ],
        lifespan=lifespan,
    )
    app.add_middleware(
        FencingMiddleware, fences=dsn, rules={"* /stored/{name:path}": "stored:{name}"}, hold=False, **options
    )
    app.add_middleware(FencingMiddleware, fences=dsn, rules={"* /held/{name:path}": "held:{name}"}, **options)
    return app


@contextmanager
def running_service(dsn: str, patience: float = 60) -> Iterator[str]:
    """Run the service, and yield its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.service", dsn, str(patience)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def main() -> None:
    """Serve until terminated."""
    die_with_parent()
    import uvicorn

    # The protocol is named so that asyncio sets TCP_NODELAY; otherwise small responses would be delayed.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(256)
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        config = uvicorn.Config(things(sys.argv[1], patience=float(sys.argv[2])), log_level="warning")
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
