"""HTTP services that refuse a stale caller: ASGI middleware, for Starlette, FastAPI and any other.

    app.add_middleware(FencingMiddleware, fences=DSN, rules={"PUT /ledgers/{ledger}": "ledger:{ledger}"})

A request that a rule names must carry the header Fencing-Token. Guarantee: it reaches the handler only if its token is
not lower than any that the resource has seen or that was claimed for it; and while the handler is at work, the fence is
held: a request with a higher token waits until the response is ready, so that what two holders do is one after the
other, and a holder that was superseded is never at work beside its successor.

What the handler does through `request.state.fencing.connection` is part of the same transaction, and is stored if and
only if the answer is below 400; the answer waits for that. What it does elsewhere is protected while the fence is held:
a handler that takes longer than `within` is cancelled first, but one that runs in a thread, or a whole process that is
frozen for so long, cannot be, and loses its fence. With `hold=False` the fence is raised and let go, and the handler
shows `request.state.fencing` to whatever fenced resource it writes to, which compares again with the write.
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

from fenced_store._postgres.engines import Where, async_engine_of
from fenced_store._postgres.identifiers import DEFAULT_SCHEMA, check_resource
from fenced_store.errors import InvalidArgument, sqlstate
from fenced_store.fencing import Fence
from fenced_store.http.problems import Refusal, busy, lost, refusal_of, too_late, undone, unreachable
from fenced_store.http.response import Answer, Message, Send
from fenced_store.http.rules import Scope, compiled
from fenced_store.tokens import MOST, held

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


class Guard:
    """What a request has shown, in `request.state.fencing`. It is a fence for any fenced resource."""

    def __init__(self, resource: str, token: int, write: int | None, by: str) -> None:
        self.resource = resource
        self.token = token
        self.write = write
        """The number that the caller has sent. It is that of every write with this fence, so that a request sent twice
        is known again; a handler that writes one key several times numbers them itself, with `write=`."""
        self.by = by
        self.connection: AsyncConnection | None = None
        """The connection whose transaction holds the fence, until the answer is ready; None where it is not held. It
        is committed and rolled back by the middleware alone."""


class FencingMiddleware:
    """Lets a request by only if its token is not stale, and holds the fence while it is served."""

    def __init__(
        self,
        app: App,
        *,
        fences: Where,
        rules: Mapping[str, str | None] | Callable[[Scope], str | None],
        hold: bool = True,
        within: float = 30.0,
        patience: float = 5.0,
        connections: int = 20,
        schema: str = DEFAULT_SCHEMA,
    ) -> None:
        """Put a fence before an application.

        `fences` is where fenced_store is installed: a DSN, or an AsyncEngine that the handlers do not use, for a held
        fence takes a connection. `rules` says which request writes what: from a method and path like "PUT,PATCH
        /ledgers/{ledger}", "*" being every method that may write, to the name of a resource; or a function of the
        scope. The first that fits counts; what fits none, or one whose resource is None, is let by. `within` is how
        many seconds a handler may take, with the reading of the request: after that it is cancelled. `patience` is how
        many a request waits for those before it, `connections` how many resources are worked on at once.
        """
        self.app = app
        self._rule = rules if callable(rules) else compiled(rules)
        if not isinstance(hold, bool):
            raise InvalidArgument(f"hold is True or False; got {hold!r:.80}.")
        if isinstance(connections, bool) or not isinstance(connections, int) or connections < 1:
            raise InvalidArgument(f"connections is a whole number from 1; got {connections!r:.80}.")
        self._hold = hold
        self.within = _seconds("within", within)
        self.patience = _seconds("patience", patience)
        self.schema = schema
        options = {"pool_size": connections, "max_overflow": 0, "pool_timeout": patience}
        self._engine, self._is_ours = async_engine_of(fences, **options)
        self.engine = self._engine.execution_options(isolation_level="READ COMMITTED")
        self._lines: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Where requests of this process wait for each other, so that those who wait hold no connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        answer = Answer(send)
        try:
            resource = self._rule(scope) if scope["type"] == "http" else None
        except Refusal as refused:
            await answer.replace(refused)
            return
        if resource is None:
            try:
                await self.app(scope, receive, send)
            finally:
                if scope["type"] == "lifespan" and self._is_ours:
                    await self._engine.dispose()
            return
        if not isinstance(resource, str):
            raise InvalidArgument(f"A rule names a resource, or None; this one returned {type(resource).__name__}.")
        try:
            guard = _guard(scope, resource)
            scope.setdefault("state", {})["fencing"] = guard
            if self._hold:
                await self._serve_inside(scope, receive, answer, guard)
            else:
                await self._serve_after(scope, receive, answer, guard)
        except Exception as error:
            refusal = refusal_of(error)
            if refusal is None:
                await answer.flush_failure()  # the framework's own word on it
                raise
            if answer.begun:
                raise
            await answer.replace(refusal)

    async def _serve_inside(self, scope: Scope, receive: Receive, answer: Answer, guard: Guard) -> None:
        """Serve a request while its fence is held."""
        outer = held.set((*held.get(), guard))
        try:
            async with HeldFence(self, guard) as held_fence:
                answer.before_end = held_fence.end
                await self.app(scope, receive, answer.held_back)
                await answer.finish()
        finally:
            held.reset(outer)

    async def _serve_after(self, scope: Scope, receive: Receive, answer: Answer, guard: Guard) -> None:
        """Raise the fence, and serve a request whose handler will show its token again."""
        await HeldFence(self, guard).only_raise()
        await self.app(scope, receive, answer.passed_on)
        await answer.finish()

    async def turn(self, guard: Guard) -> asyncio.Lock:
        """Wait for the requests of this process that came before, without a connection; return what is to be
        released.
        """
        line = self._lines.setdefault(guard.resource, asyncio.Lock())
        try:
            await asyncio.wait_for(line.acquire(), self.patience)
        except asyncio.TimeoutError:
            raise busy(guard.resource) from None
        return line


class HeldFence:
    """A fence that is held by a transaction of its own, after it was raised by another.

    Whatever becomes of the request, its fence stays raised: who has come so far has superseded the others, though its
    process be killed the next moment. Only what the handler wrote on the connection is undone if the request fails.
    """

    def __init__(self, owner: FencingMiddleware, guard: Guard) -> None:
        self._owner = owner
        self._guard = guard
        self._connection: AsyncConnection | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._cancelled = 0
        """How often the handler was told that it takes too long."""
        self._is_stored: bool | None = None
        """Whether what the handler wrote is; None while that is not known."""

    async def only_raise(self) -> None:
        """Raise the fence, and let it go."""
        async with self._opened() as connection:
            await self._take(connection)
            await connection.commit()
        try:
            await connection.close()
        finally:
            self._line.release()

    async def __aenter__(self) -> HeldFence:
        async with self._opened() as connection:
            await self._take(connection)
            await connection.commit()
            before = await self._take(connection)
            await connection.execute(text("SELECT set_config('lock_timeout', :before, true)"), {"before": before})
            self._savepoint = await connection.begin_nested()
        self._connection = self._guard.connection = connection
        self._task = asyncio.current_task()
        # Python 3.10 does not count.
        self._cancelling = getattr(self._task, "cancelling", int)()
        self._deadline = asyncio.get_running_loop().call_later(self._owner.within, self._give_up)
        return self

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[AsyncConnection]:
        """Open a connection when it is our turn. What goes wrong on it closes it, and is said in words for the
        caller.
        """
        self._line = await self._owner.turn(self._guard)
        try:
            try:
                connection = await self._owner.engine.connect()
            except (SQLAlchemyError, OSError) as error:
                raise unreachable(error) from error
            try:
                yield connection
            except BaseException as error:
                await connection.close()
                if isinstance(error, (DBAPIError, OSError)):
                    lost_patience = sqlstate(error) == "55P03"
                    raise busy(self._guard.resource) if lost_patience else unreachable(error) from error
                raise
        except BaseException:
            self._line.release()
            raise

    async def _take(self, connection: AsyncConnection) -> str:
        """Take the fence in a new transaction; return the lock_timeout that there was."""
        owner = self._owner
        bounds = {
            "patience": f"{round(owner.patience * 1000)}ms",
            # Later than our own deadline: it is for a process that is frozen, and others wait for no longer.
            "within": f"{round(owner.within * 1000) + 1000}ms",
        }
        before = str((await connection.execute(_BOUNDS, bounds)).one()[0])
        await Fence(connection, self._guard.resource, self._guard, False, owner.schema, write=0).__aenter__()
        return before

    def _give_up(self) -> None:
        """Cancel the handler, and again should it take that lightly."""
        assert self._task is not None
        self._cancelled += 1
        self._task.cancel()
        self._deadline = asyncio.get_running_loop().call_later(0.1, self._give_up)

    async def end(self, keep: bool) -> None:
        """Store what the handler wrote, or undo it, and let the fence go, raised."""
        connection, self._connection = self._connection, None
        if connection is None:
            if keep and not self._is_stored:
                raise lost(self._guard.resource)  # it was given up meanwhile
            return
        assert self._deadline is not None
        self._deadline.cancel()
        self._guard.connection = None  # from here on nothing that is written on it would count
        try:
            await asyncio.wait_for(self._settle(connection, keep), self._owner.within)
        except (SQLAlchemyError, OSError, asyncio.TimeoutError) as error:
            refusal = refusal_of(error)
            if keep and (refusal is not None or str(sqlstate(error)).startswith("23")):
                raise refusal or undone(self._guard.resource) from error
            _log.warning(
                "The fence of %r was lost while a request was served (a handler leaves commit and rollback to the "
                "middleware): %s",
                self._guard.resource,
                error,
            )
            if keep:
                raise lost(self._guard.resource) from error
        finally:
            self._line.release()
            await connection.close()

    async def _settle(self, connection: AsyncConnection, keep: bool) -> None:
        if keep:
            try:
                await self._savepoint.commit()
            except DBAPIError as error:
                if sqlstate(error) != "25P02":
                    raise
                # A statement of the handler's has failed, and it went on as if it had not.
                await self._savepoint.rollback()
                await connection.commit()
                raise undone(self._guard.resource) from error
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
                    return  # somebody else has cancelled it too
            _log.warning("A request on %r took longer than %g s.", self._guard.resource, self._owner.within)
            raise (lost if self._is_stored is None else too_late)(self._guard.resource) from None


def _guard(scope: Scope, resource: str) -> Guard:
    """Return what a request shows, or refuse it."""
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
            "Acquire the lock, and send its token in the header Fencing-Token.",
            resource=resource,
        )
    client = ":".join(str(part) for part in scope.get("client") or ("somebody",))
    by = f"{client!a:.100} {scope['method']} {scope['path']!a:.200}"
    return Guard(resource, token, _number(scope, WRITE_HEADER, "Fencing-Write"), by)


def _number(scope: Scope, header: bytes, name: str) -> int | None:
    given = [value.strip(b" \t") for key, value in scope["headers"] if key.lower() == header]
    if not given:
        return None
    if len(given) == 1 and _NUMBER.fullmatch(given[0]) and int(given[0]) <= MOST:
        return int(given[0])
    what = f"{len(given)} of them" if len(given) > 1 else ascii(given[0][:40].decode("latin-1"))
    raise Refusal(
        400,
        "malformed-header",
        f"The header {name} cannot be read",
        f"{name} is one whole number from 1 to 2^63 - 1, in digits; got {what}.",
    )


def _seconds(what: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.001 <= value <= 86_400:
        raise InvalidArgument(f"{what} is a number of seconds, from 0.001 to a day; got {value!r:.80}.")
    return value
