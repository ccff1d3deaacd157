"""A fence in the user's own transaction, on each of the six kinds of connection."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

import dblock
import fenced_store
from fenced_store import FenceBroken, InvalidArgument, NotInstalled, StaleTokenError, fence
from tests.fenced_store.postgres.conftest import Users, users_of


@pytest.fixture(autouse=True)
def ledger(owner: psycopg.Connection) -> None:
    owner.execute("CREATE TABLE public.ledger (id int PRIMARY KEY, amount int)")
    owner.execute("INSERT INTO public.ledger VALUES (1, 100)")


def amount(owner: psycopg.Connection) -> Any:
    return owner.execute("SELECT amount FROM public.ledger").fetchone()[0]  # type: ignore[index]


SPEND = "UPDATE public.ledger SET amount = amount - 1"


async def test_statements_inside_a_fence_carry_the_token(users: Users, owner: psycopg.Connection) -> None:
    async with users.fenced("ledger", 7) as inside:
        assert inside.token == 7
        assert await users.run("SELECT current_setting('fenced_store.token')") == "7"
        await users.run(SPEND)
    assert await users.run("SELECT current_setting('fenced_store.token')") == ""
    await users.commit()
    assert amount(owner) == 99
    assert owner.execute("SELECT token FROM fenced_store.fences WHERE resource = 'ledger'").fetchone() == (7,)


async def test_holder_takes_a_fence_many_times(users: Users, owner: psycopg.Connection) -> None:
    for _ in range(3):
        async with users.fenced("ledger", 7):
            await users.run(SPEND)
        await users.commit()
    async with users.fenced("ledger", 7):
        await users.run(SPEND)
        async with users.fenced("ledger", 7):
            await users.run(SPEND)
    await users.commit()
    assert amount(owner) == 95


async def test_stale_holder_is_refused_and_can_commit_nothing(
    users: Users, owner: psycopg.Connection, dsn: str, store: fenced_store.FencedStore
) -> None:
    store.claim("ledger", fence=8)
    await users.run(SPEND)  # before the fence: the rest of the transaction must not be committed either
    with pytest.raises(StaleTokenError) as caught:
        async with users.fenced("ledger", 7):
            raise AssertionError("the body must not run")
    assert (caught.value.resource, caught.value.offered, caught.value.stored) == ("ledger", 7, 8)
    assert caught.value.stored_at is not None
    await users.commit()  # the transaction has failed, so this rolls back
    assert amount(owner) == 100
    (noted,) = fenced_store.rejections(dsn)
    assert (noted.resource, noted.offered, noted.stored) == ("ledger", 7, 8)
    assert "pid" in noted.rejected


async def test_rolled_back_transaction_raises_no_fence(users: Users, owner: psycopg.Connection) -> None:
    with pytest.raises(RuntimeError, match="the body's own"):
        async with users.fenced("ledger", 7):
            raise RuntimeError("the body's own")
    await users.rollback()
    async with users.fenced("ledger", 6):
        await users.run(SPEND)
    await users.commit()
    assert amount(owner) == 99


async def test_nested_fence_restores_the_outer_token(users: Users) -> None:
    async with users.fenced("outer", 9):
        async with users.fenced("inner", 4):
            assert await users.run("SELECT current_setting('fenced_store.token')") == "4"
        assert await users.run("SELECT current_setting('fenced_store.token')") == "9"
        with pytest.raises(RuntimeError):
            async with users.fenced("inner", 5):
                raise RuntimeError
        assert await users.run("SELECT current_setting('fenced_store.token')") == "9"


@pytest.mark.parametrize("then", [False, True], ids=["last in the body", "and another transaction"])
async def test_transaction_that_ends_inside_its_fence_raises_fence_broken(users: Users, then: bool) -> None:
    with pytest.raises(FenceBroken, match="its transaction ended"):
        async with users.fenced("ledger", 7):
            await users.run(SPEND)
            await users.commit()
            if then:
                await users.run(SPEND)
    await users.rollback()


@pytest.mark.parametrize("carried", ["", "7"])
async def test_rollback_to_a_savepoint_before_the_fence_raises_fence_broken(users: Users, carried: str) -> None:
    await users.run(f"SELECT set_config('fenced_store.token', '{carried}', true)")
    await users.run("SAVEPOINT before")
    with pytest.raises(FenceBroken, match="savepoint"):
        async with users.fenced("ledger", 7):
            await users.run("ROLLBACK TO before")
            await users.run(SPEND)
    await users.rollback()


async def test_refusal_by_a_trigger_inside_the_body_is_translated(users: Users, dsn: str) -> None:
    """The trigger of a protected table refuses, and the caller gets the same error as from `fence` itself."""
    fenced_store.protect(dsn, "ledger")
    async with users.fenced("any", 8):
        await users.run(SPEND)
    await users.commit()
    with pytest.raises(StaleTokenError) as caught:
        async with users.fenced("other", 7):
            await users.run(SPEND)
    assert (caught.value.resource, caught.value.stored) == ("public.ledger:1", 8)
    await users.rollback()
    assert [one.resource for one in fenced_store.rejections(dsn)] == ["public.ledger:1"]


async def test_missing_schema_names_the_command_to_run(bare_dsn: str) -> None:
    async with users_of("sync Connection", bare_dsn) as users:
        with pytest.raises(NotInstalled, match="dblock fence setup"):
            async with users.fenced("ledger", 7):
                pass


async def test_wrong_kind_of_with_statement_is_refused(dsn: str) -> None:
    async with users_of("sync psycopg", dsn) as users:
        with pytest.raises(InvalidArgument, match="write `with fence"):
            async with fence(users.connection, "a", 1):
                pass
    async with users_of("async psycopg", dsn) as users:
        with pytest.raises(InvalidArgument, match="write `async with fence"), fence(users.connection, "a", 1):
            pass


@pytest.mark.parametrize("thing", [None, "dsn", object()], ids=lambda thing: type(thing).__name__)
def test_object_that_is_no_connection_is_refused(thing: Any) -> None:
    with pytest.raises(InvalidArgument, match="needs a connection"):
        fence(thing, "a", 1)


def test_connection_without_a_transaction_is_refused(dsn: str, engine: Any, owner: psycopg.Connection) -> None:
    with pytest.raises(InvalidArgument, match="autocommit"), fence(owner, "a", 1):
        pass
    with owner.transaction(), fence(owner, "a", 1):
        pass
    connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    with connection, pytest.raises(InvalidArgument, match="autocommit"), fence(connection, "a", 1):
        pass


def test_connection_to_another_database_system_is_refused() -> None:
    from sqlalchemy import create_engine

    connection = create_engine("sqlite://").connect()
    with connection, pytest.raises(InvalidArgument, match="sqlite"), fence(connection, "a", 1):
        pass


def test_scoped_session_and_row_factory_work(dsn: str, engine: Any) -> None:
    from psycopg.rows import dict_row

    scoped = scoped_session(sessionmaker(engine))
    with fence(scoped, "a", 1):
        scoped.execute(text(SPEND))
    scoped.commit()
    scoped.remove()
    with psycopg.connect(dsn, row_factory=dict_row) as connection, fence(connection, "a", 1):
        connection.execute(SPEND.encode())


class Base(DeclarativeBase):
    pass


class Entry(Base):
    __tablename__ = "ledger"
    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int]


def test_session_is_flushed_inside_its_fence(engine: Any, dsn: str) -> None:
    """Otherwise the unit of work would be written at commit, when the transaction carries no token any more."""
    fenced_store.protect(dsn, "ledger", strict=True)
    with Session(engine) as session:
        with fence(session, "ledger", 7):
            session.get_one(Entry, 1).amount = 55
        session.commit()
    with Session(engine) as session, pytest.raises(StaleTokenError), fence(session, "other", 6):
        session.get_one(Entry, 1).amount = 44
    with Session(engine) as session:
        assert session.get_one(Entry, 1).amount == 55


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_live_fence_proves_the_current_grant_in_the_same_transaction(
    kind: str, dsn: str, owner: psycopg.Connection
) -> None:
    """The fence alone accepts a holder whose lease has expired, as long as no newer holder has come."""
    async with users_of(f"{kind} psycopg", dsn) as users:
        client: Any = dblock.AsyncClient(dsn) if kind == "async" else dblock.Client(dsn)
        lease = client.lock("a").acquire()
        lease = await lease if kind == "async" else lease
        async with users.fenced("ledger", lease, live=True):
            await users.run(SPEND)
            # The lock is not granted again before this transaction ends, whatever happens to the lease.
            owner.execute("UPDATE dblock.distributed_locks SET expires_at = '-infinity'")
            assert owner.execute("SELECT granted FROM dblock.try_acquire('a')").fetchone() == (False,)
        await users.commit()
        with pytest.raises(dblock.LeaseLost):
            async with users.fenced("ledger", lease, live=True):
                raise AssertionError("the body must not run")
        await users.rollback()
        assert amount(owner) == 99
        if kind == "async":
            await client.close()
        else:
            client.close()


def test_live_fence_needs_a_lease(owner: psycopg.Connection) -> None:
    with pytest.raises(InvalidArgument, match="live=True needs a lease"):
        fence(owner, "a", 7, live=True)


@pytest.mark.parametrize("bad", ["", "x" * 1025, "nul\0", 7, None], ids=ascii)
def test_invalid_resource_is_refused_first(owner: psycopg.Connection, bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="resource's name"):
        fence(owner, bad, 1)


def test_refusal_stands_when_recording_it_fails(
    dsn: str, owner: psycopg.Connection, store: fenced_store.FencedStore, caplog: Any
) -> None:
    store.claim("ledger", fence=8)
    owner.execute("DROP FUNCTION fenced_store.record_rejection")
    with psycopg.connect(dsn) as connection, pytest.raises(StaleTokenError), fence(connection, "ledger", 7):
        pass
    assert "was not recorded" in caplog.text


def test_translate_errors_covers_the_whole_engine(engine: Any, dsn: str) -> None:
    fenced_store.protect(dsn, "ledger", strict=True)
    fenced_store.translate_errors(engine)
    with engine.begin() as connection, fence(connection, "ledger", 7):
        connection.execute(text(SPEND))
    with pytest.raises(fenced_store.MissingToken) as missing, engine.begin() as connection:
        connection.execute(text(SPEND))
    assert missing.value.resource == "public.ledger:1"
    with pytest.raises(StaleTokenError), engine.begin() as connection:
        connection.execute(text("SET LOCAL fenced_store.token = '6'"))
        connection.execute(text(SPEND))
    with pytest.raises(InvalidArgument, match="'six', which is not a fencing token"), engine.begin() as connection:
        connection.execute(text("SET LOCAL fenced_store.token = 'six'"))
        connection.execute(text(SPEND))
    assert [one.offered for one in fenced_store.rejections(dsn)] == [6]


def test_connection_of_django_is_accepted(dsn: str) -> None:
    class Wrapper:
        """Django's wrapper of a connection, as far as a fence uses it."""

        connection: psycopg.Connection

        def ensure_connection(self) -> None:
            self.connection = psycopg.connect(dsn)

    django: Any = Wrapper()
    with fence(django, "r", 5):
        assert django.connection.execute("SELECT current_setting('fenced_store.token')").fetchone() == ("5",)
    django.connection.close()
