"""Leases in the user's own transaction: assert_held and release_in."""

from __future__ import annotations

import gc
import inspect
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import conninfo
from psycopg.rows import dict_row
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import dblock
from dblock.admin import schema
from tests.dblock.client.test_engines import url
from tests.support.facade import AsyncClients, SyncClients
from tests.support.renewals import TTL, renewed
from tests.support.stages import first

OPENED = ["sync psycopg", "sync Connection", "async psycopg", "async Session", "sync Session", "async Connection"]


async def settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


class Open:
    """Holds a connection of either kind with an open transaction."""

    def __init__(self, connection: Any, dispose: Any) -> None:
        self.connection = connection
        self._dispose = dispose

    async def commit(self) -> None:
        await settled(self.connection.commit())

    async def rollback(self) -> None:
        await settled(self.connection.rollback())

    async def close(self) -> None:
        await settled(self.connection.close())
        await settled(self._dispose())


@pytest.fixture(params=first(4, OPENED))
async def opened(request: pytest.FixtureRequest, dsn: str) -> AsyncIterator[tuple[Any, Open]]:
    """Return clients, and a transaction of the same kind."""
    how, kind = request.param.split()
    clients: Any = (AsyncClients if how == "async" else SyncClients)(dsn)
    connection: Any
    dispose: Any
    if kind == "psycopg":
        made = psycopg.AsyncConnection.connect(dsn, row_factory=dict_row) if how == "async" else psycopg.connect(dsn)
        connection, dispose = await settled(made), lambda: None
    elif how == "async":
        async_engine = create_async_engine(url(dsn))
        connection = await async_engine.connect() if kind == "Connection" else AsyncSession(async_engine)
        dispose = async_engine.dispose
    else:
        engine = create_engine(url(dsn))
        connection = engine.connect() if kind == "Connection" else Session(engine)
        dispose = engine.dispose
    transaction = Open(connection, dispose)
    # Tests call the lease without the facade, which runs calls in threads: a connection belongs to one thread.
    yield clients, transaction
    await transaction.close()
    await clients.close()


async def acquired(clients: Any, name: str = "a", **options: Any) -> Any:
    lease = await clients().lock(name, **options).acquire()
    return getattr(lease, "_inner", lease)


async def test_next_grant_comes_only_after_the_transaction_has_committed(opened: tuple[Any, Open]) -> None:
    clients, transaction = opened
    lease = await acquired(clients)
    await settled(lease.release_in(transaction.connection))
    assert await clients().lock("a").try_acquire() is None
    await transaction.commit()
    assert (await clients().lock("a").try_acquire()) is not None
    assert not lease.lost.is_set()


async def test_release_that_is_rolled_back_leaves_the_lease_held(opened: tuple[Any, Open]) -> None:
    clients, transaction = opened
    lease = await acquired(clients)
    await settled(lease.release_in(transaction.connection))
    await transaction.rollback()
    assert await clients().lock("a").try_acquire() is None
    await settled(lease.renew())
    assert lease.remaining() > 0
    assert await settled(lease.release()) is True


@pytest.mark.parametrize("noticed", [False, True])
async def test_release_after_a_committed_one_is_true_whether_or_not_a_renewal_came_first(
    opened: tuple[Any, Open], noticed: bool
) -> None:
    clients, transaction = opened
    lease = await acquired(clients)
    await settled(lease.release_in(transaction.connection))
    await transaction.commit()
    if noticed:
        with pytest.raises(dblock.LeaseLost):
            await settled(lease.renew())
    assert await settled(lease.release()) is True
    assert not lease.lost.is_set()


async def test_body_may_end_after_a_committed_release(opened: tuple[Any, Open]) -> None:
    clients, transaction = opened
    lock = clients().lock("a")
    async with lock as lease:
        inner = getattr(lease, "_inner", lease)
        await settled(inner.release_in(transaction.connection))
        await transaction.commit()
        next_one = await clients().lock("a").acquire(timeout=20)
    assert next_one.remaining() > 0
    assert await clients().lock("a").holder() is not None


@pytest.mark.second_stage
async def test_body_does_not_wait_for_the_transaction_that_releases(opened: tuple[Any, Open]) -> None:
    clients, transaction = opened
    started = time.monotonic()
    async with clients(patience=20).lock("a") as lease:
        await settled(getattr(lease, "_inner", lease).release_in(transaction.connection))
    assert time.monotonic() - started < 10
    await transaction.commit()
    assert await clients().lock("a").try_acquire() is not None


@pytest.mark.parametrize(
    "opened", first(2, sorted(OPENED, key=lambda kind: kind not in ("sync psycopg", "async Session"))), indirect=True
)
@pytest.mark.second_stage
async def test_transaction_that_stays_open_delays_no_other_lease(
    opened: tuple[Any, Open], kept_leases: list[Any], owner: psycopg.Connection
) -> None:
    """The released lease is garbage-collected while the transaction is open, and the client is closed at the end."""
    clients, transaction = opened
    client = clients(patience=30)
    lease = await client.lock("a").acquire()
    await settled(getattr(lease, "_inner", lease).release_in(transaction.connection))
    kept_leases.clear()
    del lease
    gc.collect()  # which holds up every thread of this large process, so the other lease comes after it
    await renewed(await client.lock("kept", ttl=TTL).acquire())
    started = time.monotonic()
    await client.close()
    assert time.monotonic() - started < 15
    assert owner.execute("SELECT count(*) FROM holder('kept')").fetchone() == (0,)
    await transaction.rollback()


async def test_lease_after_release_in_is_not_trusted_until_renewed(opened: tuple[Any, Open]) -> None:
    clients, transaction = opened
    lease = await acquired(clients)
    await settled(lease.release_in(transaction.connection))
    assert lease.remaining() == 0
    with pytest.raises(dblock.LeaseLost):
        lease.raise_if_lost()
    await transaction.rollback()
    await settled(lease.renew())
    lease.raise_if_lost()


async def test_lost_lease_can_be_neither_proven_nor_released_in_a_transaction(
    opened: tuple[Any, Open], owner: psycopg.Connection
) -> None:
    clients, transaction = opened
    for what in ("assert_held", "release_in"):
        lease = await acquired(clients, what, keep_alive=False)
        owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp()")
        with pytest.raises(dblock.LeaseLost):
            await settled(getattr(lease, what)(transaction.connection))
        assert lease.lost.is_set()
        await transaction.rollback()


@pytest.mark.parametrize("what", ["assert_held", "release_in"])
async def test_lease_whose_lock_was_freed_is_reported_as_forced(
    opened: tuple[Any, Open], owner: psycopg.Connection, what: str
) -> None:
    clients, transaction = opened
    lease = await acquired(clients)
    owner.execute("SELECT release('a', %s)", [lease.token])
    with pytest.raises(dblock.LeaseLost, match="forced"):
        await settled(getattr(lease, what)(transaction.connection))
    assert lease.lost.reason is dblock.Reason.FORCED


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("what", ["assert_held", "release_in"])
def test_transaction_with_an_old_snapshot_reports_no_false_loss(dsn: str, isolation: str, what: str) -> None:
    """In the transaction's snapshot the lease has expired, but it was renewed since."""
    expires = "UPDATE dblock.distributed_locks SET expires_at = clock_timestamp() + %s::interval"
    with (
        dblock.Client(dsn) as client,
        psycopg.connect(dsn) as connection,
        psycopg.connect(dsn, autocommit=True) as owner,
    ):
        lease = client.lock("a", keep_alive=False).acquire()
        owner.execute(expires, ["-1 ms"])  # instead of the time until the lease would have expired
        connection.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}".encode())
        connection.execute("SELECT 1")
        owner.execute(expires, ["30 s"])
        lease.renew()
        with pytest.raises(psycopg.errors.SerializationFailure):
            getattr(lease, what)(connection)
        connection.rollback()
        assert not lease.lost.is_set()
        lease.renew()
        getattr(lease, what)(connection)


async def test_takeover_waits_for_a_transaction_that_has_proved_its_lease(
    opened: tuple[Any, Open], owner: psycopg.Connection
) -> None:
    clients, transaction = opened
    lease = await acquired(clients, keep_alive=False)
    await settled(lease.assert_held(transaction.connection))
    owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp()")
    assert owner.execute("SELECT granted, remaining FROM try_acquire('a')").fetchone() == (False, 0.0)
    assert owner.execute("SELECT reap('0 s')").fetchone() == (0,)
    await transaction.commit()
    assert owner.execute("SELECT granted FROM try_acquire('a')").fetchone() == (True,)


async def test_renewals_succeed_during_a_proof(opened: tuple[Any, Open], owner: psycopg.Connection) -> None:
    clients, transaction = opened
    lease = await acquired(clients)
    await settled(lease.assert_held(transaction.connection))
    before = lease.expires_at
    await settled(lease.renew())
    assert lease.expires_at > before
    await transaction.rollback()


async def test_connection_of_the_other_kind_is_refused(opened: tuple[Any, Open], dsn: str) -> None:
    clients, _ = opened
    lease = await acquired(clients)
    other: Any
    if isinstance(lease, dblock.Lease):
        other = await psycopg.AsyncConnection.connect(dsn)
    else:
        other = psycopg.connect(dsn)
    for wrong in (other, None, "postgresql://"):
        with pytest.raises(dblock.InvalidArgument, match="synchronous connection"):
            await settled(lease.assert_held(wrong))
    await settled(other.close())


async def test_autocommit_without_a_transaction_is_refused(dsn: str) -> None:
    with dblock.Client(dsn) as client, psycopg.connect(dsn, autocommit=True) as connection:
        lease = client.lock("a").acquire()
        for what in (lease.assert_held, lease.release_in):
            with pytest.raises(dblock.InvalidArgument, match="autocommit"):
                what(connection)
        with connection.transaction():
            lease.assert_held(connection)
        engine = create_engine(url(dsn), isolation_level="AUTOCOMMIT")
        with engine.connect() as autocommitting, pytest.raises(dblock.InvalidArgument, match="autocommit"):
            lease.release_in(autocommitting)
        engine.dispose()
        assert lease.release() is True


async def test_connection_to_another_kind_of_database_is_refused(dsn: str) -> None:
    engine = create_engine("sqlite://")
    with dblock.Client(dsn) as client, engine.connect() as connection:
        lease = client.lock("a").acquire()
        with pytest.raises(dblock.InvalidArgument, match="sqlite"):
            lease.assert_held(connection)
    engine.dispose()


@pytest.fixture(scope="module")
def another_installation(server: str) -> Iterator[str]:
    """A database with an installation of its own. A clone of the template would have the template's."""
    name = f"dblock_another_{os.getpid()}"
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
        dsn = conninfo.make_conninfo(server, dbname=name)
        schema.install(dsn)
        yield dsn
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


async def test_proof_in_another_database_with_the_same_lock_and_token_is_refused(
    opened: tuple[Any, Open], another_installation: str
) -> None:
    clients, transaction = opened
    with dblock.Client(another_installation) as elsewhere, elsewhere.lock("a"):
        pass
    clients.dsn = another_installation
    lease = await acquired(clients)
    for what in (lease.assert_held, lease.release_in):
        with pytest.raises(dblock.InvalidArgument, match="another database"):
            await settled(what(transaction.connection))
        await transaction.rollback()
    assert not lease.lost.is_set()
    assert lease.remaining() > 0
    assert await settled(lease.release()) is True
    await clients.close()


async def test_proof_in_a_database_without_dblock_is_refused(opened: tuple[Any, Open]) -> None:
    clients, transaction = opened
    lease = await acquired(clients)
    hide: Any = "ALTER SCHEMA dblock RENAME TO hidden"  # in this transaction alone
    by_sqlalchemy = not isinstance(transaction.connection, (psycopg.Connection, psycopg.AsyncConnection))
    for what in (lease.assert_held, lease.release_in):
        await settled(transaction.connection.execute(text(hide) if by_sqlalchemy else hide))
        with pytest.raises(dblock.InvalidArgument, match="another database"):
            await settled(what(transaction.connection))
        await transaction.rollback()
    assert lease.remaining() > 0
    assert await settled(lease.release()) is True


def test_scoped_session_is_accepted(dsn: str) -> None:
    engine = create_engine(url(dsn))
    session = scoped_session(sessionmaker(engine))
    with dblock.Client(dsn) as client:
        lease = client.lock("a").acquire()
        lease.assert_held(session)
        lease.release_in(session)
        session.commit()
        assert client.lock("a").holder() is None
    session.remove()
    engine.dispose()


async def test_proof_prepares_nothing_in_the_users_session(opened: tuple[Any, Open]) -> None:
    """Behind a pooler the next transaction may run in another session, which does not know the statement."""
    clients, own = opened
    lease = await clients().lock("a").acquire()
    asked = "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%assert_held%' AND name <> ''"
    for _ in range(8):
        await settled(lease.assert_held(own.connection))
        await own.commit()
    by_psycopg = isinstance(own.connection, (psycopg.Connection, psycopg.AsyncConnection))
    found = await settled(own.connection.execute(asked if by_psycopg else text(asked)))
    row = await settled(found.fetchone())
    assert tuple(row.values() if isinstance(row, dict) else row) == (0,)
