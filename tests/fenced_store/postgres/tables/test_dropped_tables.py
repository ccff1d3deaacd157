"""A dropped table leaves gates behind. They are purged, unless a transaction or a new table of that name uses them."""

from __future__ import annotations

import time
from typing import Any

import psycopg
import pytest

from fenced_store import FencedStore, protect, protected
from tests.fenced_store.postgres.tables.conftest import PER, carrying, refused
from tests.support.sessions import Sessions

PURGE = "SELECT fenced_store.purge_dropped_tables()"


def leftovers(owner: psycopg.Connection) -> tuple[int, int, int]:
    """Return how many gates, functions made for a table, and records of tables there are."""
    found = owner.execute(
        "SELECT (SELECT count(*) FROM pg_class WHERE relnamespace = n.oid AND relname LIKE 'gate\\_%'),"
        " (SELECT count(*) FROM pg_proc WHERE pronamespace = n.oid AND proname ~ '^(pass_gate|guard)_[0-9a-f]{20,}$'),"
        " (SELECT count(*) FROM fenced_store.protections) FROM pg_namespace AS n WHERE n.nspname = 'fenced_store'"
    ).fetchone()
    assert found
    return found


def purge(owner: psycopg.Connection) -> int:
    found = owner.execute(PURGE).fetchone()
    assert found
    return int(found[0])


@pytest.fixture
def dropped(dsn: str, owner: psycopg.Connection) -> None:
    """The remains of table orders. Token 8 has written to it."""
    protect(dsn, "orders")
    carrying(owner, 8, "DELETE FROM orders")
    owner.execute("DROP TABLE orders")


def create(owner: psycopg.Connection) -> None:
    owner.execute("CREATE TABLE orders (id int PRIMARY KEY, v text)")


@pytest.mark.parametrize("statement", [PURGE, "SELECT fenced_store.purge_deleted_fences('1 day')"])
def test_remains_of_a_dropped_table_are_purged_and_its_tokens_stay(
    dsn: str, owner: psycopg.Connection, dropped: None, statement: str
) -> None:
    assert leftovers(owner) == (33, 2, 1)
    owner.execute(statement.encode())
    assert leftovers(owner) == (0, 0, 0)
    assert purge(owner) == 0
    create(owner)
    protect(dsn, "orders")
    refused(owner, 7, "INSERT INTO orders VALUES (1, 'risen')")
    carrying(owner, 8, "INSERT INTO orders VALUES (1, 'x')")


def test_only_remains_are_purged(dsn: str, owner: psycopg.Connection) -> None:
    for name in ("first", "second", "whole"):
        owner.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)".encode())
        protect(dsn, name, per="table" if name == "whole" else "row")
    owner.execute("ALTER TABLE second RENAME TO renamed")
    owner.execute("DROP TABLE first, whole")
    assert purge(owner) == 2
    assert leftovers(owner) == (33, 2, 1)
    assert [found.resource for found in protected(dsn)] == ["public.second"]
    carrying(owner, 8, "INSERT INTO renamed VALUES (1, 'x')")
    refused(owner, 7, "UPDATE renamed SET v = 'stale'")


def test_purge_ends_after_no_more_tables_than_its_batch(dsn: str, owner: psycopg.Connection) -> None:
    for name in ("first", "second"):
        owner.execute(f"CREATE TABLE {name} (id int PRIMARY KEY)".encode())
        protect(dsn, name)
    owner.execute("DROP TABLE first, second")
    calls = [owner.execute("SELECT fenced_store.purge_dropped_tables(1)").fetchone() for _ in range(3)]
    assert calls == [(1,), (1,), (0,)]


def test_purge_leaves_a_new_table_that_is_being_protected(
    owner: psycopg.Connection, dropped: None, sessions: Sessions
) -> None:
    create(owner)
    protecting = sessions.open()
    protecting.do("BEGIN")
    protecting.do("SELECT fenced_store.protect_table('public.orders')")
    assert purge(owner) == 0
    protecting.do("COMMIT")
    assert purge(owner) == 0
    assert leftovers(owner) == (33, 2, 1)
    carrying(owner, 8, "INSERT INTO orders VALUES (1, 'x')")
    refused(owner, 7, "INSERT INTO orders VALUES (2, 'stale')")


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_protect_of_a_new_table_waits_for_a_purge_in_progress(
    owner: psycopg.Connection, dropped: None, sessions: Sessions, end: str
) -> None:
    create(owner)
    purging, protecting = sessions.open(), sessions.open()
    purging.do("BEGIN")
    assert purging.do(PURGE) == (1,)
    waits = protecting.start("SELECT fenced_store.protect_table('public.orders')")
    protecting.wait_until_blocked()
    purging.do(end)
    assert waits.result(60) == ("public.orders",)
    assert leftovers(owner) == (33, 2, 1)
    carrying(owner, 8, "INSERT INTO orders VALUES (1, 'x')")
    refused(owner, 7, "INSERT INTO orders VALUES (2, 'stale')")
    assert purge(owner) == 0


@PER
def test_new_table_that_was_protected_after_the_purge_had_found_the_old_one_keeps_its_fence(
    dsn: str, owner: psycopg.Connection, dropped: None, sessions: Sessions, per: Any
) -> None:
    create(owner)
    gate = sessions.gate("INSERT", "fenced_store.fences")
    purging = sessions.open("held")
    waits = purging.start(PURGE)
    purging.wait_until_blocked()
    protection = protect(dsn, "orders", per=per)
    gate.open()
    assert waits.result(60) == (0,)
    assert leftovers(owner)[0] == (33 if per == "row" else 0)
    assert protected(dsn) == [protection]
    carrying(owner, 8, "INSERT INTO orders VALUES (1, 'x')")


def test_claim_of_the_dropped_table_and_purge_exclude_each_other(
    owner: psycopg.Connection, dropped: None, sessions: Sessions
) -> None:
    claiming, purging = sessions.open(), sessions.open()
    claiming.do("BEGIN")
    claiming.do("SELECT fenced_store.claim(ARRAY['public.orders:1'], 9)")
    assert purging.do(PURGE) == (0,)
    claiming.do("COMMIT")
    purging.do("BEGIN")
    assert purging.do(PURGE) == (1,)
    waits = claiming.start("SELECT fenced_store.claim(ARRAY['public.orders:1', 'public.orders'], 10)")
    claiming.wait_until_blocked()
    purging.do("COMMIT")
    waits.result(60)
    assert leftovers(owner) == (0, 0, 0)


def test_claim_with_a_snapshot_from_before_the_purge_conflicts(
    owner: psycopg.Connection, dropped: None, sessions: Sessions
) -> None:
    claiming = sessions.open()
    claiming.do("BEGIN ISOLATION LEVEL REPEATABLE READ")
    claiming.do("SELECT 1")
    assert purge(owner) == 1
    with pytest.raises(psycopg.errors.SerializationFailure):
        claiming.do("SELECT fenced_store.claim(ARRAY['public.orders:1'], 9)")


def test_purge_leaves_a_table_whose_drop_is_not_committed(
    dsn: str, owner: psycopg.Connection, sessions: Sessions
) -> None:
    protect(dsn, "orders")
    dropping = sessions.open()
    dropping.do("BEGIN")
    dropping.do("DROP TABLE public.orders")
    assert purge(owner) == 0
    dropping.do("ROLLBACK")
    carrying(owner, 8, "INSERT INTO orders VALUES (50, 'x')")


@pytest.mark.second_stage
def test_purge_does_not_wait_for_a_reader_of_the_gates(
    owner: psycopg.Connection, dropped: None, sessions: Sessions
) -> None:
    """A dump reads all tables, for as long as it takes."""
    dump = sessions.open()
    gate = owner.execute("SELECT fenced_store.gate_of('public.orders', 'public.orders:1')").fetchone()
    assert gate
    dump.do("BEGIN")
    dump.do(f"LOCK TABLE fenced_store.{gate[0]} IN ACCESS SHARE MODE")
    began = time.monotonic()
    assert purge(owner) == 0
    assert time.monotonic() - began < 5
    assert leftovers(owner) == (33, 2, 1)
    dump.do("COMMIT")
    assert purge(owner) == 1


def test_former_partition_keeps_the_gates_that_its_trigger_needs(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    owner.execute("CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (10)")
    protect(dsn, "parts")
    owner.execute("ALTER TABLE parts DETACH PARTITION parts_1")
    owner.execute("DROP TABLE parts")
    assert purge(owner) == 0
    owner.execute("TRUNCATE parts_1")
    owner.execute("DROP TABLE parts_1")
    assert purge(owner) == 1
    assert leftovers(owner) == (0, 0, 0)


def test_claim_after_the_purge_needs_no_gate(store: FencedStore, owner: psycopg.Connection, dropped: None) -> None:
    assert purge(owner) == 1
    store.claim("public.orders:1", "public.orders", fence=9)
