"""Turn the caller's SQLAlchemy engine or DSN into an engine, and translate the errors of administrative statements."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import psycopg
from sqlalchemy import Connection, Engine, NullPool, create_engine
from sqlalchemy.exc import DBAPIError

from fenced_store._postgres.error_mapping import not_usable
from fenced_store.errors import InvalidArgument, translated

if TYPE_CHECKING:
    # Imported only where it is needed, because it imports the whole ORM.
    from sqlalchemy.ext.asyncio import AsyncEngine

Database: TypeAlias = "str | Engine | AsyncEngine"
"""A DSN (URL or keywords), an Engine or an AsyncEngine."""


def engine_of(database: Database) -> tuple[Engine, bool]:
    """Return a synchronous engine, and whether it was made here, so that the caller must dispose of it."""
    if isinstance(database, Engine):
        return _check_dialect(database), False
    if (behind := _sync_engine_of(database)) is not None:
        return create_engine(_check_dialect(behind).url, poolclass=NullPool), True
    return create_engine("postgresql+psycopg://", creator=_connector(database, psycopg.connect)), True


def async_engine_of(database: Database, **options: Any) -> tuple[AsyncEngine, bool]:
    """Return an asynchronous engine, and whether it was made here, with these options; then dispose of it."""
    from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

    if isinstance(database, AsyncEngine):
        _check_dialect(database.sync_engine)
        return database, False
    if isinstance(database, Engine):
        raise InvalidArgument("This needs an AsyncEngine or a DSN; got an Engine, which only a FencedStore can use.")
    connect = _connector(database, psycopg.AsyncConnection.connect)
    return create_async_engine("postgresql+psycopg://", async_creator=connect, **options), True


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
    except DBAPIError as error:
        counterpart = translated(error) or not_usable(error, schema)
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


def _check_dialect(engine: Engine) -> Engine:
    if engine.dialect.name != "postgresql":
        raise InvalidArgument(f"fenced_store needs an engine for postgresql; this one is for {engine.dialect.name}.")
    return engine


def _connector(dsn: object, connect: Callable[..., Any]) -> Callable[[], Any]:
    if not isinstance(dsn, str) or not dsn.strip():
        raise InvalidArgument(
            f"A database is an Engine, an AsyncEngine or a DSN; got {type(dsn).__name__}"
            f"{' that is empty' if isinstance(dsn, str) else ''}."
        )
    conninfo = dsn
    for prefix in ("postgresql+psycopg://", "postgresql+psycopg_async://", "postgres://"):
        if dsn.startswith(prefix):
            conninfo = "postgresql://" + dsn[len(prefix) :]
    try:
        psycopg.conninfo.conninfo_to_dict(conninfo)
    except psycopg.Error:
        # libpq's message is left out: it quotes the part that it could not read, which may hold a password.
        raise InvalidArgument(
            "The DSN cannot be read (it is not shown here, because it may hold a password). Give a URL like "
            "postgresql://user@host/database, or keywords like: host=localhost dbname=database."
        ) from None
    return lambda: connect(conninfo)
