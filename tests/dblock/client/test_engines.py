"""A client accepts a SQLAlchemy engine in place of a DSN."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import conninfo
from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

import dblock
from dblock._runtime.target import resolve
from dblock.admin import schema


def url(dsn: str, driver: str = "psycopg") -> URL:
    parameters = psycopg.conninfo.conninfo_to_dict(dsn)
    return URL.create(
        f"postgresql+{driver}",
        username=str(parameters["user"]),
        password=str(parameters["password"]) if parameters.get("password") else None,
        database=str(parameters["dbname"]),
        query={"host": str(parameters["host"]), "port": str(parameters.get("port") or 5432)},
    )


@pytest.fixture(params=["engine", "async engine"])
def engine(request: pytest.FixtureRequest, dsn: str) -> Engine | AsyncEngine:
    return create_engine(url(dsn)) if request.param == "engine" else create_async_engine(url(dsn))


def test_client_takes_an_engine_of_either_kind(engine: Any) -> None:
    with dblock.Client(engine) as client:
        lease = client.lock("a").acquire()
        lease.renew()
        assert client.lock("a").holder()
        assert lease.release()


async def test_async_client_takes_an_engine_of_either_kind(engine: Any) -> None:
    async with dblock.AsyncClient(engine) as client:
        lease = await client.lock("a").acquire()
        await lease.renew()
        assert await client.lock("a").holder()
        assert await lease.release()


def test_client_connects_with_the_engines_own_settings(dsn: str) -> None:
    """connect_args, a creator and events of the engine apply, as in the rest of the application."""
    engine = create_engine(url(dsn), connect_args={"application_name": "from connect_args"})
    seen: list[str] = []

    @event.listens_for(engine, "do_connect")
    def on_connect(dialect: Any, record: Any, args: Any, options: dict[str, Any]) -> None:
        seen.append(options["application_name"])

    with dblock.Client(engine) as client:
        client.lock("a").holder()
    assert seen == ["from connect_args"]

    made = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn, application_name="by creator"))
    with dblock.Client(made) as client, psycopg.connect(dsn) as observer:
        client.lock("b").holder()
        rows = observer.execute("SELECT 1 FROM pg_stat_activity WHERE application_name = 'by creator'").fetchall()
        assert len(rows) == 1


async def test_async_client_connects_with_the_engines_own_settings(dsn: str) -> None:
    engine = create_async_engine(url(dsn), connect_args={"application_name": "from connect_args"})
    async with dblock.AsyncClient(engine) as client:
        await client.lock("a").holder()
        with psycopg.connect(dsn) as observer:
            found = observer.execute("SELECT 1 FROM pg_stat_activity WHERE application_name = 'from connect_args'")
            assert len(found.fetchall()) == 1


def test_lock_never_takes_a_connection_from_the_applications_pool(dsn: str) -> None:
    """The application holds its last connection while it waits for the lock."""
    engine = create_engine(url(dsn), pool_size=1, max_overflow=0, pool_timeout=1)
    with engine.connect(), dblock.Client(engine) as client:
        assert client.lock("a").try_acquire()
        assert engine.pool.checkedout() == 1  # type: ignore[attr-defined]
    engine.dispose()


@pytest.mark.parametrize("options", [{}, {"poolclass": NullPool}, {"isolation_level": "SERIALIZABLE"}])
def test_engines_settings_do_not_matter(dsn: str, options: dict[str, Any]) -> None:
    with dblock.Client(create_engine(url(dsn), **options)) as client:
        lease = client.lock("a").acquire()
        assert client.lock("a").try_acquire() is None
        assert lease.release()


def test_client_encoding_of_the_engine_does_not_matter(dsn: str) -> None:
    engine = create_engine(url(dsn), connect_args={"client_encoding": "LATIN1"})
    with dblock.Client(engine) as latin, dblock.Client(dsn) as plain:
        latin.lock("münze 🔒", meta="ß").acquire()
        holder = plain.lock("münze 🔒").holder()
        assert holder is not None
        assert holder.meta == "ß"


def test_schema_installs_through_an_engine(bare_dsn: str) -> None:
    engine = create_engine(url(bare_dsn))
    assert schema.install(resolve(engine)) is None
    assert schema.status(resolve(engine)).state == "current"


@pytest.mark.parametrize("kind", [dblock.Client, dblock.AsyncClient])
async def test_connect_args_reach_a_client_of_the_other_kind_too(dsn: str, kind: type) -> None:
    """connect_args name another database than the URL. The locks go to the database that the application uses."""
    elsewhere, here = url(dsn).set(database="nowhere"), str(conninfo.conninfo_to_dict(dsn)["dbname"])
    make = create_async_engine if kind is dblock.Client else create_engine
    client: Any = kind(make(elsewhere, connect_args={"dbname": here}))
    taken = client.lock("a").try_acquire()
    assert (await taken if kind is dblock.AsyncClient else taken) is not None
    closing = client.close()
    if closing is not None:
        await closing


@pytest.mark.parametrize("kind", [dblock.Client, dblock.AsyncClient])
@pytest.mark.parametrize("how", ["creator", "event"])
async def test_engine_with_a_creator_or_an_event_is_refused_by_a_client_of_the_other_kind(
    dsn: str, kind: type, how: str
) -> None:
    make: Any = create_async_engine if kind is dblock.Client else create_engine
    engine = make(url(dsn), creator=lambda: psycopg.connect(dsn)) if how == "creator" else make(url(dsn))
    if how == "event":
        event.listen(getattr(engine, "sync_engine", engine), "do_connect", lambda *args: None)
    client = kind(engine)
    with pytest.raises(dblock.InvalidArgument, match="a way of its own"):
        taken = client.lock("a").try_acquire()
        await taken


def test_client_opens_more_connections_than_the_engines_pool_allows(dsn: str) -> None:
    engine = create_engine(url(dsn), pool_size=1, max_overflow=0, pool_timeout=0.1)
    with dblock.Client(engine, pool_size=4) as client, ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda n: client.lock(str(n)).acquire().release(), range(40)))
    with engine.connect():
        pass
    engine.dispose()


@pytest.mark.parametrize("how", ["creator", "no connection", "event"])
def test_error_of_the_engines_own_code_becomes_a_dblock_error(dsn: str, how: str) -> None:
    def vault_is_down(*_: Any) -> Any:
        raise OSError("vault down")

    if how == "event":
        engine = create_engine(url(dsn))
        event.listen(engine, "connect", vault_is_down)
    else:
        engine = create_engine("postgresql+psycopg://", creator=vault_is_down if how == "creator" else lambda: None)
    with dblock.Client(engine) as client, pytest.raises(dblock.Unavailable, match="The engine could not connect"):
        client.lock("a").try_acquire()
