"""SQLAlchemy: a guarded session commits only under its lease."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest
from sqlalchemy import BigInteger, Engine, create_engine, make_url, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

import dblock
from dblock.integrations.sqlalchemy import guard


class Base(DeclarativeBase):
    pass


class Invoice(Base):
    __tablename__ = "invoices"
    id: Mapped[int] = mapped_column(primary_key=True)
    closed_by: Mapped[int | None] = mapped_column(BigInteger)


@pytest.fixture
def engine(dsn: str) -> Iterator[Engine]:
    made = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
    Base.metadata.create_all(made)
    yield made
    made.dispose()


@pytest.fixture
async def async_engine(dsn: str, engine: Engine) -> AsyncIterator[AsyncEngine]:
    given = psycopg.conninfo.conninfo_to_dict(dsn)
    url = make_url("postgresql+psycopg://").set(
        username=str(given["user"]), database=str(given["dbname"]), query={"host": str(given["host"])}
    )
    made = create_async_engine(url)
    yield made
    await made.dispose()


def stored(engine: Engine) -> list[int]:
    with Session(engine) as session:
        return [*session.scalars(select(Invoice.id).order_by(Invoice.id))]


def take_away(owner: psycopg.Connection, lease: dblock.Lease | dblock.AsyncLease) -> None:
    """Free the lock at once, without the knowledge of its holder."""
    owner.execute("SELECT force_release(%s, %s, now => true)", [lease.name, lease.token])


def test_guarded_session_commits_under_its_lease_and_not_without(
    client: dblock.Client, engine: Engine, owner: psycopg.Connection
) -> None:
    with Session(engine) as session:
        lease = client.lock("invoice:1").acquire()
        guard(session, lease)
        session.add(Invoice(id=1, closed_by=lease.token))
        session.commit()
        session.add(Invoice(id=2))
        session.flush()
        take_away(owner, lease)
        with pytest.raises(dblock.LeaseLost):
            session.commit()
        session.rollback()
        session.add(Invoice(id=3))
        with pytest.raises(dblock.LeaseLost):
            session.flush()  # known by now
    assert stored(engine) == [1]


def test_unguarded_session_would_commit_without_its_lease(
    client: dblock.Client, engine: Engine, owner: psycopg.Connection
) -> None:
    with Session(engine) as session:
        lease = client.lock("invoice:1").acquire()
        unguard = guard(session, lease)
        unguard()
        unguard()
        take_away(owner, lease)
        session.add(Invoice(id=1))
        session.commit()
    assert stored(engine) == [1]


@pytest.mark.second_stage
def test_lock_is_not_granted_between_the_proof_and_the_end_of_the_transaction(
    client: dblock.Client, engine: Engine, dsn: str
) -> None:
    from sqlalchemy import event

    tried: list[dblock.Lease | None] = []
    with Session(engine) as session, dblock.Client(dsn) as other:
        lease = client.lock("invoice:1", ttl=3, keep_alive=False).acquire()
        guard(session, lease)

        @event.listens_for(session, "before_commit")
        def wait(_: Session) -> None:
            # After the proof: the lease expires, and the transaction is still open.
            lease.lost.wait(10)
            tried.append(other.lock("invoice:1").try_acquire())

        session.add(Invoice(id=1))
        with pytest.raises(dblock.LeaseLost):
            session.commit()  # the flush knows that the lease has expired
        assert tried == [None]
        session.rollback()
    assert stored(engine) == []


def test_commit_of_a_savepoint_and_a_scoped_session_prove_the_lease(
    client: dblock.Client, engine: Engine, owner: psycopg.Connection
) -> None:
    session = scoped_session(sessionmaker(engine))
    lease = client.lock("invoice:1").acquire()
    guard(session, lease)
    with session.begin_nested():
        session.add(Invoice(id=1))
    session.commit()
    take_away(owner, lease)
    with pytest.raises(dblock.LeaseLost), session.begin_nested():
        session.add(Invoice(id=2))
    session.rollback()
    session.remove()
    assert stored(engine) == [1]


def test_guard_refuses_a_lease_of_the_other_kind(client: dblock.Client, async_engine: AsyncEngine) -> None:
    lease = client.lock("invoice:1").acquire()
    with pytest.raises(dblock.InvalidArgument, match="guards a SQLAlchemy Session; got AsyncSession"):
        guard(AsyncSession(async_engine), lease)


async def test_guarded_async_session_commits_under_its_lease_and_not_without(
    dsn: str, engine: Engine, async_engine: AsyncEngine, owner: psycopg.Connection
) -> None:
    async with dblock.AsyncClient(dsn) as client, AsyncSession(async_engine) as session:
        lease = await client.lock("invoice:1").acquire()
        guard(session, lease)
        session.add(Invoice(id=1, closed_by=lease.token))
        await session.commit()
        session.add(Invoice(id=2))
        await session.flush()
        take_away(owner, lease)
        with pytest.raises(dblock.LeaseLost):
            await session.commit()
        await session.rollback()
    assert stored(engine) == [1]
