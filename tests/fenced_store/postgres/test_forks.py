"""The child of a fork talks to the database over connections of its own."""

from __future__ import annotations

import asyncio
import os

import pytest

from fenced_store import AsyncFencedStore, FencedStore
from tests.support.forks import run_in_fork

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

BACKEND = "SELECT pg_backend_pid()"


@pytest.mark.second_stage
def test_child_gets_connections_of_its_own(dsn: str) -> None:
    """Over a shared one, each process would read replies to the other."""
    with FencedStore(dsn) as store:
        store.put("a", "parent", fence=1)

        def backend() -> int:
            with store._engine.connect() as connection:
                return int(connection.exec_driver_sql(BACKEND).scalar_one())

        def in_child() -> bool:
            store.put("b", "child", fence=1)
            value = store.get("a")
            return backend() != parents and value is not None and value.value == "parent"

        parents = backend()
        assert run_in_fork(in_child) == 0
        assert backend() == parents
        assert not store.put("a", "again", fence=1).repeated


@pytest.mark.second_stage
def test_child_gets_asynchronous_connections_of_its_own(dsn: str) -> None:
    store = AsyncFencedStore(dsn)

    async def backend() -> int:
        async with store._engine.connect() as connection:
            return int((await connection.exec_driver_sql(BACKEND)).scalar_one())

    async def in_child() -> bool:
        await store.put("b", "child", fence=1)
        return await backend() != parents

    async def in_parent() -> int:
        await store.put("a", "parent", fence=1)
        return await backend()

    loop = asyncio.new_event_loop()
    try:
        parents = loop.run_until_complete(in_parent())
        assert run_in_fork(lambda: asyncio.run(in_child())) == 0
        assert loop.run_until_complete(backend()) == parents
        loop.run_until_complete(store.close())
    finally:
        loop.close()
