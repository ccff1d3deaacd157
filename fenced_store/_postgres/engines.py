"""Where the database is: a SQLAlchemy engine, or a DSN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, NullPool, create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from fenced_store.errors import (
    AccessDenied,
    FencedStoreError,
    InvalidArgument,
    NotInstalled,
    said_by,
    sqlstate,
    translated,
)

Where = str | Engine | AsyncEngine
"""A DSN (URL or keywords), an Engine or an AsyncEngine."""


def engine_of(where: Where) -> tuple[Engine, bool]:
    """Return a synchronous engine, and whether it is ours to dispose of."""
    if isinstance(where, Engine):
        return _checked(where), False
    if isinstance(where, AsyncEngine):
        return create_engine(_checked(where.sync_engine).url, poolclass=NullPool), True
    return create_engine("postgresql+psycopg://", creator=_connector(where, psycopg.connect)), True


def async_engine_of(where: Where, **options: Any) -> tuple[AsyncEngine, bool]:
    """Return an asynchronous engine, and whether it is ours to dispose of; then it is made with these options."""
    if isinstance(where, AsyncEngine):
        _checked(where.sync_engine)
        return where, False
    if isinstance(where, Engine):
        raise InvalidArgument("This needs an AsyncEngine or a DSN; got an Engine, which only a FencedStore can use.")
    connect = _connector(where, psycopg.AsyncConnection.connect)
    return create_async_engine("postgresql+psycopg://", async_creator=connect, **options), True


@contextmanager
def transaction(where: Where, schema: str) -> Iterator[Connection]:
    """Open a transaction for one act of administration, and say its errors in our words."""
    engine, ours = engine_of(where)
    try:
        with said_as_ours(schema), engine.execution_options(isolation_level="READ COMMITTED").begin() as connection:
            yield connection
    finally:
        if ours:
            engine.dispose()


@contextmanager
def said_as_ours(schema: str) -> Iterator[None]:
    """Raise our counterpart of whatever the database says, where there is one."""
    try:
        yield
    except DBAPIError as error:
        counterpart = translated(error) or missing(error, schema)
        if counterpart is None:
            raise
        raise counterpart from error


def missing(error: BaseException, schema: str) -> FencedStoreError | None:
    """Return the error for a database without our schema, or without the right to it, if that is what this one
    means.
    """
    state, (said, _, hint) = sqlstate(error), said_by(error)
    if state in ("3F000", "42883") and schema in said:
        return NotInstalled(
            f"There is no fenced_store in schema {schema!r} of this database. As its owner run: dblock fence setup "
            "(or fenced_store.install(...) from Python)."
        )
    if state == "42501":
        return AccessDenied(
            f"The database refused: {said.rstrip('.')}. {hint + ' ' if hint else ''}To write through fences a role "
            f"needs: dblock fence grant ROLE. To protect "
            f"a table it "
            "must own it too, and may create functions in the table's schema. The log and the high-water mark are for "
            "the "
            "role that ran dblock fence setup."
        )
    return None


def _checked(engine: Engine) -> Engine:
    if engine.dialect.name != "postgresql":
        raise InvalidArgument(f"The engine speaks to {engine.dialect.name}; fenced_store needs one for postgresql.")
    return engine


def _connector(dsn: object, connect: Callable[..., Any]) -> Callable[[], Any]:
    if not isinstance(dsn, str) or not dsn.strip():
        raise InvalidArgument(
            f"A database is named by an Engine, an AsyncEngine or a DSN; got {type(dsn).__name__}"
            f"{' that is empty' if isinstance(dsn, str) else ''}."
        )
    conninfo = dsn
    for prefix in ("postgresql+psycopg://", "postgresql+psycopg_async://", "postgres://"):
        if dsn.startswith(prefix):
            conninfo = "postgresql://" + dsn[len(prefix) :]
    try:
        psycopg.conninfo.conninfo_to_dict(conninfo)
    except psycopg.Error:
        # What libpq said is left out: it quotes what it could not read, and that may hold a password.
        raise InvalidArgument(
            "The DSN cannot be read (it is not shown here, for it may hold a password). Give a URL like "
            "postgresql://user@host/database, or keywords like: host=localhost dbname=database."
        ) from None
    return lambda: connect(conninfo)
