"""Stores and fences behind pgbouncer in transaction mode, where each transaction may run on another backend."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from fenced_store import (
    AsyncFencedStore,
    FencedStore,
    StaleTokenError,
    fence,
    protect,
    protected,
    rejections,
    unprotect,
)
from tests.fenced_store.postgres.conftest import url
from tests.support.pooler import needs_pgbouncer, pooled

pytestmark = needs_pgbouncer

ROUNDS, THREADS = 50, 6


@pytest.fixture
def pooled_dsn(dsn: str) -> Iterator[str]:
    with pooled(dsn) as through:
        yield through


def outcomes(work: Callable[[int, int], object]) -> dict[str, int]:
    """Do the work of a thread and a round, in six threads at once, and count its outcomes."""
    found: dict[str, int] = {}
    counting = threading.Lock()

    def run(thread: int) -> None:
        for round_ in range(ROUNDS):
            try:
                work(thread, round_)
                outcome = "done"
            except Exception as error:
                outcome = f"{type(error).__name__}: {str(error).splitlines()[0]:.80}"
            with counting:
                found[outcome] = found.get(outcome, 0) + 1

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


ALL = {"done": ROUNDS * THREADS}


def test_store_by_dsn_works_behind_a_pooler_that_keeps_no_prepared_statement(pooled_dsn: str) -> None:
    with FencedStore(pooled_dsn) as store:
        assert outcomes(lambda thread, n: store.put(f"k{thread}", n, fence=n + 1)) == ALL
        assert outcomes(lambda thread, n: store.get(f"k{thread}")) == ALL


def test_store_on_an_engine_that_prepares_works_behind_a_pooler(pooled_dsn: str) -> None:
    engine = create_engine(url(pooled_dsn), pool_size=THREADS)
    try:
        store = FencedStore(engine)
        assert outcomes(lambda thread, n: store.put(f"k{thread}", n, fence=n + 1)) == ALL
        with engine.connect() as connection:
            assert driver_of(connection).prepare_threshold == 5, "the user's own setting stays"
    finally:
        engine.dispose()


async def test_asynchronous_store_works_behind_a_pooler(pooled_dsn: str) -> None:
    engine = create_async_engine(url(pooled_dsn))

    async def write(store: AsyncFencedStore, key: str) -> None:
        for n in range(20):
            await store.put(key, n, fence=n + 1)

    try:
        async with AsyncFencedStore(pooled_dsn) as own:
            await asyncio.gather(*(write(own, f"own {number}") for number in range(5)))
        await asyncio.gather(*(write(AsyncFencedStore(engine), f"engine's {number}") for number in range(5)))
    finally:
        await engine.dispose()


@pytest.mark.parametrize("kind", ["psycopg", "Connection", "Session"])
def test_fence_prepares_nothing_on_a_connection_that_prepares(pooled_dsn: str, kind: str) -> None:
    engine = create_engine(url(pooled_dsn), pool_size=THREADS)
    own = [psycopg.connect(pooled_dsn) for _ in range(THREADS if kind == "psycopg" else 0)]

    def work(thread: int, n: int) -> None:
        if kind == "psycopg":
            with own[thread].transaction(), fence(own[thread], f"r{thread}", n + 1):
                pass
        elif kind == "Connection":
            with engine.begin() as connection, fence(connection, f"r{thread}", n + 1):
                pass
        else:
            with Session(engine) as session, session.begin(), fence(session, f"r{thread}", n + 1):
                pass

    try:
        assert outcomes(work) == ALL
        for connection in own:
            assert connection.prepare_threshold == 5, "the user's own setting stays"
    finally:
        engine.dispose()
        for connection in own:
            connection.close()


@pytest.mark.parametrize("kind", ["psycopg", "Session"])
async def test_asynchronous_fence_prepares_nothing(dsn: str, kind: str) -> None:
    prepared = (
        "SELECT count(*) FROM pg_prepared_statements"
        " WHERE statement LIKE '%fenced_store.token%' AND statement NOT LIKE '%pg_prepared%'"
    )
    engine = create_async_engine(url(dsn))
    async with await psycopg.AsyncConnection.connect(dsn) as own:
        for n in range(10):
            if kind == "psycopg":
                async with own.transaction(), fence(own, "r", n + 1):
                    pass
                assert await (await own.execute(prepared)).fetchone() == (0,)
            else:
                async with AsyncSession(engine) as session, session.begin(), fence(session, "r", n + 1):
                    assert (await session.execute(text(prepared))).scalar_one() == 0
    await engine.dispose()


def test_tables_are_protected_through_a_pooler(pooled_dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("CREATE TABLE public.jobs (id int PRIMARY KEY)")
    for _ in range(7):
        protect(pooled_dsn, "public.jobs")
        assert [one.resource for one in protected(pooled_dsn)] == ["public.jobs"]
        unprotect(pooled_dsn, "public.jobs")


def test_recording_a_rejection_leaves_no_setting_behind_a_pooler(pooled_dsn: str, dsn: str) -> None:
    """The session belongs to other clients as well."""
    with psycopg.connect(pooled_dsn) as connection:
        with fence(connection, "r", 9):
            pass
        connection.commit()
        for _ in range(4):
            with pytest.raises(StaleTokenError), fence(connection, "r", 8):
                pass
            connection.rollback()
    assert len(rejections(dsn)) == 4
    held = [psycopg.connect(pooled_dsn) for _ in range(3)]
    try:
        for each in held:
            assert each.execute("SHOW statement_timeout").fetchone() == ("0",)
    finally:
        for each in held:
            each.close()


def driver_of(connection: Any) -> Any:
    return connection.connection.driver_connection
