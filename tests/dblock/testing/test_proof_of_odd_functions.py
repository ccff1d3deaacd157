"""prove_fenced with functions and tables that are easy to judge wrongly."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import asyncpg  # type: ignore[import-untyped]
import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text

import dblock
from dblock.testing import prove_fenced

pytestmark = [pytest.mark.second_stage]

COUNT = "UPDATE accounts SET balance = balance + 10 WHERE id = 1"
COUNT_OTHER = "UPDATE accounts SET balance = balance + 10 WHERE id = 2"


@pytest.fixture
def bank(dsn: str) -> str:
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint)")
        connection.execute("INSERT INTO accounts VALUES (1, 100), (2, 0)")
    return dsn


@pytest.fixture
def database(bank: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(bank, autocommit=True) as connection:
        yield connection


def schemas(connection: psycopg.Connection[Any]) -> list[tuple[str]]:
    return connection.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'dblock_proof%'").fetchall()


def add_in_transaction(lease: dblock.Lease, connection: psycopg.Connection[Any]) -> None:
    with connection.transaction():
        lease.assert_held(connection)
        connection.execute(COUNT)


def test_function_that_keeps_something_from_run_to_run_is_refused(bank: str) -> None:
    done: list[bool] = []

    def once(lease: dblock.Lease, connection: psycopg.Connection[Any]) -> None:
        connection.execute("SELECT 1")
        if not done:
            done.append(True)
            connection.execute(COUNT)

    with pytest.raises(dblock.DblockError, match="keeps something from run to run"):
        prove_fenced(once, dsn=bank)


def test_function_that_creates_a_table_is_refused(bank: str, database: psycopg.Connection[Any]) -> None:
    def create(lease: dblock.Lease, connection: psycopg.Connection[Any]) -> None:
        connection.execute("CREATE TABLE IF NOT EXISTS reports (day date)")
        connection.execute("INSERT INTO reports VALUES (current_date)")

    with pytest.raises(dblock.DblockError, match='creates the table "public"."reports"'):
        prove_fenced(create, dsn=bank)
    database.execute("TRUNCATE reports")
    assert not prove_fenced(create, dsn=bank).safe


def test_write_before_another_grant_is_listed(bank: str) -> None:
    def two_locks(client: dblock.Client, connection: psycopg.Connection[Any]) -> None:
        first = client.lock("first").acquire()
        connection.execute(COUNT)
        connection.commit()
        first.release()  # False if it was lost
        with client.lock("second") as lease, connection.transaction():
            lease.assert_held(connection)
            connection.execute(COUNT_OTHER)

    report = prove_fenced(two_locks, dsn=bank)
    assert [one.statement.text for one in report.unsafe] == ["BEGIN", COUNT]
    assert '"balance": 110}; then the first one left {"id": 1, "balance": 120}' in str(report)


def test_transaction_that_is_older_than_another_grant_is_listed(bank: str) -> None:
    def one_transaction(client: dblock.Client, connection: psycopg.Connection[Any]) -> None:
        first = client.lock("first").acquire()
        connection.execute("INSERT INTO accounts SELECT max(id) + 1 FROM accounts")
        first.release()
        with client.lock("second"):
            connection.commit()

    report = prove_fenced(one_transaction, dsn=bank)
    assert [one.statement.text.split()[0] for one in report.unsafe][:2] == ["BEGIN", "INSERT"]
    assert "before it was granted a lock again" in str(report)


def test_write_before_the_first_grant_is_safe(bank: str) -> None:
    def count_calls(client: dblock.Client, connection: psycopg.Connection[Any]) -> None:
        connection.execute(COUNT_OTHER)
        connection.commit()
        with client.lock("bank") as lease, connection.transaction():
            lease.assert_held(connection)
            connection.execute(COUNT)

    report = prove_fenced(count_calls, dsn=bank)
    assert report.safe, str(report)


def test_sequence_of_no_column_starts_again_with_each_run(bank: str, database: psycopg.Connection[Any]) -> None:
    database.execute("CREATE SEQUENCE numbers")

    def number(lease: dblock.Lease, connection: psycopg.Connection[Any]) -> None:
        with connection.transaction():
            lease.assert_held(connection)
            connection.execute("INSERT INTO accounts VALUES (nextval('numbers') + 100, 0)")

    report = prove_fenced(number, dsn=bank)
    assert report.safe, str(report)
    assert database.execute("SELECT nextval('numbers')").fetchone() == (1,)


def test_rows_of_inherited_and_partitioned_tables_are_put_back(bank: str, database: psycopg.Connection[Any]) -> None:
    database.execute(
        "CREATE TABLE parent (number int); CREATE TABLE child () INHERITS (parent);"
        "INSERT INTO parent VALUES (1); INSERT INTO child VALUES (2);"
        "CREATE TABLE orders (id int PRIMARY KEY) PARTITION BY LIST (id);"
        "CREATE TABLE all_orders PARTITION OF orders DEFAULT;"
        "CREATE TABLE items (id int REFERENCES orders) PARTITION BY LIST (id);"
        "CREATE TABLE all_items PARTITION OF items DEFAULT; INSERT INTO orders VALUES (1); INSERT INTO items VALUES (1)"
    )
    assert prove_fenced(add_in_transaction, dsn=bank).safe
    assert database.execute("SELECT tableoid::regclass::text, number FROM parent ORDER BY 2").fetchall() == [
        ("parent", 1),
        ("child", 2),
    ]
    assert database.execute("SELECT id FROM items").fetchall() == [(1,)]


@pytest.mark.parametrize("driver", ["asyncpg", "sqlalchemy"])
def test_url_stays_a_url(bank: str, driver: str) -> None:
    async def with_asyncpg(lease: dblock.AsyncLease, dsn: str) -> None:
        connection = await asyncpg.connect(dsn)
        await connection.execute(COUNT)
        await connection.close()

    def with_an_engine(lease: dblock.Lease, dsn: str) -> None:
        engine = create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
        with engine.begin() as connection:
            connection.execute(text(COUNT))
        engine.dispose()

    given = psycopg.conninfo.conninfo_to_dict(bank)
    name, login = given.pop("dbname"), given.pop("user")
    url = f"postgresql://{login}@/{name}?{urlencode(given)}"
    function = with_asyncpg if driver == "asyncpg" else with_an_engine
    assert COUNT in [one.statement.text for one in prove_fenced(function, dsn=url).unsafe]


def test_statements_of_the_client_do_not_count_under_another_name(bank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGAPPNAME", "reports")

    def add(lease: dblock.Lease, connection: psycopg.Connection[Any]) -> None:
        connection.autocommit = True
        connection.execute(COUNT)

    assert [statement.text for statement in prove_fenced(add, dsn=bank).statements] == [COUNT]


def test_statements_of_a_session_that_is_named_dblock_count(bank: str) -> None:
    def add(lease: dblock.Lease, dsn: str) -> None:
        with psycopg.connect(dsn, application_name="dblock", autocommit=True) as connection:
            connection.execute(COUNT)

    assert [one.statement.text for one in prove_fenced(add, dsn=bank).unsafe] == [COUNT]


def test_statements_of_a_client_with_a_name_of_its_own_do_not_count(bank: str) -> None:
    def add(dsn: str, connection: psycopg.Connection[Any]) -> None:
        connection.autocommit = True
        with dblock.Client(psycopg.conninfo.make_conninfo(dsn, application_name="web")) as client, client.lock("a"):
            connection.execute(COUNT)

    assert [statement.text for statement in prove_fenced(add, dsn=bank).statements] == [COUNT]


def test_statements_of_a_client_of_an_engine_do_not_count(bank: str) -> None:
    def add(engine: Engine) -> None:
        with dblock.Client(engine) as client, client.lock("a"), engine.begin() as connection:
            connection.execute(text(COUNT))

    assert [statement.text for statement in prove_fenced(add, dsn=bank).statements] == ["BEGIN", COUNT, "COMMIT"]


def test_server_is_found_by_the_environment(bank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = psycopg.conninfo.conninfo_to_dict(bank)
    monkeypatch.setenv("PGHOST", str(given["host"]))
    monkeypatch.setenv("PGPORT", str(given.get("port") or 5432))
    report = prove_fenced(add_in_transaction, dsn=f"dbname={given['dbname']} user={given['user']}")
    assert report.safe, str(report)


def test_copies_are_dropped_if_the_rows_cannot_be_put_back(bank: str, database: psycopg.Connection[Any]) -> None:
    def reset() -> None:
        raise RuntimeError("not today")

    with pytest.raises(RuntimeError, match="not today"):
        prove_fenced(add_in_transaction, dsn=bank, reset=reset)
    assert schemas(database) == []


def test_second_holder_writes_nothing_after_a_proof_that_gave_up(bank: str, database: psycopg.Connection[Any]) -> None:
    inside, go_on, ended = threading.Lock(), threading.Event(), threading.Event()
    calls = []

    def one_at_a_time(lease: dblock.Lease, connection: psycopg.Connection[Any]) -> None:
        calls.append(True)
        second = len(calls) == 3  # after the undisturbed run, and the one that is frozen
        try:
            with inside:
                if second:
                    go_on.wait(60)
                connection.execute(COUNT)
                connection.commit()
        finally:
            if second:
                ended.set()

    with pytest.raises(dblock.DblockError, match="second holder did not return"):
        prove_fenced(one_at_a_time, dsn=bank, patience=5)
    go_on.set()
    assert ended.wait(30)
    assert database.execute("SELECT balance FROM accounts ORDER BY id").fetchall() == [(100,), (0,)]
