"""Open fenced_store's own connections, and limit one call over any connection of psycopg's.

Guarantee: a connection that fenced_store opens never waits without a bound, neither to connect nor for a reply. It
prepares no statement, because a pooler may run each transaction on another backend. It always speaks UTF-8, whatever
the encoding of the database.

The limits of a call also apply to a connection of the user's engine, and end with the call.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Generator
from functools import partial
from types import TracebackType
from typing import Any

import psycopg
from psycopg import conninfo

from fenced_store.errors import InvalidArgument

CONNECT_TIMEOUT = 5
"""Seconds that one attempt to connect to one host may take, unless the DSN says otherwise."""

REPLY_TIMEOUT = 15.0
"""Seconds of silence after which a server counts as not answering, unless a call has a limit of its own."""


class NoReply(psycopg.OperationalError):
    """The server has sent nothing for too long. The connection was closed."""


class LimitedConnection(psycopg.Connection[Any]):
    """A connection on which each wait for the server has a limit."""

    reply_within = REPLY_TIMEOUT

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        """Wait for the server as psycopg does, and raise NoReply after the limit."""
        return super().wait(_limited(gen, self, self.reply_within), *args, **options)


class LimitedAsyncConnection(psycopg.AsyncConnection[Any]):
    """An asynchronous connection on which each wait for the server has a limit."""

    reply_within = REPLY_TIMEOUT

    async def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        """Wait for the server as psycopg does, and raise NoReply after the limit."""
        return await super().wait(_limited(gen, self, self.reply_within), *args, **options)


def connect(parameters: str, within: float) -> LimitedConnection:
    """Open a connection on which no wait for a reply takes longer than `within` seconds."""
    connection = LimitedConnection.connect(parameters, prepare_threshold=None)
    connection.reply_within = within
    return connection


async def connect_async(parameters: str, within: float) -> LimitedAsyncConnection:
    """Open an asynchronous connection on which no wait for a reply takes longer than `within` seconds."""
    connection = await LimitedAsyncConnection.connect(parameters, prepare_threshold=None)
    connection.reply_within = within
    return connection


def parameters_of(dsn: object) -> str:
    """Return the connection string for a DSN, with the defaults of fenced_store's own connections."""
    if not isinstance(dsn, str) or not dsn.strip():
        raise InvalidArgument(
            f"A database is an Engine, an AsyncEngine or a DSN; got {type(dsn).__name__}"
            f"{' that is empty' if isinstance(dsn, str) else ''}."
        )
    try:
        # SQLAlchemy's spelling names a driver too.
        given = conninfo.conninfo_to_dict(re.sub(r"^(postgres(?:ql)?)\+\w+://", r"\1://", dsn))
    except (psycopg.Error, UnicodeError):
        # libpq's message is left out: it quotes the part that it could not read, which may hold a password.
        raise InvalidArgument(
            "The DSN cannot be read (it is not shown here, because it may hold a password). Give a URL like "
            "postgresql://user@host/database, or keywords like: host=localhost dbname=database."
        ) from None
    defaults: dict[str, Any] = {"fallback_application_name": "fenced_store"}
    if "PGCONNECT_TIMEOUT" not in os.environ:
        defaults["connect_timeout"] = CONNECT_TIMEOUT
    if "," in str(given.get("host") or given.get("hostaddr") or ""):
        # Of several hosts, only the one that accepts writes can store.
        defaults["target_session_attrs"] = "read-write"
    return conninfo.make_conninfo("", **(defaults | given | {"client_encoding": "UTF8"}))


class LimitedCall:
    """Limits what is sent over a psycopg connection inside the body. Changes nothing on other drivers' connections.

    Nothing is prepared. If `within` is given, the server must not be silent for longer. Afterwards the connection has
    its former settings.
    """

    def __init__(self, driver: Any, within: float | None = None) -> None:
        self._driver = driver if isinstance(driver, (psycopg.Connection, psycopg.AsyncConnection)) else None
        self._within = within

    def __enter__(self) -> None:
        driver: Any = self._driver
        if driver is None:
            return
        self._threshold, driver.prepare_threshold = driver.prepare_threshold, None
        if self._within is not None:
            if isinstance(driver, (LimitedConnection, LimitedAsyncConnection)):
                self._former, driver.reply_within = driver.reply_within, self._within
            else:
                driver.wait = partial(_wait_limited, driver, self._within)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        driver: Any = self._driver
        if driver is None:
            return
        driver.prepare_threshold = self._threshold
        if self._within is not None:
            if isinstance(driver, (LimitedConnection, LimitedAsyncConnection)):
                driver.reply_within = self._former
            else:
                del driver.wait


def _wait_limited(connection: Any, within: float, gen: Any, *args: Any, **options: Any) -> Any:
    """Wait as the connection's own class does, which returns a coroutine if it is asynchronous."""
    return type(connection).wait(connection, _limited(gen, connection, within), *args, **options)


def _limited(steps: Generator[Any, Any, Any], connection: Any, within: float) -> Generator[Any, Any, Any]:
    """Run psycopg's generator. Close the connection and raise NoReply when the socket was idle for too long."""
    try:
        state = next(steps)
        deadline = time.monotonic() + within
        while True:
            ready = yield state
            if ready:
                deadline = time.monotonic() + within
            elif time.monotonic() >= deadline:
                connection.pgconn.finish()
                raise NoReply(f"the server has not answered for {within:g} s")
            state = steps.send(ready)
    except StopIteration as done:
        return done.value
