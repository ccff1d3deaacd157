"""Settings of a database or a role that must change nothing: DateStyle, encodings, isolation."""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql
from sqlalchemy import URL, create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import fenced_store
from fenced_store import (
    FencedStore,
    InvalidArgument,
    StaleTokenError,
    TransactionConflict,
    WriteTimeout,
    _calls,
    fence,
)
from fenced_store import (
    store as store_module,
)
from tests.fenced_store.postgres.conftest import Stores, url
from tests.support.sessions import Sessions
from tests.support.stages import first


def alter_database(owner: psycopg.Connection, setting: str) -> None:
    """Change a default of the database, for the sessions that begin later."""
    name = sql.Identifier(owner.info.dbname)
    owner.execute(sql.SQL("ALTER DATABASE {} SET {}").format(name, sql.SQL(setting)))


@pytest.mark.parametrize("style", first(1, ["German", "SQL, DMY", "Postgres"]))
async def test_datestyle_of_the_database_changes_nothing(
    stores: Stores, owner: psycopg.Connection, dsn: str, style: str
) -> None:
    alter_database(owner, f"DateStyle = '{style}'")
    alter_database(owner, "TimeZone = 'Asia/Kolkata'")
    store = stores()
    stored = await store.put("k", 1, fence=5)
    assert (await store.get("k")).stored_at == stored.stored_at
    assert [one.stored_at for one in await store.history("k")] == [stored.stored_at]
    assert abs((stored.stored_at - datetime.now(timezone.utc)).total_seconds()) < 60
    with pytest.raises(StaleTokenError) as refused:
        await store.put("k", 2, fence=4)
    assert refused.value.stored_at == stored.stored_at
    (rejection,) = fenced_store.rejections(dsn)
    assert rejection.stored_at == stored.stored_at
    assert rejection.rejected_at >= stored.stored_at
    with psycopg.connect(dsn) as connection, pytest.raises(StaleTokenError) as stale, fence(connection, "k", 3):
        pass
    assert stale.value.stored_at == stored.stored_at


@pytest.fixture(params=["SQL_ASCII", "LATIN1", "EUC_JP"])
def encoded_dsn(request: pytest.FixtureRequest, server: str) -> Iterator[str]:
    """A database with another encoding than UTF8."""
    name = f"dblock_encoded_{request.param.lower()}"
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)".encode())
        admin.execute(f"CREATE DATABASE {name} ENCODING '{request.param}' LOCALE 'C' TEMPLATE template0".encode())
        yield conninfo.make_conninfo(server, dbname=name)
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def test_encoding_of_the_database_changes_nothing_or_is_named_in_the_error(encoded_dsn: str) -> None:
    kept = {"sql_ascii": ["plain", "é", "日本", "emoji 😀"], "latin1": ["plain", "é"], "euc_jp": ["plain", "é", "日本"]}
    encoding = str(conninfo.conninfo_to_dict(encoded_dsn)["dbname"]).removeprefix("dblock_encoded_")
    fenced_store.install(encoded_dsn)
    with FencedStore(encoded_dsn) as store:
        for name in kept[encoding]:
            store.put(name, {"v": name}, fence=3)
            found = store.get(name)
            assert found is not None
            assert found.value == {"v": name}
        for name in set(kept["sql_ascii"]) - set(kept[encoding]):
            for call in (lambda: store.put(name, 1, fence=3), lambda: store.claim(name, fence=3)):  # noqa: B023
                with pytest.raises(InvalidArgument, match="encoding UTF8"):
                    call()
            with pytest.raises(InvalidArgument, match="encoding UTF8"):
                store.put("plain", {"v": name}, fence=3)


def test_name_outside_of_the_users_client_encoding_is_refused(dsn: str) -> None:
    engine = create_engine(url(conninfo.make_conninfo(dsn, client_encoding="LATIN1")))
    try:
        with pytest.raises(InvalidArgument, match="client_encoding=utf8"):
            FencedStore(engine).put("日本", 1, fence=3)
        with (
            Session(engine) as session,
            pytest.raises(InvalidArgument, match="client_encoding=utf8"),
            fence(session, "日本", 3),
        ):
            pass
    finally:
        engine.dispose()


STRICTER = ["repeatable read", "serializable"]

FAIL_IF_STRICT = """
    CREATE FUNCTION public.fail_if_strict() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF current_setting('transaction_isolation') <> 'read committed' THEN
            RAISE EXCEPTION 'could not serialize access' USING ERRCODE = 'serialization_failure';
        END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER strict BEFORE INSERT OR UPDATE ON fenced_store.fences
        FOR EACH ROW EXECUTE FUNCTION public.fail_if_strict()
"""


@pytest.mark.parametrize("isolation", STRICTER)
async def test_conflict_under_a_stricter_default_isolation_is_retried(
    stores: Stores, owner: psycopg.Connection, isolation: str
) -> None:
    alter_database(owner, f"default_transaction_isolation = '{isolation}'")
    owner.execute(FAIL_IF_STRICT)
    store = stores()
    assert (await store.put("k", 1, fence=5)).version == 1
    await store.delete("k", fence=5)
    await store.claim("k", "l", fence=6)


@pytest.mark.parametrize("isolation", STRICTER)
def test_writers_of_one_key_meet_no_error_of_the_driver(dsn: str, owner: psycopg.Connection, isolation: str) -> None:
    alter_database(owner, f"default_transaction_isolation = '{isolation}'")
    outcomes: collections.Counter[str] = collections.Counter()

    def work(store: FencedStore) -> None:
        for n in range(25):
            try:
                store.put("k", n, fence=n + 1)
                outcomes["stored"] += 1
            except Exception as error:
                outcomes[type(error).__name__] += 1

    with FencedStore(dsn, patience=60) as store:
        threads = [threading.Thread(target=work, args=(store,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert set(outcomes) <= {"stored", "StaleTokenError"}, outcomes


@pytest.mark.parametrize("isolation", STRICTER)
def test_fence_in_a_stricter_session_raises_a_conflict_that_can_be_retried(
    dsn: str, sessions: Sessions, isolation: str
) -> None:
    engine = create_engine(url(dsn), isolation_level=isolation.upper())
    with FencedStore(dsn) as store:
        store.put("ledger", 1, fence=5)
        try:
            with Session(engine) as session:
                session.connection().exec_driver_sql("SELECT 1 FROM pg_class LIMIT 1")
                store.put("ledger", 2, fence=6)
                with pytest.raises(TransactionConflict) as caught, fence(session, "ledger", 7):
                    pass
                assert (caught.value.resource, caught.value.sqlstate) == ("ledger", "40001")
                assert isinstance(caught.value.__cause__.orig, psycopg.errors.SerializationFailure)  # type: ignore[union-attr]
                session.rollback()
                with fence(session, "ledger", 7):
                    pass
                session.commit()
        finally:
            engine.dispose()


async def test_write_behind_an_open_fence_times_out_and_stores_nothing(
    stores: Stores, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (_calls, store_module):  # it may be slow to connect and to reply
        monkeypatch.setattr(module, "REPLY_MARGIN", 20.0)
    store = stores(patience=0.3)
    await store.put("ledger", 1, fence=5)
    with psycopg.connect(dsn) as holder, fence(holder, "ledger", 6):
        with pytest.raises(WriteTimeout) as caught:
            await store.put("ledger", 2, fence=7)
        assert (caught.value.key, caught.value.patience) == ("ledger", 0.3)
        assert isinstance(caught.value, TimeoutError)
    assert (await store.get("ledger")).value == 1
    await store.put("ledger", 2, fence=7)


@pytest.mark.parametrize("patience", [0, -1, True, "5", float("nan"), 86_400])
def test_invalid_patience_is_refused(patience: Any) -> None:
    with pytest.raises(InvalidArgument, match="patience"):
        FencedStore("host=/nowhere", patience=patience)


async def test_administration_by_an_async_engine_uses_the_database_of_the_engine(dsn: str, bare_dsn: str) -> None:
    """The URL alone may lead to another database, as another role, or nowhere."""
    given = conninfo.conninfo_to_dict(dsn)
    elsewhere = URL.create("postgresql+psycopg", query={k: str(v) for k, v in given.items()} | {"dbname": "nowhere"})
    engine = create_async_engine(elsewhere, connect_args={"dbname": given["dbname"], "prepare_threshold": None})
    assert fenced_store.high_water(engine) == 0

    async def connect() -> Any:
        return await psycopg.AsyncConnection.connect(bare_dsn)

    own = create_async_engine("postgresql+psycopg://", async_creator=connect)
    with pytest.raises(InvalidArgument, match="way of its own"):
        fenced_store.install(own)
    for each in (engine, own):
        await each.dispose()


@pytest.mark.parametrize("isolation", STRICTER)
async def test_claim_is_never_stricter_than_read_committed(
    stores: Stores, owner: psycopg.Connection, isolation: str
) -> None:
    """A stricter claim would not see a table that was protected while it waited."""
    alter_database(owner, f"default_transaction_isolation = '{isolation}'")
    owner.execute(
        """
        CREATE TABLE public.seen (isolation text);
        CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO public.seen VALUES (current_setting('transaction_isolation'));
            RETURN NEW;
        END $$;
        CREATE TRIGGER note BEFORE INSERT OR UPDATE ON fenced_store.fences FOR EACH ROW EXECUTE FUNCTION public.note()
        """
    )
    await stores().claim("k", fence=6)
    assert owner.execute("SELECT isolation FROM public.seen").fetchall() == [("read committed",)]
