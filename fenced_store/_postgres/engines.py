"""Turn the caller's SQLAlchemy engine or DSN into an engine, and translate the errors of administrative statements."""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from psycopg.conninfo import make_conninfo
from sqlalchemy import Connection, Engine, NullPool, create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from fenced_store._postgres.connections import (
    REPLY_TIMEOUT,
    LimitedAsyncConnection,
    connect,
    connect_async,
    parameters_of,
)
from fenced_store._postgres.error_mapping import counterpart_of
from fenced_store.errors import InvalidArgument

if TYPE_CHECKING:
    # Imported only where it is needed, because it imports the whole ORM.
    from sqlalchemy.ext.asyncio import AsyncEngine

Database: TypeAlias = "str | Engine | AsyncEngine"
"""A DSN (URL or keywords), an Engine or an AsyncEngine."""

_made_here: weakref.WeakSet[Engine] = weakref.WeakSet()
"""The engines that were made here. Their owner cannot reach them to prepare them for a fork."""

_left_to_parent: list[object] = []
"""Pools of the parent of a fork. They are kept, because psycopg warns of a connection that is dropped while open."""


def engine_of(database: Database, within: float = REPLY_TIMEOUT, **options: Any) -> tuple[Engine, bool]:
    """Return a synchronous engine, and whether it was made here, with these options.

    The caller disposes of an engine that was made here. On a connection of such an engine, the server must not be
    silent for longer than `within` seconds.
    """
    if isinstance(database, Engine):
        return _check_dialect(database), False
    behind = _sync_engine_of(database)
    if behind is None:
        parameters = parameters_of(database)
    else:
        parameters, options = parameters_of(_conninfo_of(_check_dialect(behind))), {"poolclass": NullPool}
    engine = create_engine("postgresql+psycopg://", creator=lambda: connect(parameters, within), **options)
    _made_here.add(engine)
    return engine, True


def async_engine_of(database: Database, within: float = REPLY_TIMEOUT, **options: Any) -> tuple[AsyncEngine, bool]:
    """Return an asynchronous engine, and whether it was made here, with these options.

    The caller disposes of an engine that was made here.
    """
    from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

    if isinstance(database, AsyncEngine):
        _check_dialect(database.sync_engine)
        return database, False
    if isinstance(database, Engine):
        raise InvalidArgument("This needs an AsyncEngine or a DSN; got an Engine, which only a FencedStore can use.")
    parameters = parameters_of(database)

    async def creator() -> LimitedAsyncConnection:
        return await connect_async(parameters, within)

    engine = create_async_engine("postgresql+psycopg://", async_creator=creator, **options)
    _made_here.add(engine.sync_engine)
    return engine, True


@contextmanager
def transaction(database: Database, schema: str) -> Iterator[Connection]:
    """Open a transaction for one administrative operation, and translate its errors."""
    engine, is_owned = engine_of(database)
    try:
        with translating(schema), engine.execution_options(isolation_level="READ COMMITTED").begin() as connection:
            yield connection
    finally:
        if is_owned:
            engine.dispose()


@contextmanager
def translating(schema: str) -> Iterator[None]:
    """Raise the fenced_store error for a database error, if there is one."""
    try:
        yield
    except (DBAPIError, PoolTimeout, UnicodeEncodeError) as error:
        counterpart = counterpart_of(error, schema)
        if counterpart is None:
            raise
        raise counterpart from error


def _sync_engine_of(database: object) -> Engine | None:
    """Return the synchronous engine behind an AsyncEngine; None for anything else."""
    asynchronous = sys.modules.get("sqlalchemy.ext.asyncio")
    if asynchronous is None or not isinstance(database, asynchronous.AsyncEngine):
        return None
    engine: Engine = database.sync_engine
    return engine


def _conninfo_of(engine: Engine) -> str:
    """Return the DSN that an engine connects to, with its connect_args; raise if the engine connects in another way."""
    from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

    dialect: Any = PGDialect_psycopg
    from_url = dialect().create_connect_args(engine.url)[1]
    pool: Any = engine.pool
    events: Any = engine.dialect.dispatch
    arguments = None
    if not len(events.do_connect) and getattr(pool._creator, "__module__", "") == "sqlalchemy.engine.create":
        arguments = inspect.getclosurevars(pool._creator).nonlocals.get("cparams")
    if arguments is not None and engine.dialect.driver not in ("psycopg", "psycopg_async"):
        # Another driver spells its parameters differently. The URL says the same, unless there are connect_args.
        arguments = from_url if arguments == engine.dialect.create_connect_args(engine.url)[1] else None
    if arguments is None:
        raise InvalidArgument(
            "This AsyncEngine connects in a way of its own (a creator, connect_args of another driver than psycopg, a "
            "do_connect event), which a synchronous call cannot use. Give a DSN or an Engine."
        )
    ours = ("autocommit", "prepare_threshold", "context", "row_factory", "cursor_factory")
    return make_conninfo("", **{name: value for name, value in arguments.items() if name not in ours})


def _check_dialect(engine: Engine) -> Engine:
    if engine.dialect.name != "postgresql":
        raise InvalidArgument(f"fenced_store needs an engine for postgresql; this one is for {engine.dialect.name}.")
    return engine


def _reset_after_fork() -> None:
    """Leave all open connections to the parent. Two processes that share one would read each other's replies."""
    for engine in list(_made_here):
        _left_to_parent.append(engine.pool)
        engine.dispose(close=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
