"""Fences on tables: raw SQL of every kind is refused if its transaction carries a stale token, or none if strict."""

from __future__ import annotations

import datetime
import decimal
import ipaddress
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql
from sqlalchemy import MetaData, Table

import fenced_store
from fenced_store import FencedStoreError, InvalidArgument, NotInstalled, protect, protected, unprotect

PER = pytest.mark.parametrize("per", ["row", "table"])


@pytest.fixture(autouse=True)
def orders(owner: psycopg.Connection) -> None:
    owner.execute("SET search_path TO public")
    owner.execute("CREATE TABLE orders (id int PRIMARY KEY, v text)")
    owner.execute("INSERT INTO orders VALUES (1, 'a'), (2, 'b')")


def carrying(owner: psycopg.Connection, token: object, *statements: str) -> int:
    """Run statements in a transaction that carries a token; return the row count of the last one."""
    with owner.transaction():
        if token is not None:
            owner.execute("SELECT set_config('fenced_store.token', %s, true)", [str(token)])
        for statement in statements:
            count = owner.execute(statement.encode()).rowcount
    return count


def refused(owner: psycopg.Connection, token: object, *statements: str, state: str = "FEN01") -> psycopg.Error:
    with pytest.raises(psycopg.Error) as caught:
        carrying(owner, token, *statements)
    assert caught.value.sqlstate == state, caught.value
    return caught.value


WRITES = [
    "INSERT INTO orders VALUES (3, 'c')",
    "UPDATE orders SET v = 'x' WHERE id = 1",
    "DELETE FROM orders WHERE id = 1",
    "TRUNCATE orders",
    "INSERT INTO orders VALUES (1, 'c') ON CONFLICT (id) DO UPDATE SET v = excluded.v",
    "WITH gone AS (DELETE FROM orders RETURNING *) SELECT count(*) FROM gone",
    "MERGE INTO orders USING (VALUES (1)) AS s (id) ON orders.id = s.id WHEN MATCHED THEN UPDATE SET v = 'm'",
]


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
    "bad", ["abc", "-1", "0", "1.5", " 7", "9223372036854775808", "1" * 30, "'; DROP TABLE orders; --"]
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


def test_row_resources_match_keys_of_all_types(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute(
        "CREATE TABLE many (a text, b timestamptz, c bytea, d uuid, e date, f numeric, v int,"
        " PRIMARY KEY (b, a, c, d, e, f))"
    )
    made = protect(dsn, "many")
    assert made.key == ("b", "a", "c", "d", "e", "f")
    row = (
        "('x,\\y', '2026-01-02 03:04:05+00', '\\x00ff', '00000000-0000-0000-0000-000000000001', '2026-01-02', 1.50, 1)"
    )
    carrying(owner, 8, f"INSERT INTO many VALUES {row}", "DELETE FROM many")
    # The resource of a row does not depend on how the session prints its key.
    for setting in ("TimeZone = 'Asia/Tokyo'", "DateStyle = 'German'", "bytea_output = 'escape'"):
        refused(owner, 7, f"SET LOCAL {setting}", f"INSERT INTO many VALUES {row}")
    key = ("2026-01-02T03:04:05", "x,\\y", "00ff", "00000000-0000-0000-0000-000000000001", "2026-01-02", "1.5")
    assert owner.execute("SELECT token FROM fenced_store.fences WHERE resource = %s", [made.row(*key)]).fetchone() == (
        8,
    )


def test_similar_keys_have_different_fences(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("CREATE TABLE pairs (a text, b text, v int, PRIMARY KEY (b, a))")
    protect(dsn, "pairs", key=["a", "b"])
    for a, b in (("x,y", "z"), ("x\\", ",z"), ("\\N", "z"), ("", ",")):
        owner.execute("INSERT INTO pairs VALUES (%s, %s)", [a, b])
    carrying(owner, 8, "DELETE FROM pairs")
    for a, b in (("x", "y,z"), ("x\\,", "z"), ("N", "z"), (",", ""), ("", "")):
        with owner.transaction():
            owner.execute("SELECT set_config('fenced_store.token', '7', true)")
            owner.execute("INSERT INTO pairs VALUES (%s, %s)", [a, b])
    refused(owner, 7, "INSERT INTO pairs VALUES ('x,y', 'z')")


def test_long_key_shares_no_fence_with_a_short_key(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("CREATE TABLE long (id text PRIMARY KEY)")
    made = protect(dsn, "long")
    carrying(owner, 8, "INSERT INTO long VALUES (repeat('ü', 1000))", "DELETE FROM long")
    refused(owner, 7, "INSERT INTO long VALUES (repeat('ü', 1000))")
    carrying(owner, 7, "INSERT INTO long VALUES (repeat('ü', 999))")
    (resource,) = owner.execute("SELECT max(resource) FROM fenced_store.fences").fetchone()  # type: ignore[misc]
    assert resource == made.row("ü" * 1000)
    assert made.row(resource.split(":", 1)[1]) != resource


EQUALS = {
    "numeric": ("1.0", "1.00"),
    "timestamptz": ("'2026-01-02 12:00+00'", "'2026-01-02 13:00+01'"),
    "bpchar": ("'a'", "'a '"),
    "varchar": ("'a'", "'a'"),
    "date": ("'2026-01-02'", "'Jan 2 2026'"),
    "bytea": ("'\\x61'", "'a'"),
    "uuid": ("'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'", "'{a0eebc999c0b4ef8bb6d6bb9bd380a11}'"),
    "bool": ("true", "'yes'"),
    "mood": ("'fine'", "'fine'"),
    "positive": ("7.0", "7.00"),
}


@pytest.mark.parametrize("kind", EQUALS)
def test_equal_keys_have_one_fence(dsn: str, owner: psycopg.Connection, kind: str) -> None:
    owner.execute("CREATE TYPE mood AS ENUM ('fine')")
    owner.execute("CREATE DOMAIN positive AS numeric CHECK (VALUE > 0)")
    owner.execute(f"CREATE TABLE keyed (id {kind} PRIMARY KEY)".encode())
    protect(dsn, "keyed")
    one, other = EQUALS[kind]
    carrying(owner, 8, f"INSERT INTO keyed VALUES ({one})", "DELETE FROM keyed")
    refused(owner, 7, f"INSERT INTO keyed VALUES ({other})")


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ("id float8 PRIMARY KEY", "double precision may not look the same"),
        ("id interval PRIMARY KEY", "interval may not"),
        ("id timestamptz[] PRIMARY KEY", "may not look the same"),
        ("id text COLLATE either PRIMARY KEY", "text may not"),
        ("id int GENERATED ALWAYS AS (v) STORED, PRIMARY KEY (id)", "it is generated"),
        ("id int UNIQUE", "it may be NULL"),
        ("id int NOT NULL", "No unique index"),
        ("id int NOT NULL UNIQUE DEFERRABLE", "No unique index"),
    ],
)
def test_columns_that_cannot_identify_rows_are_refused_as_key(
    dsn: str, owner: psycopg.Connection, column: str, said: str
) -> None:
    if "COLLATE" in column:
        try:
            owner.execute("CREATE COLLATION either (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
        except psycopg.errors.FeatureNotSupported:
            pytest.skip("this server has no ICU, and so no such collation")
    owner.execute(f"CREATE TABLE keyed (v int, {column})".encode())
    with pytest.raises(InvalidArgument, match=said):
        protect(dsn, "keyed", key="id")
    protect(dsn, "keyed", per="table")


def test_tables_that_inherit_are_refused(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("CREATE TABLE child () INHERITS (orders)")
    for table in ("orders", "child"):
        with pytest.raises(InvalidArgument, match="inherit"):
            protect(dsn, table, per="table")


@PER
def test_partitioned_table_is_protected_with_all_partitions(
    dsn: str, owner: psycopg.Connection, store: fenced_store.FencedStore, per: Any
) -> None:
    owner.execute("CREATE TABLE parts (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)")
    owner.execute("CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (10)")
    made = protect(dsn, "parts", per=per)
    owner.execute("CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM (10) TO (20)")
    carrying(owner, 8, "INSERT INTO parts VALUES (1, 'a'), (11, 'b')")
    for statement in (
        "UPDATE parts SET v = 'x' WHERE id = 1",
        "UPDATE parts_1 SET v = 'x'",
        "UPDATE parts_2 SET v = 'x'",
        "DELETE FROM parts_2",
        "TRUNCATE parts",
        "TRUNCATE parts_1",
        "UPDATE parts SET id = 15 WHERE id = 1",
    ):
        refused(owner, 7, statement)
    assert [one.resource for one in protected(dsn)] == ["public.parts"]
    carrying(owner, 9, "UPDATE parts SET id = 15 WHERE id = 1")
    if per == "row":
        refused(owner, 8, "INSERT INTO parts VALUES (1, 'risen')")
    with pytest.raises(InvalidArgument, match="is a partition"):
        protect(dsn, "parts_1")
    store.claim(made.resource, fence=10)
    refused(owner, 9, "INSERT INTO parts_2 VALUES (12, 'x')")
    unprotect(dsn, "parts")
    carrying(owner, 1, "TRUNCATE parts_1", "DELETE FROM parts")
    assert owner.execute("SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'zz_fenced%'").fetchone() == (0,)


@pytest.mark.parametrize(
    "name",
    [
        "Orders",
        'a"b',
        "a.b",
        "x; DROP TABLE orders",
        "%s :x %(y)s",
        "ünï\N{SNOWMAN}",
        " ",
        "'",
        "$body$",
        "x" * 63,
        "<table>",
        "ROW.x",
    ],
    ids=ascii,
)
@PER
def test_table_with_any_name_can_be_protected(dsn: str, owner: psycopg.Connection, name: str, per: Any) -> None:
    """The table, its schema and its key all have that name."""
    it = sql.Identifier(name, name)
    owner.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
    owner.execute(sql.SQL("CREATE TABLE {} ({} text PRIMARY KEY, v int)").format(it, sql.Identifier(name)))
    table = Table(name, MetaData(), schema=name)
    made = protect(dsn, table, per=per)
    assert made.key == ((name,) if per == "row" else ())
    assert protected(dsn) == [made]
    insert = sql.SQL("INSERT INTO {} VALUES ('k', 1)").format(it)
    carrying(owner, 8, insert.as_string(owner))
    refused(owner, 7, sql.SQL("UPDATE {} SET v = 2").format(it).as_string(owner))
    quoted = sql.SQL("{}").format(it).as_string(owner)
    assert protect(dsn, quoted, per=per, strict=True).strict
    unprotect(dsn, table)
    assert protected(dsn) == []
    assert owner.execute("SELECT count(*) FROM public.orders").fetchone() == (2,)


@pytest.mark.parametrize(
    ("table", "options", "said"),
    [
        ("nowhere", {}, "There is no table 'nowhere'"),
        ('a"b.c.d', {}, "There is no table"),
        ("x; DROP TABLE orders", {}, "There is no table"),
        ("", {}, "table's name"),
        ("a\0b", {}, "NUL"),
        ("x" * 10_240, {}, "table's name"),
        (42, {}, "table's name"),
        ("orders", {"key": "nothing"}, "has no column 'nothing'"),
        ("orders", {"key": []}, "the name of a column, or a list of names"),
        ("orders", {"key": 5}, "the name of a column, or a list of names"),
        ("orders", {"key": "a\0"}, "NUL"),
        ("orders", {"key": "x" * 64}, "column's name"),
        ("orders", {"key": "fence_token"}, "has no column"),
        ("orders", {"per": "page"}, "per row or per table"),
        ("orders", {"per": "table", "key": "id"}, "takes a key"),
        ("orders", {"strict": "yes"}, "strict is True or False"),
        ("seen", {}, "is not a table"),
        ("heap", {}, "has no primary key"),
        ("taken", {}, "of another type"),
        ("fenced_store.fences", {}, "belongs to Postgres or to fenced_store"),
        ("pg_catalog.pg_class", {}, "belongs to Postgres or to fenced_store"),
    ],
    ids=ascii,
)
def test_invalid_protection_is_refused_and_changes_nothing(
    dsn: str, owner: psycopg.Connection, table: Any, options: Any, said: str
) -> None:
    owner.execute("CREATE VIEW seen AS SELECT * FROM orders")
    owner.execute("CREATE TABLE heap (v int)")
    owner.execute("CREATE TABLE taken (id int PRIMARY KEY, fence_token text)")
    with pytest.raises(InvalidArgument, match=said):
        protect(dsn, table, **options)
    assert protected(dsn) == []
    assert carrying(owner, None, "UPDATE orders SET v = 'untouched'") == 2


def test_protect_waits_briefly_for_a_busy_table(
    dsn: str, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fenced_store.tables, "LOCK_TIMEOUT", 0.2)
    with psycopg.connect(dsn) as busy:
        busy.execute("UPDATE orders SET v = 'x'")
        with pytest.raises(FencedStoreError, match="could not be locked within"):
            protect(dsn, "orders")
    protect(dsn, "orders")


def test_highest_token_survives_unprotect_and_a_change_of_kind(dsn: str, owner: psycopg.Connection) -> None:
    protect(dsn, "orders")
    carrying(owner, 8, "UPDATE orders SET v = 'new'")
    protect(dsn, "orders", strict=True)
    refused(owner, 7, WRITES[1])
    protect(dsn, "orders", per="table")
    refused(owner, 7, WRITES[1])
    assert "fence_token" not in {column.name for column in owner.execute("SELECT * FROM orders").description or ()}
    carrying(owner, 9, WRITES[1])
    unprotect(dsn, "orders")
    carrying(owner, None, WRITES[1])
    protect(dsn, "orders")
    carrying(owner, 12, "DELETE FROM orders WHERE id = 1")
    protect(dsn, "orders", per="table")
    refused(owner, 11, "INSERT INTO orders VALUES (1, 'risen')")
    owner.execute("INSERT INTO orders VALUES (1, 'again')")
    unprotect(dsn, "orders")
    protect(dsn, "orders")
    refused(owner, 11, WRITES[1])
    unprotect(dsn, "orders")
    with pytest.raises(InvalidArgument, match="not protected"):
        unprotect(dsn, "orders")
    leftovers = owner.execute("SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace").fetchall()
    assert leftovers == []


def test_recreated_table_can_be_protected_again(dsn: str, owner: psycopg.Connection) -> None:
    protect(dsn, "orders")
    carrying(owner, 8, WRITES[2])
    owner.execute("DROP TABLE orders")
    assert protected(dsn) == []
    owner.execute("CREATE TABLE orders (id text PRIMARY KEY, v text)")
    protect(dsn, "orders")
    refused(owner, 7, "INSERT INTO orders VALUES ('1', 'risen')")
    carrying(owner, 8, "INSERT INTO orders VALUES ('1', 'x')")


def test_renamed_table_keeps_its_fence_and_its_resource(dsn: str, owner: psycopg.Connection) -> None:
    protect(dsn, "orders")
    carrying(owner, 8, "UPDATE orders SET v = 'x' WHERE id = 1", "DELETE FROM orders WHERE id = 2")
    owner.execute("ALTER TABLE orders RENAME TO renamed")
    refused(owner, 7, "INSERT INTO renamed VALUES (2, 'risen')")
    refused(owner, 7, "TRUNCATE renamed")
    assert protect(dsn, "renamed", strict=True).resource == "public.orders"
    owner.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    with pytest.raises(InvalidArgument, match="still that of the fence of table public.renamed"):
        protect(dsn, "orders")
    refused(owner, 7, "INSERT INTO renamed VALUES (2, 'risen')")
    unprotect(dsn, "renamed")
    assert protect(dsn, "orders").resource == "public.orders"


def test_detached_partition_does_not_hinder_protect_and_unprotect(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    owner.execute("CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (10)")
    protect(dsn, "parts")
    owner.execute("ALTER TABLE parts DETACH PARTITION parts_1")
    assert [one.resource for one in protected(dsn)] == ["public.parts"]
    protect(dsn, "parts", strict=True)
    unprotect(dsn, "parts")
    assert owner.execute("SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'zz_fenced%'").fetchone() == (0,)


def test_foreign_triggers_that_imitate_a_fence_are_not_listed(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("CREATE FUNCTION fake() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
    owner.execute("CREATE TABLE bait (fence_token bigint)")
    owner.execute("INSERT INTO bait VALUES (9223372036854775807)")
    for name, event in (("zz_fenced_store", "INSERT"), ("zz_fenced_store_truncate", "TRUNCATE")):
        owner.execute(
            f"CREATE TRIGGER {name} BEFORE {event} ON bait FOR EACH STATEMENT"
            " EXECUTE FUNCTION fake('public.orders', 'nope', 'f', 'row', 'id')".encode()
        )
    assert protected(dsn) == []
    assert fenced_store.high_water(dsn) == 0
    protect(dsn, "orders")


def test_high_water_is_the_highest_token_of_all_fences(
    dsn: str, owner: psycopg.Connection, store: fenced_store.FencedStore
) -> None:
    assert fenced_store.high_water(dsn) == 0
    store.put("k", 1, fence=3)
    assert fenced_store.high_water(dsn) == 3
    protect(dsn, "orders")
    carrying(owner, 8, WRITES[1])
    assert fenced_store.high_water(dsn) == 8
    store.claim("l", fence=11)
    assert fenced_store.high_water(dsn) == 11


def test_writer_of_a_table_needs_no_privileges_on_fences(dsn: str, owner: psycopg.Connection, role: str) -> None:
    """The writer cannot bypass fences either: not with its own search_path, nor by calling the trigger's functions."""
    protect(dsn, "orders")
    carrying(owner, 8, "UPDATE orders SET v = 'new'")
    owner.execute(sql.SQL("GRANT SELECT, INSERT, UPDATE, DELETE ON orders TO {}").format(sql.Identifier(role)))
    with psycopg.connect(conninfo.make_conninfo(dsn, user=role, password="app"), autocommit=True) as app:
        app.execute("CREATE TEMP TABLE fences (resource text, token bigint)")
        app.execute("SET search_path TO pg_temp, public, pg_catalog")
        refused(app, 7, "UPDATE public.orders SET v = 'stale'")
        carrying(app, 8, "UPDATE public.orders SET v = 'mine'")
        (guard,) = owner.execute(
            "SELECT tgfoid::regproc::text FROM pg_trigger WHERE tgname = 'zz_fenced_store'"
        ).fetchone()  # type: ignore[misc]
        for statement in (
            f"SELECT {guard}()",
            "SELECT fenced_store.guard_row('a', 'b', 0, NULL, false, false)",
            "SELECT fenced_store.preserve_fence('public.orders:1', 99)",
            "ALTER TABLE orders DISABLE TRIGGER zz_fenced_store",
            "DROP TRIGGER zz_fenced_store ON orders",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                app.execute(statement.encode())


@pytest.fixture
def hostile(dsn: str, owner: psycopg.Connection, role: str) -> Iterator[psycopg.Connection]:
    """A session of a role that owns a table, and whose code runs wherever a value of its own type is cast."""
    owner.execute(sql.SQL("CREATE SCHEMA {0} AUTHORIZATION {0}").format(sql.Identifier(role)))
    owner.execute("CREATE TABLE called (by_whom text)")
    owner.execute("GRANT ALL ON called TO PUBLIC")
    fenced_store.grant(dsn, role)
    with psycopg.connect(conninfo.make_conninfo(dsn, user=role, password="app"), autocommit=True) as session:
        session.execute(f"SET search_path TO {role}".encode())
        session.execute("CREATE TYPE e AS ENUM ('a')")
        for kind, value in (("text", "'a'"), ("json", "'1'"), ("bigint", "1")):
            session.execute(
                f"CREATE FUNCTION evil_{kind}(e) RETURNS {kind} LANGUAGE plpgsql AS $$ BEGIN"
                f" INSERT INTO public.called VALUES (current_user); RETURN {value}; END $$".encode()
            )
            session.execute(f"CREATE CAST (e AS {kind}) WITH FUNCTION evil_{kind}(e) AS ASSIGNMENT".encode())
        session.execute("CREATE TABLE mine (id e PRIMARY KEY)")
        yield session


def test_trigger_runs_no_code_of_the_table_owner(
    dsn: str, owner: psycopg.Connection, hostile: psycopg.Connection, role: str
) -> None:
    """The trigger runs with the privileges of the role that set up fenced_store, which may be a superuser."""
    protect(dsn, f"{role}.mine")
    carrying(hostile, 8, "INSERT INTO mine VALUES ('a')", "UPDATE mine SET id = 'a'", "DELETE FROM mine")
    refused(hostile, 7, "INSERT INTO mine VALUES ('a')")
    carrying(hostile, 9, "TRUNCATE mine")
    assert owner.execute("SELECT count(*) FROM called").fetchone() == (0,)
    (guard,) = owner.execute("SELECT tgfoid::regproc::text FROM pg_trigger WHERE tgname = 'zz_fenced_store'").fetchone()  # type: ignore[misc]
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        hostile.execute(f"CREATE OR REPLACE FUNCTION {guard}() RETURNS trigger LANGUAGE plpgsql AS ''".encode())
    assert owner.execute("SELECT proacl FROM pg_proc WHERE oid = %s::regproc", [guard]).fetchone() != (None,)


def test_trigger_runs_no_code_of_a_domain(
    dsn: str, owner: psycopg.Connection, hostile: psycopg.Connection, role: str
) -> None:
    """Assigning a value to a domain runs code of the domain's owner."""
    protect(dsn, f"{role}.mine")
    hostile.execute(
        "CREATE FUNCTION look(bigint) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN"
        " INSERT INTO public.called VALUES (current_user); RETURN true; END $$"
    )
    hostile.execute("CREATE DOMAIN looked AS bigint CHECK (look(VALUE))")
    hostile.execute("ALTER TABLE mine ALTER fence_token DROP DEFAULT, ALTER fence_token TYPE looked")
    owner.execute("TRUNCATE called")
    for statement in ("INSERT INTO mine (id, fence_token) VALUES ('a', 0)", "INSERT INTO mine VALUES ('a', NULL)"):
        with pytest.raises(psycopg.Error):
            carrying(hostile, 8, statement)
    by_whom = {who for (who,) in owner.execute("SELECT by_whom FROM called").fetchall()}
    assert by_whom <= {role}, "only as itself, by its own statement"


def test_guard_of_a_table_cannot_be_replaced_by_another_role(
    dsn: str, owner: psycopg.Connection, hostile: psycopg.Connection, store: fenced_store.FencedStore
) -> None:
    made = protect(dsn, "orders")
    store.claim(made.row(1), fence=9)
    for key in ("{v}", "{}"):
        hostile.execute("SELECT fenced_store.create_guard('public.orders', %s)", [key])
        refused(owner, 8, "UPDATE orders SET v = 'stale' WHERE id = 1")
    carrying(owner, 9, "UPDATE orders SET v = 'x' WHERE id = 1")


def test_new_key_starts_above_every_token_seen(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("CREATE TABLE two (id int PRIMARY KEY, k int NOT NULL UNIQUE)")
    protect(dsn, "two")
    carrying(owner, 9, "INSERT INTO two VALUES (2, 12)", "DELETE FROM two")
    protect(dsn, "two", key="k")
    refused(owner, 8, "INSERT INTO two VALUES (2, 12)")


def test_renamed_and_reprotected_table_starts_above_every_token_seen(
    dsn: str, owner: psycopg.Connection, store: fenced_store.FencedStore
) -> None:
    store.claim(protect(dsn, "orders").resource, fence=9)
    owner.execute("ALTER TABLE orders RENAME TO renamed")
    unprotect(dsn, "renamed")
    protect(dsn, "renamed")
    refused(owner, 8, "UPDATE renamed SET v = 'stale'")


def test_timestamps_as_keys_do_not_depend_on_datestyle(
    dsn: str, owner: psycopg.Connection, store: fenced_store.FencedStore
) -> None:
    owner.execute("CREATE TABLE moments (id timestamptz PRIMARY KEY)")
    made = protect(dsn, "moments")
    store.claim(made.row(datetime.datetime(2014, 10, 25, 21, 30, tzinfo=datetime.timezone.utc)), fence=9)
    settings = ("SET LOCAL TimeZone = 'Europe/Moscow'", "SET LOCAL DateStyle = 'SQL'")
    refused(owner, 8, *settings, "INSERT INTO moments VALUES ('2014-10-25T21:30Z')")
    carrying(owner, 8, *settings, "INSERT INTO moments VALUES ('2014-10-25T22:30Z')")


@pytest.mark.parametrize("act", ["high_water", "unprotect", "protect"])
def test_administration_runs_no_code_of_the_table_owner(
    dsn: str, owner: psycopg.Connection, hostile: psycopg.Connection, role: str, act: str
) -> None:
    protect(dsn, f"{role}.mine")
    carrying(hostile, 8, "INSERT INTO mine VALUES ('a')")
    hostile.execute("ALTER TABLE mine ALTER fence_token DROP DEFAULT, ALTER fence_token TYPE e USING 'a'")
    acts: dict[str, Callable[[], object]] = {
        "high_water": lambda: fenced_store.high_water(dsn),
        "unprotect": lambda: unprotect(dsn, f"{role}.mine"),
        "protect": lambda: protect(dsn, f"{role}.mine", per="table"),
    }
    with pytest.raises(Exception, match="belongs to role"):
        acts[act]()
    assert owner.execute("SELECT count(*) FROM called").fetchone() == (0,)


def test_only_the_owner_decides_how_a_table_is_protected(
    dsn: str, owner: psycopg.Connection, hostile: psycopg.Connection
) -> None:
    made = protect(dsn, "orders", strict=True)
    for call in ("record_unprotection('public.orders')", "unprotect_table('public.orders')"):
        with pytest.raises(psycopg.Error):
            hostile.execute(f"SELECT fenced_store.{call}".encode())
    hostile.execute("SELECT fenced_store.record_protection('public.orders')")
    assert protected(dsn) == [made]
    # A trigger that pretends to be the fence of another table.
    hostile.execute("CREATE TABLE bait (id int PRIMARY KEY)")
    hostile.execute(
        "CREATE TRIGGER zz_fenced_store BEFORE INSERT ON bait EXECUTE FUNCTION"
        " fenced_store.guard_table_trigger('public.other', 'f', 'f', 'f')"
    )
    with pytest.raises(psycopg.Error, match="no fence that could be recorded"):
        hostile.execute("SELECT fenced_store.record_protection('bait')")


def test_table_with_a_new_owner_stays_protected(
    dsn: str, owner: psycopg.Connection, hostile: psycopg.Connection, role: str
) -> None:
    protect(dsn, "orders")
    owner.execute(sql.SQL("ALTER TABLE orders OWNER TO {}").format(sql.Identifier(role)))
    carrying(hostile, 8, "UPDATE public.orders SET v = 'x'")
    refused(hostile, 7, "UPDATE public.orders SET v = 'x'")
    unprotect(conninfo.make_conninfo(dsn, user=role, password="app"), "orders")
    assert protected(dsn) == []


def test_policies_that_hide_rows_hide_no_tokens(dsn: str, owner: psycopg.Connection, role: str) -> None:
    """A role that cannot see every row gets an error, and is not accepted."""
    fenced_store.grant(dsn, role)
    protect(dsn, "orders")
    carrying(owner, 8, "UPDATE orders SET v = 'x'")
    it = sql.Identifier(role)
    owner.execute(sql.SQL("ALTER TABLE orders OWNER TO {}").format(it))
    owner.execute("ALTER TABLE orders ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
    app = conninfo.make_conninfo(dsn, user=role, password="app")
    with psycopg.connect(app, autocommit=True) as connection:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
            carrying(connection, 7, "TRUNCATE orders")
        with pytest.raises(FencedStoreError, match="row-level security"):
            unprotect(app, "orders")
    with pytest.raises(fenced_store.AccessDenied, match="Connect as that role"):
        fenced_store.high_water(dsn)


def test_columns_from_before_the_fence_stay(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("ALTER TABLE orders ADD fence_token bigint NOT NULL DEFAULT 0, ADD fence_at timestamptz")
    protect(dsn, "orders")
    protect(dsn, "orders", strict=True)
    carrying(owner, 8, WRITES[1])
    unprotect(dsn, "orders")
    assert owner.execute("SELECT fence_token FROM orders WHERE id = 1").fetchone() == (8,)
    owner.execute("ALTER TABLE orders DROP fence_token, DROP fence_at")
    owner.execute("ALTER TABLE orders ADD fence_token bigint GENERATED ALWAYS AS (0) STORED, ADD fence_at timestamptz")
    with pytest.raises(InvalidArgument, match="of another type"):
        protect(dsn, "orders")


def test_disabled_fence_is_listed_as_disabled(dsn: str, owner: psycopg.Connection) -> None:
    assert protect(dsn, "orders").enabled
    owner.execute("ALTER TABLE orders DISABLE TRIGGER zz_fenced_store")
    assert [one.enabled for one in protected(dsn)] == [False]


def test_second_fenced_store_is_refused_on_a_protected_table(dsn: str) -> None:
    fenced_store.install(dsn, "other")
    protect(dsn, "orders")
    with pytest.raises(InvalidArgument, match="by a fenced_store in another schema"):
        protect(dsn, "orders", schema="other")


def test_row_that_moves_to_another_partition_keeps_its_fence(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("CREATE TABLE parts (id int PRIMARY KEY, v text) PARTITION BY LIST (id)")
    for part in (1, 2):
        owner.execute(f"CREATE TABLE parts_{part} PARTITION OF parts FOR VALUES IN ({part})".encode())
    protect(dsn, "parts")
    carrying(owner, 9, "INSERT INTO parts VALUES (1, 'x')")
    carrying(owner, None, "UPDATE parts SET id = 2")
    refused(owner, 8, "UPDATE parts SET v = 'stale'")


ROWS = {
    "bool": (True, "true"),
    "timestamptz": (
        datetime.datetime(2026, 1, 2, 3, 4, 5, 120000, tzinfo=datetime.timezone.utc),
        "'2026-01-02 04:04:05.12+01'",
    ),
    "timestamp": (datetime.datetime(2026, 1, 2, 3, 4, 5), "'2026-01-02 03:04:05'"),
    "date": (datetime.date(2026, 1, 2), "'2026-01-02'"),
    "time": (datetime.time(3, 4, 5, 500000), "'03:04:05.5'"),
    "numeric": (decimal.Decimal("-1.50"), "-1.5"),
    "numeric ": (decimal.Decimal("1E+3"), "1000.00"),
    "numeric  ": (decimal.Decimal("0.00"), "0"),
    "bytea": (b"\x01\xff", "'\\x01ff'"),
    "uuid": (uuid.UUID("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"), "'A0EEBC999C0B4EF8BB6D6BB9BD380A11'"),
    "int": (-7, "-7"),
    "text": ("", "''"),
    "char(5)": ("ab", "'ab'"),
    "inet": (ipaddress.ip_address("10.0.0.1"), "'10.0.0.1/32'"),
}


@pytest.mark.parametrize("kind", ROWS)
def test_row_is_claimed_by_the_value_of_its_key(
    dsn: str, owner: psycopg.Connection, store: fenced_store.FencedStore, kind: str
) -> None:
    value, literal = ROWS[kind]
    owner.execute(f"CREATE TABLE keyed (id {kind} PRIMARY KEY)".encode())
    made = protect(dsn, "keyed")
    store.claim(made.row(value), fence=9)
    refused(owner, 8, f"INSERT INTO keyed VALUES ({literal})")


@pytest.mark.parametrize(
    "value", [1.5, None, [1], object(), decimal.Decimal("NaN"), "nul\0"], ids=lambda value: type(value).__name__
)
def test_value_that_cannot_be_a_key_names_no_row(value: Any) -> None:
    with pytest.raises(InvalidArgument):
        fenced_store.row("public.orders", value)


def test_trigger_calls_no_function_of_the_writers_search_path(dsn: str, owner: psycopg.Connection, role: str) -> None:
    protect(dsn, "orders")
    it = sql.Identifier(role)
    owner.execute(sql.SQL("GRANT ALL ON orders TO {}").format(it))
    owner.execute(sql.SQL("CREATE SCHEMA {0} AUTHORIZATION {0}").format(it))
    owner.execute("CREATE TABLE called (by_whom text)")
    owner.execute("GRANT ALL ON called TO PUBLIC")
    with psycopg.connect(conninfo.make_conninfo(dsn, user=role, password="app"), autocommit=True) as app:
        for signature in ("clock_timestamp() RETURNS timestamptz", "hashtext(text) RETURNS integer"):
            result = signature.split()[-1]
            app.execute(
                f"CREATE FUNCTION {role}.{signature} LANGUAGE plpgsql AS $$ BEGIN"
                " INSERT INTO public.called VALUES (current_user);"
                f" RETURN {'now()' if 'stamp' in result else 1}; END $$".encode()
            )
        app.execute(f"SET search_path TO {role}, public, pg_catalog".encode())
        app.execute("SELECT clock_timestamp()")
        carrying(app, 8, "UPDATE public.orders SET v = 'x'", "DELETE FROM public.orders")
    assert owner.execute("SELECT by_whom FROM called").fetchall() == [(role,)], "only its own call"


def test_owner_without_the_grant_gets_access_denied(dsn: str, owner: psycopg.Connection, role: str) -> None:
    owner.execute(sql.SQL("CREATE SCHEMA {0} AUTHORIZATION {0}").format(sql.Identifier(role)))
    app = conninfo.make_conninfo(dsn, user=role, password="app")
    with psycopg.connect(app, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE TABLE {}.mine (id int PRIMARY KEY)").format(sql.Identifier(role)))
        with pytest.raises(Exception, match="permission denied"):
            protect(app, f"{role}.mine")
        fenced_store.grant(dsn, role)
        with pytest.raises(FencedStoreError, match="must also own the table"):
            protect(app, "orders")
        made = protect(app, f"{role}.mine")
        carrying(connection, 8, f"INSERT INTO {role}.mine VALUES (1)")
        refused(connection, 7, f"DELETE FROM {role}.mine")
        assert made.resource == f"{role}.mine"


def test_old_fences_of_deleted_rows_can_be_purged(
    dsn: str, owner: psycopg.Connection, store: fenced_store.FencedStore
) -> None:
    protect(dsn, "orders")
    carrying(owner, 8, "DELETE FROM orders")
    store.claim("claimed", fence=8)
    assert owner.execute("SELECT fenced_store.purge_deleted_fences('1 day')").fetchone() == (0,)
    owner.execute("UPDATE fenced_store.fences SET stored_at = stored_at - interval '2 days'")
    assert owner.execute("SELECT fenced_store.purge_deleted_fences('1 day')").fetchone() == (2,)
    left = owner.execute("SELECT resource FROM fenced_store.fences ORDER BY resource").fetchall()
    assert left == [("claimed",), ("public.orders",)]
    with pytest.raises(psycopg.Error, match="at least a day"):
        owner.execute("SELECT fenced_store.purge_deleted_fences('1 hour')")


def test_missing_schema_names_the_command_to_run(bare_dsn: str) -> None:
    for call in (
        lambda: protect(bare_dsn, "orders"),
        lambda: unprotect(bare_dsn, "orders"),
        lambda: protected(bare_dsn),
        lambda: fenced_store.rejections(bare_dsn),
        lambda: fenced_store.high_water(bare_dsn),
        lambda: fenced_store.uninstall(bare_dsn),
    ):
        with pytest.raises(NotInstalled):
            call()
