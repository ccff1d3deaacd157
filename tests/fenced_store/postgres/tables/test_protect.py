"""Protected tables: protecting, changing and unprotecting a table, and what survives that."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import MetaData, Table

import fenced_store
from fenced_store import FencedStoreError, InvalidArgument, NotInstalled, protect, protected, unprotect
from tests.fenced_store.postgres.tables.conftest import PER, WRITES, carrying, refused
from tests.support.stages import first


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
    first(
        3,
        [
            "Orders",
            'a"b',
            "x; DROP TABLE orders",
            "%s :x %(y)s",
            "x" * 63,
            "ünï\N{SNOWMAN}",
            "a.b",
            " ",
            "'",
            "$body$",
            "<table>",
            "ROW.x",
        ],
    ),
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


@pytest.mark.parametrize("argument", ["strict", "warn_only"])
def test_protection_that_is_neither_on_nor_off_is_refused(owner: psycopg.Connection, argument: str) -> None:
    owner.execute("CREATE TABLE public.things (id int PRIMARY KEY)")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="true or false, not NULL"):
        owner.execute(
            f"SELECT fenced_store.protect_table('public.things', per => 'table', {argument} => NULL)".encode()
        )


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


def test_renamed_and_reprotected_table_starts_above_every_token_seen(
    dsn: str, owner: psycopg.Connection, store: fenced_store.FencedStore
) -> None:
    store.claim(protect(dsn, "orders").resource, fence=9)
    owner.execute("ALTER TABLE orders RENAME TO renamed")
    unprotect(dsn, "renamed")
    protect(dsn, "renamed")
    refused(owner, 8, "UPDATE renamed SET v = 'stale'")


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
