"""Fixtures for the tests of fences: engines, stores of both kinds, transactions of every kind."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from psycopg import conninfo
from sqlalchemy import URL, Engine, NullPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import fenced_store
from fenced_store import AsyncFencedStore, FencedStore


def url(dsn: str) -> URL:
    parameters = conninfo.conninfo_to_dict(dsn)
    return URL.create("postgresql+psycopg", query={key: str(value) for key, value in parameters.items()})


async def settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


@pytest.fixture
def engine(dsn: str) -> Iterator[Engine]:
    engine = create_engine(url(dsn), poolclass=NullPool)
    yield engine
    engine.dispose()


@pytest.fixture
def store(engine: Engine) -> FencedStore:
    return FencedStore(engine)


class Stores:
    """Makes stores of one kind; their methods are awaited in either case."""

    def __init__(self, kind: type[FencedStore] | type[AsyncFencedStore], dsn: str) -> None:
        self.kind = kind
        self.dsn = dsn
        self._made: list[Any] = []

    def __call__(self, dsn: str | None = None, **options: Any) -> Any:
        made = self.kind(dsn or self.dsn, **options)
        self._made.append(made)
        return Awaited(made)

    async def close(self) -> None:
        for made in self._made:
            await settled(made.close())


class Awaited:
    """A store whose methods can all be awaited."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            return await settled(getattr(self.inner, name)(*args, **options))

        return call


@pytest.fixture(params=[FencedStore, AsyncFencedStore], ids=["sync", "async"])
async def stores(request: pytest.FixtureRequest, dsn: str) -> AsyncIterator[Stores]:
    made = Stores(request.param, dsn)
    yield made
    await made.close()


@pytest.fixture(params=[FencedStore, AsyncFencedStore], ids=["sync", "async"])
def unreachable(request: pytest.FixtureRequest) -> Any:
    """A store on an unreachable database, for arguments that must be refused before anything is sent."""
    return Awaited(request.param("host=/nowhere"))


class Users:
    """The user's own transaction, of one of six kinds."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.is_async = "Async" in type(connection).__name__

    async def run(self, statement: str) -> Any:
        """Run a statement and return the first value of its result, if there is one."""
        by_psycopg = isinstance(self.connection, (psycopg.Connection, psycopg.AsyncConnection))
        cursor = await settled(self.connection.execute(statement if by_psycopg else text(statement)))
        if by_psycopg:
            row = await settled(cursor.fetchone()) if cursor.description else None
        else:
            row = cursor.fetchone() if cursor.returns_rows else None
        return row[0] if row else None

    async def commit(self) -> None:
        await settled(self.connection.commit())

    async def rollback(self) -> None:
        await settled(self.connection.rollback())

    @asynccontextmanager
    async def fenced(self, resource: str, lease: Any, **options: Any) -> AsyncIterator[Any]:
        made = fenced_store.fence(self.connection, resource, lease, **options)
        if self.is_async:
            async with made as inside:
                yield inside
        else:
            with made as inside:
                yield inside


KINDS = [f"{how} {kind}" for how in ("sync", "async") for kind in ("psycopg", "Connection", "Session")]


@asynccontextmanager
async def users_of(kind: str, dsn: str) -> AsyncIterator[Users]:
    how, what = kind.split()
    made: Any
    dispose: Any = None
    if what == "psycopg":
        made = psycopg.AsyncConnection.connect(dsn) if how == "async" else psycopg.connect(dsn)
    elif how == "async":
        asynchronous = create_async_engine(url(dsn), poolclass=NullPool)
        dispose = asynchronous.dispose
        made = asynchronous.connect() if what == "Connection" else AsyncSession(asynchronous)
    else:
        synchronous = create_engine(url(dsn), poolclass=NullPool)
        dispose = synchronous.dispose
        made = synchronous.connect() if what == "Connection" else Session(synchronous)
    connection = made if what == "Session" else await settled(made)
    try:
        yield Users(connection)
    finally:
        await settled(connection.close())
        if dispose:
            await settled(dispose())


@pytest.fixture(params=KINDS)
async def users(request: pytest.FixtureRequest, dsn: str) -> AsyncIterator[Users]:
    async with users_of(request.param, dsn) as made:
        yield made
