"""ASGI middleware that refuses stale callers, for Starlette, FastAPI and any other framework.

    app.add_middleware(FencingMiddleware, fences=DSN, rules={"PUT /ledgers/{ledger}": "ledger:{ledger}"})

A request that matches a rule must carry the header Fencing-Token. Guarantee: the request reaches its handler only if no
higher token was seen by the resource or claimed for it. While the handler runs, the fence is held: a request with a
higher token waits until the response is ready. The work of two holders therefore never overlaps, and a superseded
holder never runs beside its successor.

Writes of the handler on `request.state.fencing.connection` are part of the fence's transaction. They are stored if and
only if the status of the response is below 400, and the response waits for the commit. Other effects of the handler are
protected while the fence is held. A handler that takes longer than `within` is cancelled before the fence is lost. A
handler in a thread, or a process that is frozen for so long, cannot be cancelled and loses its fence. With `hold=False`
the fence is raised and released, and the handler presents `request.state.fencing` to a fenced resource, which compares
the token again with each write.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakValueDictionary

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from fenced_store._calls import REPLY_MARGIN
from fenced_store._postgres.connections import LimitedCall
from fenced_store._postgres.engines import Database, async_engine_of
from fenced_store._postgres.identifiers import DEFAULT_SCHEMA, check_resource
from fenced_store._postgres.opening import opened
from fenced_store.errors import InvalidArgument, sqlstate
from fenced_store.fencing import Fence
from fenced_store.http.problems import Refusal, busy, lost, refusal_of, too_late, undone, unreachable
from fenced_store.http.response import Message, Response, Send
from fenced_store.http.rules import Scope, compile_rules
from fenced_store.tokens import MAX_BIGINT, fence_holders

TOKEN_HEADER = b"fencing-token"
WRITE_HEADER = b"fencing-write"

Receive = Callable[[], Awaitable[Message]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_NUMBER = re.compile(rb"[1-9][0-9]{0,18}")
_BOUNDS = text(
    "SELECT current_setting('lock_timeout'), set_config('lock_timeout', :patience, true),"
    " set_config('idle_in_transaction_session_timeout', :within, true),"
    " set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('on', 'remote_apply')"
    " THEN current_setting('synchronous_commit') ELSE 'on' END, true)"
)
_log = logging.getLogger("fenced_store")


class RequestFence:
    """The token that a request presents, in `request.state.fencing`. Any fenced resource accepts it as a fence."""

    def __init__(self, resource: str, token: int, write: int | None, by: str) -> None:
        self.resource = resource
        self.token = token
        self.write = write
        """The write number that the caller has sent. Every write with this fence has this number, so that a retried
        request is recognised. A handler that writes one key several times numbers its writes itself, with `write=`."""
        self.by = by
        self.connection: AsyncConnection | None = None
        """The connection whose transaction holds the fence until the response is ready; None if the fence is not held.
        Only the middleware commits it or rolls it back."""


class FencingMiddleware:
    """Serves a request only if its token is not stale, and holds the fence while the handler runs."""

    def __init__(
        self,
        app: App,
        *,
        fences: Database,
        rules: Mapping[str, str | None] | Callable[[Scope], str | None],
        hold: bool = True,
        within: float = 30.0,
        patience: float = 5.0,
        connections: int = 20,
        schema: str = DEFAULT_SCHEMA,
    ) -> None:
        """Put a fence in front of an application.

        `fences` is the database with fenced_store: a DSN, or an AsyncEngine that the handlers do not use, because a
        held fence occupies a connection. `rules` maps requests to resources: from methods and a path, like "PUT,PATCH
        /ledgers/{ledger}", to the name of a resource; "*" stands for every method that may write. It can also be a
        function of the scope. The first rule that matches decides. A request that matches no rule, or a rule with None,
        passes without a fence. `within` is the number of seconds after which a handler is cancelled; reading the
        request counts. `patience` is the number of seconds that a request waits for earlier ones, and `connections` the
        number of resources in use at once.
        """
        self.app = app
        self._rule = rules if callable(rules) else compile_rules(rules)
        if not isinstance(hold, bool):
            raise InvalidArgument(f"hold is True or False; got {hold!r:.80}.")
        if isinstance(connections, bool) or not isinstance(connections, int) or connections < 1:
            raise InvalidArgument(f"connections is a whole number from 1; got {connections!r:.80}.")
        self._hold = hold
        self.within = _check_seconds("within", within)
        self.patience = _check_seconds("patience", patience)
        self.schema = schema
        options = {"pool_size": connections, "max_overflow": 0, "pool_timeout": patience}
        # A statement of the handler may take as long as the handler.
        self._engine, self._owns_engine = async_engine_of(fences, within + REPLY_MARGIN, **options)
        self.engine = self._engine.execution_options(isolation_level="READ COMMITTED")
        self._local_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """A lock per resource, for which the requests of this process wait, so that a waiting request occupies no
        connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        response = Response(send)
        try:
            resource = self._rule(scope) if scope["type"] == "http" else None
        except Refusal as refused:
            await response.replace(refused)
            return
        if resource is None:
            try:
                await self.app(scope, receive, send)
            finally:
                if scope["type"] == "lifespan" and self._owns_engine:
                    await self._engine.dispose()
            return
        if not isinstance(resource, str):
            raise InvalidArgument(
                f"A rule returns the name of a resource, or None; this one returned {type(resource).__name__}."
            )
        try:
            fence = _request_fence(scope, resource)
            scope.setdefault("state", {})["fencing"] = fence
            if self._hold:
                await self._serve_holding(scope, receive, response, fence)
            else:
                await self._serve_without_holding(scope, receive, response, fence)
        except Exception as error:
            refusal = refusal_of(error)
            if refusal is None:
                await response.flush_failure()  # the framework's own error page
                raise
            if response.started:
                raise
            await response.replace(refusal)

    async def _serve_holding(self, scope: Scope, receive: Receive, response: Response, fence: RequestFence) -> None:
        """Serve a request while its fence is held."""
        outer = fence_holders.set((*fence_holders.get(), fence))
        try:
            async with HeldFence(self, fence) as held_fence:
                response.before_end = held_fence.end
                await self.app(scope, receive, response.send_held)
                await response.finish()
        finally:
            fence_holders.reset(outer)

    async def _serve_without_holding(
        self, scope: Scope, receive: Receive, response: Response, fence: RequestFence
    ) -> None:
        """Raise the fence, and serve a request whose handler presents its token again."""
        await HeldFence(self, fence).only_raise()
        await self.app(scope, receive, response.send_through)
        await response.finish()

    async def wait_for_turn(self, fence: RequestFence) -> asyncio.Lock:
        """Wait without a connection for earlier requests of this process; return the lock that is now held."""
        lock = self._local_locks.setdefault(fence.resource, asyncio.Lock())
        try:
            await asyncio.wait_for(lock.acquire(), self.patience)
        except asyncio.TimeoutError:
            raise busy(fence.resource) from None
        return lock


class HeldFence:
    """A fence that one transaction has raised, and that a second transaction holds.

    The fence stays raised whatever happens to the request, even if the process is killed: the caller has superseded
    those with lower tokens. If the request fails, only the handler's writes on the connection are rolled back.
    """

    def __init__(self, owner: FencingMiddleware, fence: RequestFence) -> None:
        self._owner = owner
        self._fence = fence
        self._connection: AsyncConnection | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._cancelled = 0
        """How often the handler was cancelled for taking too long."""
        self._is_stored: bool | None = None
        """Whether the handler's writes are stored; None while that is unknown."""

    async def only_raise(self) -> None:
        """Raise the fence without holding it."""
        async with self._opened() as connection:
            await self._take(connection)
            await connection.commit()
        try:
            await connection.close()
        finally:
            self._local_lock.release()

    async def __aenter__(self) -> HeldFence:
        async with self._opened() as connection:
            await self._take(connection)
            await connection.commit()
            before = await self._take(connection)
            await connection.execute(text("SELECT set_config('lock_timeout', :before, true)"), {"before": before})
            self._savepoint = await connection.begin_nested()
        self._connection = self._fence.connection = connection
        self._task = asyncio.current_task()
        # Python 3.10 does not count cancellations.
        self._cancelling = getattr(self._task, "cancelling", int)()
        self._deadline = asyncio.get_running_loop().call_later(self._owner.within, self._cancel_handler)
        return self

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[AsyncConnection]:
        """Wait for this request's turn and open a connection. An error closes the connection, and becomes a refusal."""
        self._local_lock = await self._owner.wait_for_turn(self._fence)
        try:
            try:
                connection = await opened(self._owner.engine)
            except (SQLAlchemyError, OSError) as error:
                raise unreachable(error) from error
            try:
                yield connection
            except BaseException as error:
                await connection.close()
                if isinstance(error, (DBAPIError, OSError)):
                    timed_out = sqlstate(error) == "55P03"
                    raise busy(self._fence.resource) if timed_out else unreachable(error) from error
                raise
        except BaseException:
            self._local_lock.release()
            raise

    async def _take(self, connection: AsyncConnection) -> str:
        """Take the fence in a new transaction; return the former lock_timeout."""
        owner = self._owner
        bounds = {
            "patience": f"{round(owner.patience * 1000)}ms",
            # A second after the handler's deadline. It ends the transaction of a frozen process, so that no other
            # request waits for longer.
            "within": f"{round(owner.within * 1000) + 1000}ms",
        }
        with LimitedCall((await connection.get_raw_connection()).driver_connection, owner.patience + REPLY_MARGIN):
            before = str((await connection.execute(_BOUNDS, bounds)).one()[0])
            await Fence(connection, self._fence.resource, self._fence, False, owner.schema, write=0).__aenter__()
        return before

    def _cancel_handler(self) -> None:
        """Cancel the handler, and repeat this until it ends."""
        assert self._task is not None
        self._cancelled += 1
        self._task.cancel()
        self._deadline = asyncio.get_running_loop().call_later(0.1, self._cancel_handler)

    async def end(self, keep: bool) -> None:
        """Commit the handler's writes, or roll them back, and release the fence, which stays raised."""
        connection, self._connection = self._connection, None
        if connection is None:
            if keep and not self._is_stored:
                raise lost(self._fence.resource)  # the handler was cancelled in the meantime
            return
        assert self._deadline is not None
        self._deadline.cancel()
        self._fence.connection = None  # later writes on this connection would not be stored
        try:
            await asyncio.wait_for(self._settle(connection, keep), self._owner.within)
        except (SQLAlchemyError, OSError, asyncio.TimeoutError) as error:
            refusal = refusal_of(error)
            if keep and (refusal is not None or str(sqlstate(error)).startswith("23")):
                raise refusal or undone(self._fence.resource) from error
            _log.warning(
                "fence of resource %r was lost during a request (a handler must not commit or roll back its "
                "connection): %s",
                self._fence.resource,
                error,
            )
            if keep:
                raise lost(self._fence.resource) from error
        finally:
            self._local_lock.release()
            await connection.close()

    async def _settle(self, connection: AsyncConnection, keep: bool) -> None:
        if keep:
            try:
                await self._savepoint.commit()
            except DBAPIError as error:
                if sqlstate(error) != "25P02":
                    raise
                # A statement of the handler has failed, and the handler ignored that.
                await self._savepoint.rollback()
                await connection.commit()
                raise undone(self._fence.resource) from error
        else:
            await self._savepoint.rollback()
            self._is_stored = False
        await connection.commit()
        self._is_stored = keep

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        await self.end(False)
        if self._cancelled and not self._is_stored and isinstance(error, asyncio.CancelledError):
            if self._task is not None and hasattr(self._task, "uncancel"):
                for _ in range(self._cancelled):
                    self._task.uncancel()
                if self._task.cancelling() > self._cancelling:
                    return  # the task was cancelled by another caller too
            _log.warning(
                "request on resource %r cancelled: it took longer than %g s", self._fence.resource, self._owner.within
            )
            raise (lost if self._is_stored is None else too_late)(self._fence.resource) from None


def _request_fence(scope: Scope, resource: str) -> RequestFence:
    """Return the token that a request presents, or refuse the request."""
    try:
        check_resource(resource)
    except InvalidArgument as error:
        raise Refusal(400, "bad-resource", "This path names no resource", str(error)) from None
    token = _number(scope, TOKEN_HEADER, "Fencing-Token")
    if token is None:
        raise Refusal(
            428,
            "token-required",
            "A fencing token is required",
            "Acquire the lock and send its token in the header Fencing-Token.",
            resource=resource,
        )
    client = ":".join(str(part) for part in scope.get("client") or ("unknown",))
    by = f"{client!a:.100} {scope['method']} {scope['path']!a:.200}"
    return RequestFence(resource, token, _number(scope, WRITE_HEADER, "Fencing-Write"), by)


def _number(scope: Scope, header: bytes, name: str) -> int | None:
    given = [value.strip(b" \t") for key, value in scope["headers"] if key.lower() == header]
    if not given:
        return None
    if len(given) == 1 and _NUMBER.fullmatch(given[0]) and int(given[0]) <= MAX_BIGINT:
        return int(given[0])
    what = f"{len(given)} of them" if len(given) > 1 else ascii(given[0][:40].decode("latin-1"))
    raise Refusal(
        400,
        "malformed-header",
        f"The header {name} cannot be read",
        f"{name} is one whole number from 1 to 2^63 - 1, in digits; got {what}.",
    )


def _check_seconds(option: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.001 <= value <= 86_400:
        raise InvalidArgument(f"{option} is a number of seconds, from 0.001 to a day; got {value!r:.80}.")
    return value
