"""Session advisory locks of Postgres: by psycopg, and by sqlalchemy-dlock. They have no lease and no token.

Each waiter and each holder needs a connection of its own.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

import psycopg
from psycopg import conninfo

from bench.harness.contender import AsyncRelease, Release

LOCK = b"SELECT pg_advisory_lock(hashtextextended(%s, 0))"
UNLOCK = b"SELECT pg_advisory_unlock(hashtextextended(%s, 0))"


class AdvisoryLock:
    """pg_advisory_lock by psycopg, on a connection for each thread."""

    def __init__(self, where: str) -> None:
        self._where, self._own = where, threading.local()

    def acquire(self, name: str) -> Release:
        connection: psycopg.Connection[Any] | None = getattr(self._own, "connection", None)
        if connection is None:
            connection = self._own.connection = psycopg.connect(self._where, autocommit=True, prepare_threshold=0)
        connection.execute(LOCK, [name])
        return lambda: connection.execute(UNLOCK, [name])

    def close(self) -> None:
        self._own = threading.local()


class AsyncAdvisoryLock:
    """pg_advisory_lock by psycopg for asyncio, on a connection that is free."""

    def __init__(self, where: str) -> None:
        self._where, self._free = where, list[psycopg.AsyncConnection[Any]]()

    async def acquire(self, name: str) -> AsyncRelease:
        if self._free:
            connection = self._free.pop()
        else:
            connection = await psycopg.AsyncConnection.connect(self._where, autocommit=True, prepare_threshold=0)
        await connection.execute(LOCK, [name])

        async def release() -> None:
            await connection.execute(UNLOCK, [name])
            self._free.append(connection)

        return release

    async def close(self) -> None:
        for connection in self._free:
            await connection.close()


class SqlalchemyDlock:
    """sqlalchemy-dlock, through an engine whose connections return to its pool after each release."""

    def __init__(self, where: str) -> None:
        from sqlalchemy import URL, create_engine

        parts = conninfo.conninfo_to_dict(where)
        user, password, host, name = (str(parts[key]) for key in ("user", "password", "host", "dbname"))
        url = URL.create("postgresql+psycopg", user, password, host, int(parts["port"] or 0), name)
        self._engine = create_engine(url, pool_size=256, isolation_level="AUTOCOMMIT")
        self._make: Any = importlib.import_module("sqlalchemy_dlock").create_sadlock

    def acquire(self, name: str) -> Release:
        connection = self._engine.connect()
        lock = self._make(connection, name)
        assert lock.acquire()

        def release() -> None:
            lock.release()
            connection.close()

        return release

    def close(self) -> None:
        self._engine.dispose()
