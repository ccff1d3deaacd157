"""FastAPI and Starlette: a client for each worker, a lock for each request, and start-up work that one worker does.

    @asynccontextmanager
    async def lifespan(app):
        async with open_client(app, DSN) as client:
            await run_at_start_up(client, "fill-cache", RELEASE, fill_cache)
            yield

    @app.post("/invoices/{invoice_id}/close")
    async def close(invoice_id: int, lease: Annotated[AsyncLease, locked("invoice:{invoice_id}")]): ...

Guarantee: the endpoint runs only while its request holds the lock. If the lock is busy, the response is 423. If the
lease is lost, the endpoint is cancelled and the response is 503. The lock is released before the response is sent. If
a placeholder is no parameter of the path, the application does not start.

Guarantee of `run_at_start_up`: the function succeeds once per release, over all workers and hosts. Every worker
continues only after that. If the worker that runs it fails or dies, another one runs it again.
"""

from __future__ import annotations

import inspect
import string
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from dblock.async_client import AsyncClient
from dblock.errors import ConfigurationError, DatabaseError, InvalidArgument, LeaseLost, LockTimeout

try:
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
except ImportError as error:
    raise ConfigurationError("dblock.integrations.fastapi needs Starlette: pip install 'dblock[fastapi]'.") from error

if TYPE_CHECKING:
    from dblock._core.options import Seconds
    from dblock._runtime.target import Where
    from dblock.lease import AsyncLease

BUSY, UNAVAILABLE = 423, 503
"""The status of a response if the lock is busy, and if the lease was lost or the database is away."""


@asynccontextmanager
async def open_client(app: Any, where: Where = None, **options: Any) -> AsyncIterator[AsyncClient]:
    """Open the client of this worker, as `app.state.dblock`, and close it at the end. Use it in your lifespan.

    `where` and the options are those of AsyncClient. The names of the locks of all routes are checked first.
    """
    for route in getattr(app, "routes", []):
        _check_route(route)
    async with AsyncClient(where, **options) as client:
        shared = app.state
        shared.dblock = client
        yield client


async def run_at_start_up(
    client: AsyncClient,
    name: str,
    release: str,
    function: Callable[[], Awaitable[object] | object],
    *,
    timeout: Seconds | None = None,
) -> bool:
    """Run the function once per release, and return whether this worker ran it.

    `release` names what is started, such as a commit or the tag of an image. A worker that starts while the function
    runs waits for its end, at most `timeout`. A worker that starts later returns at once, also after a restart: the
    database remembers the release for 30 days. The function must be safe to repeat: if its worker dies, another worker
    runs it again.
    """
    done = client.latch(f"start-up:{name}:{release}", count=1)
    if await done.remaining() == 0:
        return False
    async with client.lock(f"start-up:{name}", timeout=timeout, meta={"release": release}):
        if await done.remaining() == 0:
            return False
        result = function()
        if inspect.isawaitable(result):
            await result
        await done.count_down()
        return True


def locked(template: str, *, timeout: Seconds = 0, ttl: Seconds = 30.0, retry_after: int = 1, **options: Any) -> Any:
    """Return a dependency of FastAPI: the endpoint runs under the lock, and its parameter is the lease.

    `template` has placeholders for parameters of the path, as in "invoice:{invoice_id}". The request waits up to
    `timeout` for the lock, and is then refused with 423 and the header Retry-After. The other options are those of
    `AsyncClient.lock`.
    """
    from fastapi import Depends

    lock = _RequestLock(template, timeout, ttl, retry_after, options)

    async def held(request: Request) -> AsyncIterator[AsyncLease]:
        async with lock.held(request) as lease:
            yield lease

    held.dblock_lock = lock  # type: ignore[attr-defined]
    # With this scope, the lock is released and a loss is noticed before the response is sent.
    return Depends(held, scope="function")


@asynccontextmanager
async def request_lock(
    request: Request, template: str, *, timeout: Seconds = 0, ttl: Seconds = 30.0, retry_after: int = 1, **options: Any
) -> AsyncIterator[AsyncLease]:
    """Hold the lock of a request, in an endpoint of Starlette. The options are those of `locked`."""
    lock = _RequestLock(template, timeout, ttl, retry_after, options)
    async with lock.held(request) as lease:
        yield lease


class _RequestLock:
    """The lock that each request of an endpoint takes, under a name of its own."""

    def __init__(
        self, template: str, timeout: Seconds, ttl: Seconds, retry_after: int, options: dict[str, Any]
    ) -> None:
        self._template = template
        self._options = {"timeout": timeout, "ttl": ttl, **options}
        self._retry_after = retry_after
        try:
            fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
        except ValueError as error:
            raise InvalidArgument(f"The name {template!r} cannot be read: {error}.") from None
        self._fields = {field.partition(".")[0].partition("[")[0] for field in fields}

    @asynccontextmanager
    async def held(self, request: Request) -> AsyncIterator[AsyncLease]:
        client = getattr(request.app.state, "dblock", None)
        if client is None:
            raise ConfigurationError(
                "The application has no client. Open it in the lifespan, with open_client(app, …)."
            )
        self.check_path(request.url.path, request.path_params.keys())
        lock = client.lock(self._template.format(**request.path_params), **self._options)
        try:
            lease = await lock.acquire()
        except LockTimeout as error:
            raise HTTPException(BUSY, str(error), {"Retry-After": str(self._retry_after)}) from error
        except DatabaseError as error:
            raise HTTPException(UNAVAILABLE, str(error), {"Retry-After": str(self._retry_after)}) from error
        try:
            async with lease:
                yield lease
        except LeaseLost as error:
            raise HTTPException(UNAVAILABLE, str(error), {"Retry-After": str(self._retry_after)}) from error

    def check_path(self, where: str, parameters: Any) -> None:
        """Refuse a placeholder that no parameter of the path fills."""
        for field in sorted(self._fields - set(parameters)):
            listed = ", ".join(parameters) or "none"
            raise InvalidArgument(
                f"The placeholder {{{field}}} in {self._template!r} names no parameter of the path of {where}. "
                f"Its parameters: {listed}."
            )


def _check_route(route: Any) -> None:
    """Check the locks that the endpoint of a route depends on, also through other dependencies."""
    found = [route.dependant] if hasattr(route, "dependant") else []
    while found:
        dependant = found.pop()
        found += dependant.dependencies
        if lock := getattr(dependant.call, "dblock_lock", None):
            lock.check_path(route.path, route.param_convertors.keys())
    # Newer versions of FastAPI keep the routes of an included router apart.
    included = getattr(route, "effective_route_contexts", list)
    for inner in [*included(), *(getattr(route, "routes", None) or [])]:
        _check_route(inner)
