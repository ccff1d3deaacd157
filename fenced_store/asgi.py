"""HTTP services that refuse a stale caller: ASGI middleware, for Starlette, FastAPI and any other.

    app.add_middleware(FencingMiddleware, fences=DSN, rules={"PUT /ledgers/{ledger}": "ledger:{ledger}"})

A request that a rule names must carry the header Fencing-Token. Guarantee: it reaches the handler only if its token is
not lower than any that the resource has seen or that was claimed for it; and while the handler is at work, the fence is
held: a request with a higher token waits until the response is ready, so that what two holders do is one after the
other, and a holder that was superseded is never at work beside its successor.

What the handler does through `request.state.fencing.connection` is part of the same transaction, and is stored if and
only if the answer is below 400. What it does elsewhere is protected as long as this process goes on: one that is
frozen for longer than `within` loses its fence. With `hold=False` the fence is raised and let go, and the handler shows
`request.state.fencing` to whatever fenced resource it writes to, which compares again with the write.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from fenced_store.engines import Where, async_engine_of
from fenced_store.errors import (
    ClaimTimeout,
    FencedStoreError,
    InvalidArgument,
    MissingToken,
    OutcomeUnknown,
    StaleTokenError,
    sqlstate,
)
from fenced_store.fencing import Fence
from fenced_store.names import DEFAULT_SCHEMA, check_resource
from fenced_store.tokens import MOST

TOKEN_HEADER = b"fencing-token"
WRITE_HEADER = b"fencing-write"
PROBLEM = "urn:fenced-store:"
"""What the types of our problem documents begin with."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_SAFE = {"GET", "HEAD", "OPTIONS", "TRACE"}
_NUMBER = re.compile(rb"[1-9][0-9]{0,18}")
_NAME = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(:path)?\}")
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
        """The number of the write, where the caller has sent one."""
        self.by = by
        self.connection: AsyncConnection | None = None
        """The connection whose transaction holds the fence; None where it is not held."""


class FencingMiddleware:
    """Lets a request by only if its token is not stale, and holds the fence while it is served."""

    def __init__(
        self,
        app: App,
        *,
        fences: Where,
        rules: Mapping[str, str] | Callable[[Scope], str | None],
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
        scope. The first that fits counts, and what fits none is let by. `within` is how many seconds a handler may
        take, `patience` how many a request waits for the one before it, `connections` how many requests are served at
        once.
        """
        self.app = app
        self._rule = rules if callable(rules) else _compiled(rules)
        self._hold = hold
        self._within = _seconds("within", within)
        self._patience = _seconds("patience", patience)
        self._schema = schema
        engine, self._is_ours = async_engine_of(fences, pool_size=connections, max_overflow=0)
        self._engine = engine
        self._committed = engine.execution_options(isolation_level="READ COMMITTED")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        resource = self._rule(scope) if scope["type"] == "http" else None
        if resource is None:
            try:
                await self.app(scope, receive, send)
            finally:
                if scope["type"] == "lifespan" and self._is_ours:
                    await self._engine.dispose()
            return
        answer = _Answer(send)
        try:
            guard = _guard(scope, resource)
            scope.setdefault("state", {})["fencing"] = guard
            if self._hold:
                await self._served_inside(scope, receive, answer, guard)
            else:
                await self._served_after(scope, receive, answer, guard)
        except _Refusal as refusal:
            await answer.replace(refusal.status, refusal.problem)
        except (StaleTokenError, MissingToken, ClaimTimeout, OutcomeUnknown) as error:
            if answer.begun:
                raise
            await answer.replace(*_problem_of(error))
        except Exception:
            await answer.flush()  # the framework's own word on it
            raise

    async def _served_inside(self, scope: Scope, receive: Receive, answer: _Answer, guard: Guard) -> None:
        """Serve a request while its fence is held."""
        async with _Held(self, guard) as held:
            answer.before_end = held.end
            await self.app(scope, receive, answer.held_back)
            await answer.finish()

    async def _served_after(self, scope: Scope, receive: Receive, answer: _Answer, guard: Guard) -> None:
        """Raise the fence, and serve a request whose handler will show its token again."""
        async with _Held(self, guard) as held:
            await held.end(True)
        guard.connection = None
        await self.app(scope, receive, answer.passed_on)
        await answer.finish()

    @property
    def bounds(self) -> dict[str, str]:
        """How long to wait for a fence, and for how long to hold it."""
        return {"patience": f"{round(self._patience * 1000)}ms", "within": f"{round(self._within * 1000)}ms"}


class _Held:
    """A fence that is held by a transaction of its own.

    Whatever becomes of the request, its fence stays raised: who has come so far has superseded the others. Only what
    the handler wrote on the connection is undone if the request fails.
    """

    def __init__(self, owner: FencingMiddleware, guard: Guard) -> None:
        self._owner = owner
        self._guard = guard
        self._ended = False

    async def __aenter__(self) -> _Held:
        try:
            self._connection = await self._owner._committed.connect()
        except (SQLAlchemyError, OSError) as error:
            raise _unreachable(error) from error
        try:
            await self._take()
        except BaseException as error:
            await self._connection.close()
            if isinstance(error, DBAPIError):
                raise _busy(self._guard) if sqlstate(error) == "55P03" else _unreachable(error) from error
            raise
        return self

    async def _take(self) -> None:
        guard, connection = self._guard, self._connection
        before = (await connection.execute(_BOUNDS, self._owner.bounds)).one()[0]
        self._fence = Fence(connection, guard.resource, guard, False, self._owner._schema, write=0)
        await self._fence.__aenter__()
        await connection.execute(text("SELECT set_config('lock_timeout', :before, true)"), {"before": before})
        self._savepoint = await connection.begin_nested()
        guard.connection = connection

    async def end(self, keep: bool) -> None:
        """Store what the handler wrote, or undo it, and let the fence go, raised."""
        self._ended = True
        try:
            if not keep:
                await self._savepoint.rollback()
            else:
                await self._savepoint.commit()
            await self._fence.__aexit__(None, None, None)
            await self._connection.commit()
        except (DBAPIError, OSError) as error:
            _log.warning("The fence of %r was lost while a request was served: %s", self._guard.resource, error)
            raise _Refusal(
                503,
                "fence-lost",
                "The fence was lost while the request was served",
                "Whether it was done is not known. Look, and decide anew.",
                resource=self._guard.resource,
            ) from error

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if not self._ended and (error is None or isinstance(error, Exception)):
                await self.end(False)
        except _Refusal:
            if error is None:
                raise
        finally:
            await self._connection.close()


class _Answer:
    """A response on its way: held back until it is known that it is true."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: list[Message] = []
        self._status = 0
        self.begun = False
        """Whether something has been sent, so that it can no longer be replaced."""
        self._ended = False
        self.before_end: Callable[[bool], Awaitable[None]] | None = None

    async def held_back(self, message: Message) -> None:
        """Take a message, and send all of them when the last is there and what they say has been stored.

        A 500 waits until the application is through with it, for what it raises then may be ours to say.
        """
        if self._ended:
            await self._send(message)
            return
        self._status = message.get("status", self._status)
        self._waiting.append(message)
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if (last or message["type"] == "http.response.pathsend") and self._status != HTTPStatus.INTERNAL_SERVER_ERROR:
            await self.finish()

    async def passed_on(self, message: Message) -> None:
        """Pass a message on; but a 500 waits."""
        self._status = message.get("status", self._status)
        if self._status == HTTPStatus.INTERNAL_SERVER_ERROR and not self.begun:
            self._waiting.append(message)
        else:
            self.begun = True
            await self._send(message)

    async def finish(self) -> None:
        """Send what was held back, once it is true."""
        if self._ended:
            return
        self._ended = True
        if self.before_end is not None:
            await self.before_end(0 < self._status < HTTPStatus.BAD_REQUEST)
        await self.flush()

    async def flush(self) -> None:
        """Send what was held back."""
        self._ended = True
        for message in self._waiting:
            self.begun = True
            await self._send(message)
        self._waiting.clear()

    async def replace(self, status: int, problem: dict[str, Any]) -> None:
        """Answer with a problem document instead."""
        self._ended, self.begun = True, True
        body = json.dumps(problem).encode()
        headers = [(b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode())]
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers.append((b"retry-after", b"1"))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


class _Refusal(Exception):
    """What the caller is told instead."""

    def __init__(self, status: int, kind: str, title: str, detail: str, **members: Any) -> None:
        super().__init__(title)
        self.status = status
        self.problem = {"type": PROBLEM + kind, "title": title, "status": status, "detail": detail, **members}


def _guard(scope: Scope, resource: str) -> Guard:
    """Return what a request shows, or refuse it."""
    try:
        check_resource(resource)
    except InvalidArgument as error:
        raise _Refusal(400, "bad-resource", "This path names no resource", str(error)) from None
    token = _number(scope, TOKEN_HEADER, "Fencing-Token")
    if token is None:
        raise _Refusal(
            428,
            "token-required",
            "A fencing token is required",
            "Acquire the lock, and send its token in the header Fencing-Token.",
            resource=resource,
        )
    host, port = (scope.get("client") or ("somebody", 0))[:2]
    by = f"{host}:{port} {scope['method']} {scope['path']!a:.200}"
    return Guard(resource, token, _number(scope, WRITE_HEADER, "Fencing-Write"), by)


def _number(scope: Scope, header: bytes, name: str) -> int | None:
    given = [value.strip(b" \t") for key, value in scope["headers"] if key.lower() == header]
    if not given:
        return None
    if len(given) == 1 and _NUMBER.fullmatch(given[0]) and int(given[0]) <= MOST:
        return int(given[0])
    what = f"{len(given)} of them" if len(given) > 1 else ascii(given[0][:40].decode("latin-1"))
    raise _Refusal(
        400,
        "malformed-header",
        f"The header {name} cannot be read",
        f"{name} is one whole number from 1 to 2^63 - 1, in digits; got {what}.",
    )


def _problem_of(error: FencedStoreError) -> tuple[int, dict[str, Any]]:
    """Return how a caller is told of a refusal. Who has superseded it is not for everybody to know."""
    if isinstance(error, StaleTokenError):
        refusal = _Refusal(
            409,
            "stale-token",
            "The fencing token is stale",
            f"Resource {error.resource!a:.200} refuses token {error.offered}: it has seen token {error.stored}. "
            f"Acquire "
            "the lock anew, and do the work again from the start.",
            resource=error.resource,
            offered=error.offered,
            stored=error.stored,
            stored_at=error.stored_at.isoformat() if error.stored_at else None,
        )
    elif isinstance(error, MissingToken):
        refusal = _Refusal(428, "token-required", "A fencing token is required", str(error), resource=error.resource)
    elif isinstance(error, OutcomeUnknown):
        refusal = _Refusal(503, "outcome-unknown", "Whether it was done is not known", "Send the same again.")
    else:
        refusal = _Refusal(503, "busy", "Another request is at work on this", str(error))
    return refusal.status, refusal.problem


def _busy(guard: Guard) -> _Refusal:
    return _Refusal(
        503,
        "busy",
        "Another request is at work on this",
        "It has kept this one waiting for too long. Try again.",
        resource=guard.resource,
    )


def _unreachable(error: Exception) -> _Refusal:
    _log.warning("A request was refused, because its fence cannot be reached: %s", error)
    return _Refusal(
        503, "unreachable", "The fence cannot be reached", "Nothing was done, for it could not be protected. Try again."
    )


def _compiled(rules: Mapping[str, str]) -> Callable[[Scope], str | None]:
    """Return a function that says which resource a request writes, by these rules."""
    ready = [_rule(request, resource) for request, resource in rules.items()]

    def rule(scope: Scope) -> str | None:
        path = _path(scope)
        for methods, pattern, resource in ready:
            fits = scope["method"] in methods if methods is not None else scope["method"] not in _SAFE
            found = pattern.fullmatch(path) if fits else None
            if found:
                return _NAME.sub(lambda name, found=found: found[name[1]], resource)  # type: ignore[misc]
        return None

    return rule


def _rule(request: str, resource: str) -> tuple[set[str] | None, re.Pattern[str], str]:
    methods, _, path = request.partition(" ")
    known = {name for name, _ in _NAME.findall(path)}
    asked = {name for name, _ in _NAME.findall(resource)}
    if not methods or not path.startswith("/") or not resource:
        raise InvalidArgument(
            f"A rule goes from a method and path, like 'PUT /ledgers/{{ledger}}', to a resource; got {request!r:.80}: "
            f"{resource!r:.80}."
        )
    if asked - known:
        raise InvalidArgument(
            f"The resource {resource!r:.80} speaks of {sorted(asked - known)}, which its path {path!r:.80} does not "
            f"have."
        )
    pattern, end = "", 0
    for name in _NAME.finditer(path):
        pattern += re.escape(path[end : name.start()]) + f"(?P<{name[1]}>{'.*' if name[2] else '[^/]+'})"
        end = name.end()
    compiled = re.compile(pattern + re.escape(path[end:]), re.DOTALL)
    return (None if methods == "*" else set(methods.upper().split(","))), compiled, resource


def _path(scope: Scope) -> str:
    """Return the path as the application's own routes see it."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root.rstrip('/')}/") else path


def _seconds(what: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.001 <= value <= 86_400:
        raise InvalidArgument(f"{what} is a number of seconds, from 0.001 to a day; got {value!r:.80}.")
    return value
