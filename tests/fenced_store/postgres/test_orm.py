"""Fences with SQLAlchemy's ORM and with Alembic."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata, produce_migrations, render_python_code
from alembic.migration import MigrationContext
from alembic.operations import Operations, ops
from sqlalchemy import Column, Engine, Integer, MetaData, Table, Text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import fenced_store
from fenced_store import FencedMixin, StaleTokenError, fence
from fenced_store.integrations.alembic import FenceTableOp, UnfenceTableOp, include_object
from tests.fenced_store.postgres.conftest import url


class Base(DeclarativeBase):
    pass


class Order(FencedMixin, Base):
    __tablename__ = "Orders"
    __table_args__ = {"schema": "shop floor"}  # noqa: RUF012
    __fence__ = {"strict": True}  # noqa: RUF012

    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]


class Whole(FencedMixin, Base):
    __tablename__ = "whole"
    __fence__ = {"per": "table"}  # noqa: RUF012

    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def made(engine: Engine, owner: psycopg.Connection) -> Iterator[Engine]:
    owner.execute('CREATE SCHEMA "shop floor"')
    Base.metadata.create_all(engine)
    yield engine
    Base.metadata.drop_all(engine)


def test_mixin_protects_the_table_when_it_is_created(made: Engine) -> None:
    assert [(one.resource, one.per, one.strict) for one in fenced_store.protected(made)] == [
        ('"shop floor"."Orders"', "row", True), ("public.whole", "table", False),
    ]  # fmt: skip


def test_unit_of_work_carries_the_token(made: Engine) -> None:
    with Session(made) as session:
        with fence(session, "shop", 7):
            session.add(Order(id=1, state="new"))
        order = session.get_one(Order, 1)
        assert order.fence_token == 7
        assert order.fence_at is not None
        session.commit()
        with fence(session, "shop", 8):
            order.state = "paid"
        assert order.fence_token == 8
        session.commit()
    with Session(made) as session, pytest.raises(StaleTokenError), fence(session, "elsewhere", 7):
        session.get_one(Order, 1).state = "stale"
    with Session(made) as session, pytest.raises(StaleTokenError), fence(session, "elsewhere", 7):
        session.delete(session.get_one(Order, 1))


async def test_async_unit_of_work_carries_the_token(made: Engine, dsn: str) -> None:
    engine = create_async_engine(url(dsn))
    async with AsyncSession(engine) as session:
        async with fence(session, "shop", 7):
            session.add(Order(id=1, state="new"))
        await session.commit()
    fenced_store.translate_errors(engine)
    async with AsyncSession(engine) as session:
        order = await session.get_one(Order, 1)
        order.state = "without a fence"
        with pytest.raises(fenced_store.MissingToken):
            await session.commit()
    await engine.dispose()


@pytest.mark.second_stage
def test_autogenerate_changes_nothing_for_protected_classes(made: Engine) -> None:
    with made.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"include_object": include_object, "include_schemas": True, "compare_server_default": True}
        )
        assert compare_metadata(context, Base.metadata) == []


def test_autogenerate_ignores_the_fence_columns(engine: Engine, owner: psycopg.Connection, dsn: str) -> None:
    """It still finds the user's own changes."""
    owner.execute("CREATE TABLE public.orders (id int PRIMARY KEY, gone text)")
    owner.execute("CREATE TABLE public.other (id int PRIMARY KEY, fence_token int)")
    fenced_store.protect(dsn, "orders")
    metadata = MetaData()
    Table("orders", metadata, Column("id", Integer, primary_key=True), Column("added", Text))
    Table("other", metadata, Column("id", Integer, primary_key=True))

    def found(**options: Any) -> list[tuple[str, str]]:
        with engine.connect() as connection:
            context = MigrationContext.configure(connection, opts=options)
            return sorted((one[0], one[3].name) for one in compare_metadata(context, metadata) if "column" in one[0])

    assert found(include_object=include_object) == [
        ("add_column", "added"), ("remove_column", "fence_token"), ("remove_column", "gone"),
    ]  # fmt: skip
    assert ("remove_column", "fence_at") in found()


def test_migration_adds_and_removes_a_fence(engine: Engine, owner: psycopg.Connection, dsn: str) -> None:
    owner.execute('CREATE SCHEMA "a:b%"')
    owner.execute('CREATE TABLE "a:b%"."Or\'ders :x" (a int, "b""c" int, PRIMARY KEY (a, "b""c"))')
    with engine.begin() as connection:
        op: Any = Operations(MigrationContext.configure(connection))
        op.fence_table("Or'ders :x", schema="a:b%", key=["a", 'b"c'], strict=True)
    (made,) = fenced_store.protected(dsn)
    assert (made.key, made.per, made.strict, made.warn_only) == (("a", 'b"c'), "row", True, False)
    with engine.begin() as connection:
        op = Operations(MigrationContext.configure(connection))
        op.fence_table("Or'ders :x", schema="a:b%", per="table", warn_only=True)
    (made,) = fenced_store.protected(dsn)
    assert (made.per, made.warn_only) == ("table", True)
    with engine.begin() as connection:
        op = Operations(MigrationContext.configure(connection))
        op.unfence_table("Or'ders :x", schema="a:b%")
    assert fenced_store.protected(dsn) == []


def test_migration_can_be_printed_and_run_by_hand(owner: psycopg.Connection, dsn: str) -> None:
    owner.execute("CREATE TABLE public.orders (id int PRIMARY KEY)")
    printed = io.StringIO()
    context = MigrationContext.configure(dialect_name="postgresql", opts={"as_sql": True, "output_buffer": printed})
    op: Any = Operations(context)
    op.fence_table("orders", key="id")
    owner.execute("SET search_path TO public")
    owner.execute(printed.getvalue().encode())
    assert [one.resource for one in fenced_store.protected(dsn)] == ["public.orders"]


def test_operations_render_into_a_migration() -> None:
    fencing = FenceTableOp("orders", ["id"], strict=True, schema="shop")
    written = render_python_code(ops.UpgradeOps([fencing, fencing.reverse()]))
    given = "key=['id'], per='row', strict=True, warn_only=False, schema='shop', fences='fenced_store'"
    assert f"op.fence_table('orders', {given})" in written
    assert "op.unfence_table('orders', schema='shop', fences='fenced_store')" in written
    assert isinstance(fencing.reverse(), UnfenceTableOp)


@pytest.mark.second_stage
def test_autogenerate_finds_classes_whose_tables_have_no_fence(engine: Engine, owner: psycopg.Connection) -> None:
    """If migrations create the tables, only autogenerate can add the fence."""
    owner.execute('CREATE SCHEMA "shop floor"')

    def found() -> list[FenceTableOp]:
        with engine.connect() as connection:
            context = MigrationContext.configure(
                connection, opts={"include_object": include_object, "include_schemas": True}
            )
            made = produce_migrations(context, Base.metadata).upgrade_ops
            assert made is not None
            return [one for one in made.ops if isinstance(one, FenceTableOp)]

    one, other = sorted(found(), key=lambda op: op.table)
    assert (one.table, one.schema, one.strict, one.per) == ("Orders", "shop floor", True, "row")
    assert (other.table, other.per) == ("whole", "table")
    Base.metadata.create_all(engine)
    assert found() == []
    fenced_store.unprotect(engine, "whole")
    assert [op.table for op in found()] == ["whole"]
    Base.metadata.drop_all(engine)


def test_autogenerate_creates_a_table_before_it_fences_the_table(engine: Engine, owner: psycopg.Connection) -> None:
    owner.execute('CREATE SCHEMA "shop floor"')
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"include_schemas": True})
        found = produce_migrations(context, Base.metadata)
    assert found.upgrade_ops is not None
    assert found.downgrade_ops is not None
    for operations, first, then in (
        (found.upgrade_ops.ops, ops.CreateTableOp, FenceTableOp),
        (found.downgrade_ops.ops, UnfenceTableOp, ops.DropTableOp),
    ):
        kinds = [type(one) for one in operations]
        assert max(n for n, kind in enumerate(kinds) if kind is first) < kinds.index(then)
    # What `alembic check` lists.
    assert ("fence_table", "whole", None) in found.upgrade_ops.as_diffs()


@pytest.mark.parametrize("options", [{"strickt": True}, {"strict": "yes"}, {"key": 5}, {"key": []}], ids=repr)
def test_invalid_options_of_the_mixin_are_refused(options: dict[str, Any]) -> None:
    class Other(DeclarativeBase):
        pass

    with pytest.raises(fenced_store.InvalidArgument):
        type(
            "Wrong",
            (FencedMixin, Other),
            {"__tablename__": "wrong", "__fence__": options, "id": Column(Integer, primary_key=True)},
        )


def test_translate_errors_refuses_a_dsn_and_does_not_show_it() -> None:
    with pytest.raises(fenced_store.InvalidArgument) as caught:
        fenced_store.translate_errors("postgresql://me:secret@host/db")  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)
