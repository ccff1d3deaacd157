"""A stricter default isolation, of the server, the database or the role, changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

import dblock
from dblock._core.effects import Call, Flow
from dblock._runtime.target import resolve
from dblock.admin.reaper import Reaper
from tests.support import warm_start
from tests.support.eventually import eventually, eventually_async
from tests.support.facade import Clients
from tests.support.machine import soon
from tests.support.pooler import needs_pgbouncer, pooled

LEVEL = Call(b"SELECT current_setting('transaction_isolation')", ())


@pytest.fixture(params=["repeatable read", "serializable"])
def strict_dsn(request: pytest.FixtureRequest, dsn: str, owner: psycopg.Connection) -> str:
    """A database whose sessions default to a stricter isolation."""
    owner.execute(
        sql.SQL("ALTER DATABASE {} SET default_transaction_isolation TO {}").format(
            sql.Identifier(owner.info.dbname), sql.Literal(request.param)
        )
    )
    with psycopg.connect(dsn) as connection:
        assert connection.execute(LEVEL.sql).fetchone() == (request.param,)
    return dsn


def calling(call: Any) -> Flow[Any]:
    return (yield call)


def levels(client: dblock.Client) -> list[str]:
    """Return the isolation of a call over each connection of a client."""
    with client.lock("warm"):
        runtime: Any = client._runtime
        eventually(lambda: runtime.listener.flow.connection, "the listener is connected")
        found = [runtime.runner.run(calling(LEVEL)), runtime.listener._keepalive_runner.run(calling(LEVEL))]
        runtime.listener.close()
        runtime.listener.join(5)
    target = runtime.settings.listen_target
    with psycopg_listener(target) as listener:
        found.append(listener.connection.wait(listener.raw.exchange(LEVEL, 5)))
    return [row[0] for row in found]


@contextlib.contextmanager
def psycopg_listener(target: Any) -> Iterator[Any]:
    from dblock._runtime.listener_connection import ListenerConnection

    listener = ListenerConnection(target.connect(), lambda payload: None, target.needs_transactions)
    yield listener
    listener.close()


def by_dsn(dsn: str) -> Any:
    return dsn


def by_dsn_with_options(dsn: str) -> Any:
    return conninfo.make_conninfo(dsn, options="-c default_transaction_isolation=serializable -c work_mem=5MB")


def by_engine(dsn: str) -> Any:
    return create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn), isolation_level="SERIALIZABLE")


@pytest.mark.parametrize("way", [by_dsn, by_dsn_with_options, by_engine])
def test_every_connection_is_read_committed(strict_dsn: str, way: Callable[[str], Any]) -> None:
    where = way(strict_dsn)
    with dblock.Client(where) as client:
        assert levels(client) == ["read committed"] * 3
    with resolve(where).connect() as connection:
        assert connection.execute(LEVEL.sql).fetchone() == ("read committed",)
        with connection.transaction():
            assert connection.execute(LEVEL.sql).fetchone() == ("read committed",)


def test_options_of_the_user_are_kept(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    show = b"SELECT current_setting('work_mem'), current_setting('transaction_isolation')"
    with resolve(by_dsn_with_options(dsn)).connect() as connection:
        assert connection.execute(show).fetchone() == ("5MB", "read committed")
    monkeypatch.setenv("PGOPTIONS", "-c work_mem=6MB")
    with resolve(dsn).connect() as connection:
        assert connection.execute(show).fetchone() == ("6MB", "read committed")


@needs_pgbouncer
@pytest.mark.parametrize("settings", ["", "ignore_startup_parameters = options"], ids=["refused", "ignored"])
def test_every_call_through_a_pooler_is_read_committed(strict_dsn: str, settings: str) -> None:
    with pooled(strict_dsn, settings) as through, dblock.Client(through) as client:
        assert levels(client) == ["read committed"] * 3
        assert client.lock('it\'s \\ "a"', meta={"a": "$1 '"}).acquire().release()
        runtime: Any = client._runtime
        with pytest.raises(dblock.DblockError, match="division by zero"):
            runtime.runner.run(calling(Call(b"SELECT 1 / $1::integer", ("0",))))
        assert client.lock("after").acquire().release()


@needs_pgbouncer
async def test_threads_of_an_async_engine_are_read_committed_through_a_pooler(strict_dsn: str) -> None:
    with pooled(strict_dsn, "") as through:
        engine = create_async_engine(
            "postgresql+psycopg://", async_creator=lambda: psycopg.AsyncConnection.connect(through)
        )
        async with dblock.AsyncClient(engine) as client:
            await client.lock("a").holder()
            runtime: Any = client._runtime
            assert await runtime.runner.run(calling(LEVEL)) == ("read committed",)
            keepalive_runner = runtime.listener._keepalive_runner
            assert await asyncio.to_thread(keepalive_runner.run, calling(LEVEL)) == ("read committed",)
            await client.lock("a").acquire()


async def test_other_clients_are_read_committed_too(strict_dsn: str) -> None:
    engine = create_async_engine(
        "postgresql+psycopg://", async_creator=lambda: psycopg.AsyncConnection.connect(strict_dsn)
    )
    for where in (strict_dsn, engine):
        async with dblock.AsyncClient(where) as client:
            await client.lock("a").holder()
            runtime: Any = client._runtime
            assert await runtime.runner.run(calling(LEVEL)) == ("read committed",)


async def test_free_lock_is_granted_after_a_wait(strict_dsn: str, clients: Clients) -> None:
    one, other = clients(), clients()
    lease = await one.lock("a").acquire()
    task = asyncio.ensure_future(other.lock("a", timeout=20).acquire())
    await eventually_async(one.lock("a").queue, "a waiter")
    await lease.release()
    await (await task).release()
    for _ in range(5):
        lease = await other.lock("a").try_acquire()
        assert lease is not None, "the lock is free and has no waiter"
        await lease.release()


@pytest.mark.usefixtures("needs_presence")
@pytest.mark.second_stage
def test_lock_of_a_killed_process_is_taken_at_once(strict_dsn: str) -> None:
    script = (
        "import sys, time, dblock\n"
        "lease = dblock.Client(sys.argv[1]).lock('a', ttl=30).acquire()\n"
        "while lease._state.presence is None: time.sleep(0.01)\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    holder = warm_start.Program([sys.executable, "-c", script, strict_dsn], stdout=subprocess.PIPE)
    try:
        assert holder.stdout
        assert holder.stdout.readline() == b"held\n"
        with dblock.Client(strict_dsn) as client:
            killing = threading.Timer(0.4, holder.kill)
            with soon(2):
                killing.start()
                client.lock("a").acquire(timeout=10).release()
    finally:
        holder.kill()
        holder.communicate()


@pytest.mark.second_stage
def test_command_runs_again_after_a_wait(strict_dsn: str) -> None:
    command = [sys.executable, "-m", "dblock", "--dsn", strict_dsn, "run", "--skip-if-held", "nightly", "true"]
    with dblock.Client(strict_dsn) as client, dblock.Client(strict_dsn) as other:
        held = client.lock("nightly").acquire()
        threading.Timer(0.3, held.release).start()
        other.lock("nightly").acquire(timeout=10).release()
    for _ in range(2):
        warm_start.run(command, check=True, timeout=30)


def test_reaper_deletes_idle_locks(strict_dsn: str, owner: psycopg.Connection) -> None:
    with dblock.Client(strict_dsn) as client:
        client.lock("a").acquire().release()
    assert Reaper(strict_dsn, idle=0).once() == 1
