"""prove_fenced: it lists the statements of an unsafe function, and passes a safe one."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine

import dblock
import fenced_store
from dblock.testing import Report, prove_fenced

pytestmark = [pytest.mark.second_stage]

COUNT = "UPDATE accounts SET balance = balance + 10 WHERE id = 1"


@pytest.fixture
def bank(dsn: str) -> str:
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint, changed timestamptz)")
        connection.execute("CREATE TABLE entries (id bigint GENERATED ALWAYS AS IDENTITY, amount bigint, token bigint)")
        connection.execute("INSERT INTO accounts VALUES (1, 100, now()), (2, 0, now())")
    return dsn


def rows(dsn: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute("SELECT id, balance FROM accounts ORDER BY id").fetchall()


def unsafe_statements(report: Report) -> list[str]:
    return [one.statement.text for one in report.unsafe]


def plain_update(dsn: str) -> None:
    with dblock.Client(dsn) as client, client.lock("bank"), psycopg.connect(dsn) as connection:
        (balance,) = connection.execute("SELECT balance FROM accounts WHERE id = 1").fetchone() or (0,)
        connection.execute("UPDATE accounts SET balance = %s WHERE id = 1", [balance + 10])  # the unsafe line


def test_plain_update_under_a_lock_is_listed(bank: str) -> None:
    report = prove_fenced(plain_update, dsn=bank)
    assert not report.safe
    (update,) = [one for one in report.unsafe if one.statement.text.startswith("UPDATE")]
    source = Path(__file__).read_text().splitlines()
    assert update.statement.location is not None
    assert source[update.statement.location.line - 1].endswith("# the unsafe line")
    assert re.search('serial runs leave .*"balance": 120.*these two left .*"balance": 110', update.difference)
    assert "is not fenced" in str(report)
    assert f"test_prove_fenced.py:{update.statement.location.line} in plain_update" in str(report)
    assert rows(bank) == [(1, 100), (2, 0)]


def same_values(lease: dblock.Lease, connection: psycopg.Connection[Any]) -> None:
    lease.raise_if_lost()
    connection.execute("UPDATE accounts SET balance = 7 WHERE id = 1")


def test_write_of_the_same_values_is_listed(bank: str) -> None:
    report = prove_fenced(same_values, dsn=bank)
    # At its COMMIT the first holder has the row locked, so the second one comes after it.
    assert [text.split()[0] for text in unsafe_statements(report)] == ["BEGIN", "UPDATE"]
    assert "wrote the same values again" in str(report)


def checked_between(lease: dblock.Lease, connection: psycopg.Connection[Any]) -> None:
    connection.autocommit = True
    lease.raise_if_lost()
    connection.execute("UPDATE accounts SET balance = balance + 10 WHERE id = 1")
    lease.raise_if_lost()
    connection.execute("UPDATE accounts SET balance = balance - 10 WHERE id = 2")


def test_check_before_each_statement_does_not_make_it_safe(bank: str) -> None:
    report = prove_fenced(checked_between, dsn=bank)
    assert len(report.statements) == len(report.unsafe) == 2
    # After its pause the first holder finds its lease lost at its next check, so it does not send the second statement.
    assert '"id": 1' in report.unsafe[0].difference
    assert '"id": 2' not in report.unsafe[0].difference


def asserted_in_transaction(lease: dblock.Lease, connection: psycopg.Connection[Any]) -> None:
    with connection.transaction():
        lease.assert_held(connection)
        (balance,) = connection.execute("SELECT balance FROM accounts WHERE id = 1").fetchone() or (0,)
        connection.execute("UPDATE accounts SET balance = %s, changed = clock_timestamp() WHERE id = 1", [balance + 10])
        connection.execute("INSERT INTO entries (amount, token) VALUES (10, %s)", [lease.token])


def test_lease_that_is_proved_in_the_transaction_is_safe(bank: str) -> None:
    report = prove_fenced(asserted_in_transaction, dsn=bank)
    assert report.safe, str(report)
    assert len(report.statements) >= 6
    assert "is fenced" in str(report)


def checked_before_the_commit(lease: dblock.Lease, connection: psycopg.Connection[Any]) -> None:
    with connection.transaction():
        lease.assert_held(connection)
        connection.execute(COUNT)
        lease.raise_if_lost()


def test_holder_that_rolls_back_after_its_loss_is_safe(bank: str) -> None:
    report = prove_fenced(checked_before_the_commit, dsn=bank)
    assert report.safe, str(report)


def proved_too_early(lease: dblock.Lease, connection: psycopg.Connection[Any]) -> None:
    with connection.transaction():
        lease.assert_held(connection)
    with connection.transaction():
        connection.execute(COUNT)


def test_proof_in_another_transaction_is_listed(bank: str) -> None:
    assert COUNT in unsafe_statements(prove_fenced(proved_too_early, dsn=bank))


def fenced(lease: dblock.Lease, connection: psycopg.Connection[Any]) -> None:
    with connection.transaction(), fenced_store.fence(connection, "bank", lease):
        connection.execute(COUNT)
        connection.execute("INSERT INTO entries (amount, token) VALUES (10, %s)", [lease.token])


def test_fence_in_the_transaction_is_safe(bank: str) -> None:
    report = prove_fenced(fenced, dsn=bank)
    assert report.safe, str(report)


def protected(client: dblock.Client, engine: Engine) -> None:
    with (
        client.lock("bank") as lease,
        engine.begin() as connection,
        fenced_store.fence(connection, "public.accounts", lease),
    ):
        connection.execute(text(COUNT))


def test_protected_table_is_safe_with_an_engine(bank: str) -> None:
    fenced_store.protect(bank, "accounts", per="table")
    report = prove_fenced(protected, dsn=bank)
    assert report.safe, str(report)
    assert rows(bank) == [(1, 100), (2, 0)]


def lost_update_behind_a_row_lock(lease: dblock.Lease, connection: psycopg.Connection[Any]) -> None:
    # The row lock makes the second holder wait, but it has read the balance before.
    (balance,) = connection.execute("SELECT balance FROM accounts WHERE id = 1").fetchone() or (0,)
    connection.execute("UPDATE accounts SET balance = %s WHERE id = 1", [balance + 10])
    connection.execute("INSERT INTO entries (amount) VALUES (10)")


def test_update_that_is_lost_behind_a_row_lock_is_listed(bank: str) -> None:
    report = prove_fenced(lost_update_behind_a_row_lock, dsn=bank)
    listed = unsafe_statements(report)
    assert "COMMIT" in listed
    (commit,) = [one for one in report.unsafe if one.statement.text == "COMMIT"]
    assert '"balance": 120' in commit.difference


async def unsafe_async(lease: dblock.AsyncLease, engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.execute(text(COUNT))  # the unsafe async line


async def safe_async(client: dblock.AsyncClient, connection: psycopg.AsyncConnection[Any]) -> None:
    async with client.lock("bank") as lease, connection.transaction():
        await lease.assert_held(connection)
        await connection.execute(COUNT)


def test_asynchronous_functions_are_proved_too(bank: str) -> None:
    report = prove_fenced(unsafe_async, dsn=bank)
    # All but the COMMIT, at which the row is locked. The cancellation of the body does not make the others safe.
    assert [one.number for one in report.unsafe] == list(range(1, len(report.statements)))
    (update,) = [one for one in report.unsafe if one.statement.text.startswith("UPDATE")]
    source = Path(__file__).read_text().splitlines()
    assert update.statement.location is not None
    assert source[update.statement.location.line - 1].endswith("# the unsafe async line")
    safe = prove_fenced(safe_async, dsn=bank)
    assert safe.safe, str(safe)


def with_an_amount(connection: psycopg.Connection[Any], lease: dblock.Lease, amount: int) -> None:
    connection.execute("UPDATE accounts SET balance = balance + %s", [amount])


def test_other_parameters_are_bound_with_partial(bank: str) -> None:
    assert not prove_fenced(functools.partial(with_an_amount, amount=3), dsn=bank).safe
    with pytest.raises(dblock.InvalidArgument, match="cannot give the parameter 'amount'"):
        prove_fenced(with_an_amount, dsn=bank)
    with pytest.raises(dblock.InvalidArgument, match="takes none of dsn, client"):
        prove_fenced(lambda: None, dsn=bank)


def test_failure_of_the_function_itself_is_raised(bank: str) -> None:
    def fails(connection: psycopg.Connection[Any]) -> None:
        connection.execute("SELECT 1 / 0")

    with pytest.raises(psycopg.errors.DivisionByZero):
        prove_fenced(fails, dsn=bank)


def fenced_entry_and_plain_update(lease: dblock.Lease, connection: psycopg.Connection[Any]) -> None:
    with connection.transaction():
        lease.assert_held(connection)
        connection.execute("INSERT INTO entries (amount) VALUES (10)")
    connection.execute(COUNT)


def test_table_and_columns_that_are_not_compared_do_not_count(bank: str) -> None:
    assert not prove_fenced(fenced_entry_and_plain_update, dsn=bank).safe
    report = prove_fenced(fenced_entry_and_plain_update, dsn=bank, tables=["entries"])
    assert report.safe, str(report)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tables": ["nothing"]}, "no table 'nothing' in this database. It has: .*public.accounts"),
        ({"tables": "accounts"}, r"tables=\['accounts'\]; got 'accounts'"),
        ({"ignore": "changed"}, r"ignore=\['changed'\]; got 'changed'"),
        ({"ignore": ["accounts.changed"]}, "No table has a column 'accounts.changed'"),
        ({"dsn": 5}, "a DSN as text, such as that of dblock_dsn; got 5"),
    ],
)
def test_wrong_option_is_refused(bank: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(dblock.InvalidArgument, match=says):
        prove_fenced(plain_update, **{"dsn": bank, **options})


def test_function_that_shows_the_proof_nothing_is_refused(bank: str) -> None:
    def has_its_own_connection(client: dblock.Client) -> None:
        with psycopg.connect(bank) as connection:
            connection.execute(COUNT)

    def only_reads(connection: psycopg.Connection[Any]) -> None:
        connection.execute("SELECT balance FROM accounts")

    with pytest.raises(dblock.DblockError, match="sent no statement .* a connection of its own"):
        prove_fenced(has_its_own_connection, dsn=bank)
    with pytest.raises(dblock.DblockError, match="changed no row of the tables that are compared"):
        prove_fenced(only_reads, dsn=bank)
    with pytest.raises(dblock.DblockError, match="changed no row of the tables that are compared"):
        prove_fenced(plain_update, dsn=bank, tables=["entries"])


def over_an_engine(lease: dblock.Lease, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text(COUNT))


async def over_an_async_engine(lease: dblock.AsyncLease, engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.execute(text(COUNT))


@pytest.mark.parametrize("function", [over_an_engine, over_an_async_engine])
def test_statements_of_an_engine_are_those_of_the_function_alone(bank: str, function: Any) -> None:
    report = prove_fenced(function, dsn=bank)
    assert [one.text for one in report.statements] == ["BEGIN", COUNT, "COMMIT"]
    assert unsafe_statements(report) == ["BEGIN", COUNT]
    assert str(report).endswith("or write through a fence of fenced_store.")


def test_proof_works_over_tcp_and_with_a_password(tcp_dsn: str) -> None:
    with psycopg.connect(tcp_dsn) as connection:
        connection.execute("CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint, changed timestamptz)")
        connection.execute("INSERT INTO accounts VALUES (1, 100, now())")
    assert not prove_fenced(same_values, dsn=tcp_dsn).safe


def test_nothing_of_the_proof_stays_in_the_database(bank: str) -> None:
    prove_fenced(same_values, dsn=bank)
    with psycopg.connect(bank) as connection:
        schemas = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'dblock%'").fetchall()
        held = connection.execute("SELECT count(*) FROM dblock.list_locks()").fetchone()
    assert schemas == [("dblock",)]
    assert held == (0,)
