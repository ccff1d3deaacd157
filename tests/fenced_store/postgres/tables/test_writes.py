"""Protected tables: raw SQL of every kind is refused if its transaction carries a stale token, or none if strict."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import fenced_store
from fenced_store import protect
from tests.fenced_store.postgres.tables.conftest import PER, WRITES, carrying, refused
from tests.support.stages import first


@PER
@pytest.mark.parametrize("statement", WRITES)
def test_every_kind_of_write_is_refused_only_when_stale(
    dsn: str, owner: psycopg.Connection, per: Any, statement: str
) -> None:
    if statement.startswith("MERGE") and owner.info.server_version < 150000:
        pytest.skip("MERGE came with Postgres 15")
    protect(dsn, "orders", per=per)
    carrying(owner, 8, "UPDATE orders SET v = 'new'")
    resource = "public.orders" if per == "table" or "TRUNCATE" in statement else "public.orders:"
    if statement == WRITES[0] and per == "row":
        # A row that never existed has a fence only if the table has one.
        assert carrying(owner, 7, statement) == 1
        return
    error = refused(owner, 7, statement)
    assert f"'{resource}" in str(error)
    assert owner.execute("SELECT v FROM orders").fetchall() == [("new",), ("new",)]
    carrying(owner, 8, statement)
    carrying(owner, 9, "INSERT INTO orders VALUES (9, 'by the next')")


@PER
def test_copy_is_refused_when_stale(dsn: str, owner: psycopg.Connection, per: Any) -> None:
    protect(dsn, "orders", per=per, strict=True)
    with pytest.raises(psycopg.Error) as caught, owner.cursor().copy("COPY orders (id, v) FROM STDIN") as copy:
        copy.write_row((7, "x"))
    assert caught.value.sqlstate == "FEN02"


@PER
@pytest.mark.parametrize("statement", WRITES[:4])
def test_strict_table_refuses_a_transaction_without_a_token(
    dsn: str, owner: psycopg.Connection, per: Any, statement: str
) -> None:
    protect(dsn, "orders", per=per)
    carrying(owner, None, "UPDATE orders SET v = 'unfenced'")
    protect(dsn, "orders", per=per, strict=True)
    refused(owner, None, statement, state="FEN02")
    refused(owner, "", statement, state="FEN02")
    carrying(owner, 1, statement)


@PER
@pytest.mark.parametrize(
    "bad", first(3, ["0", "9223372036854775808", "'; DROP TABLE orders; --", "abc", "-1", "1.5", " 7", "1" * 30])
)
def test_invalid_token_raises_its_own_error(dsn: str, owner: psycopg.Connection, per: Any, bad: str) -> None:
    protect(dsn, "orders", per=per)
    assert "fenced_store.token" in str(refused(owner, bad, WRITES[1], state="FEN03"))
    carrying(owner, 2**63 - 1, WRITES[1])


def test_rows_of_different_locks_are_independent(dsn: str, owner: psycopg.Connection) -> None:
    protect(dsn, "orders")
    carrying(owner, 8, "UPDATE orders SET v = 'by 8' WHERE id = 1")
    carrying(owner, 7, "UPDATE orders SET v = 'by 7' WHERE id = 2")
    refused(owner, 7, "UPDATE orders SET v = 'both'")
    assert owner.execute("SELECT v, fence_token FROM orders ORDER BY id").fetchall() == [("by 8", 8), ("by 7", 7)]


def test_deleted_row_keeps_its_fence(dsn: str, owner: psycopg.Connection) -> None:
    protect(dsn, "orders")
    carrying(owner, 8, "DELETE FROM orders WHERE id = 1")
    assert "backend" in str(refused(owner, 7, "INSERT INTO orders VALUES (1, 'risen')").diag.message_detail)
    carrying(owner, 8, "INSERT INTO orders VALUES (1, 'again')")
    carrying(owner, None, "DELETE FROM orders WHERE id = 1")
    refused(owner, 7, "INSERT INTO orders VALUES (1, 'risen')")
    carrying(owner, 5, "INSERT INTO orders VALUES (3, 'new')")


def test_row_that_changes_its_key_meets_the_fence_of_its_new_key(dsn: str, owner: psycopg.Connection) -> None:
    protect(dsn, "orders")
    carrying(owner, 8, "UPDATE orders SET id = 5 WHERE id = 1")
    refused(owner, 7, "INSERT INTO orders VALUES (1, 'in its old place')")
    refused(owner, 7, "UPDATE orders SET v = 'x' WHERE id = 5")
    carrying(owner, 9, "DELETE FROM orders WHERE id = 5")
    refused(owner, 8, "UPDATE orders SET id = 5 WHERE id = 2")


def test_truncate_checks_claims_and_fences_of_deleted_rows(
    dsn: str, owner: psycopg.Connection, store: fenced_store.FencedStore
) -> None:
    made = protect(dsn, "orders")
    store.claim(made.row(7), fence=9)
    refused(owner, 8, "TRUNCATE orders")
    carrying(owner, 10, "INSERT INTO orders VALUES (8, 'x')", "DELETE FROM orders WHERE id = 8")
    refused(owner, 9, "TRUNCATE orders")


@pytest.mark.parametrize("warn_only", [False, True])
def test_truncate_without_a_token_lowers_no_fence(dsn: str, owner: psycopg.Connection, warn_only: bool) -> None:
    protect(dsn, "orders", warn_only=warn_only)
    carrying(owner, 9, "UPDATE orders SET v = 'x' WHERE id = 1")
    carrying(owner, 4 if warn_only else None, "TRUNCATE orders")
    protect(dsn, "orders")
    refused(owner, 8, "INSERT INTO orders VALUES (1, 'risen')")


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_truncate_needs_read_committed(dsn: str, owner: psycopg.Connection, isolation: str) -> None:
    protect(dsn, "orders")
    owner.execute(f"SET default_transaction_isolation = '{isolation}'".encode())
    refused(owner, 9, "TRUNCATE orders", state="0A000")


def test_truncated_table_keeps_its_fence(dsn: str, owner: psycopg.Connection) -> None:
    protect(dsn, "orders")
    carrying(owner, 8, "UPDATE orders SET v = 'new' WHERE id = 2")
    refused(owner, 7, "TRUNCATE orders")
    carrying(owner, 8, "TRUNCATE orders")
    refused(owner, 7, "INSERT INTO orders VALUES (1, 'risen')")
    carrying(owner, 8, "INSERT INTO orders VALUES (1, 'again')")


def test_lower_fence_of_a_deleted_row_lowers_no_claim(
    dsn: str, owner: psycopg.Connection, store: fenced_store.FencedStore
) -> None:
    made = protect(dsn, "orders")
    carrying(owner, 5, "UPDATE orders SET v = 'x' WHERE id = 1")
    store.claim(made.row(1), fence=9)
    carrying(owner, None, "DELETE FROM orders WHERE id = 1")
    refused(owner, 8, "INSERT INTO orders VALUES (1, 'risen')")
    owner.execute("UPDATE fenced_store.fences SET stored_at = '2020-01-01'")
    owner.execute("SELECT fenced_store.purge_deleted_fences('1 day')")
    refused(owner, 8, "INSERT INTO orders VALUES (1, 'risen')")


def test_row_inserted_again_without_a_token_keeps_its_old_fence(dsn: str, owner: psycopg.Connection) -> None:
    protect(dsn, "orders")
    carrying(owner, 9, "DELETE FROM orders WHERE id = 1")
    carrying(owner, None, "INSERT INTO orders VALUES (1, 'again')")
    assert owner.execute("SELECT fence_token FROM orders WHERE id = 1").fetchone() == (9,)


def test_fence_columns_cannot_be_written_by_hand(dsn: str, owner: psycopg.Connection) -> None:
    protect(dsn, "orders")
    carrying(owner, 8, "UPDATE orders SET v = 'new' WHERE id = 1")
    carrying(owner, None, "UPDATE orders SET fence_token = 1, fence_at = NULL WHERE id = 1")
    carrying(owner, 8, "UPDATE orders SET fence_token = 1 WHERE id = 1")
    refused(owner, 7, "UPDATE orders SET v = 'stale' WHERE id = 1")
    carrying(owner, None, "INSERT INTO orders (id, fence_token) VALUES (3, 99)")
    carrying(owner, 8, "UPDATE orders SET v = 'x' WHERE id = 3")


@PER
def test_claim_refuses_stale_writers_before_the_first_write(
    dsn: str, owner: psycopg.Connection, store: fenced_store.FencedStore, per: Any
) -> None:
    made = protect(dsn, "orders", per=per)
    store.claim(made.row(1) if per == "row" else made.resource, fence=8)
    refused(owner, 7, "UPDATE orders SET v = 'stale' WHERE id = 1")
    refused(owner, 7, "DELETE FROM orders WHERE id = 1")
    if per == "row":
        carrying(owner, 7, "UPDATE orders SET v = 'another lock' WHERE id = 2")
        store.claim(made.row(3), fence=8)
        refused(owner, 7, "INSERT INTO orders VALUES (3, 'stale')")
        store.claim(made.resource, fence=9)
        refused(owner, 8, "UPDATE orders SET v = 'x' WHERE id = 2")
    carrying(owner, 9, "UPDATE orders SET v = 'new'")


@PER
def test_warn_only_table_refuses_nothing_and_records_everything(dsn: str, owner: psycopg.Connection, per: Any) -> None:
    protect(dsn, "orders", per=per, strict=True, warn_only=True)
    told: list[str] = []
    owner.add_notice_handler(lambda notice: told.append(notice.message_primary or ""))
    carrying(owner, 8, "UPDATE orders SET v = 'new'")
    assert told == []
    carrying(owner, 7, "UPDATE orders SET v = 'stale' WHERE id = 1")
    carrying(owner, None, "DELETE FROM orders WHERE id = 2")
    assert owner.execute("SELECT v FROM orders").fetchall() == [("stale",)]
    assert [("token 7" in one, "no fencing token" in one) for one in told] == [(True, False), (False, True)]
    noted = fenced_store.rejections(dsn)
    assert [(one.offered, one.stored, one.refused) for one in noted] == [(None, None, False), (7, 8, False)]
    protect(dsn, "orders", per=per)
    refused(owner, 7, "UPDATE orders SET v = 'stale' WHERE id = 1")
