"""Settings of a session that must change nothing: neither the names of resources nor what a fence refuses."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import sql

import fenced_store
from fenced_store import protect, protected, unprotect
from tests.fenced_store.postgres.tables.conftest import carrying, refused

SETTINGS = [("standard_conforming_strings", "off"), ("quote_all_identifiers", "on")]


@pytest.fixture(params=SETTINGS, ids=[name for name, _ in SETTINGS])
def changed(request: pytest.FixtureRequest, owner: psycopg.Connection) -> psycopg.Connection:
    """Change a setting for every new session of the database, and for the owner's."""
    name, value = request.param
    owner.execute("SET client_min_messages = error")
    owner.execute(
        sql.SQL("ALTER DATABASE {} SET {} TO {}").format(
            sql.Identifier(owner.info.dbname), sql.SQL(name), sql.SQL(value)
        )
    )
    owner.execute(sql.SQL("SET {} TO {}").format(sql.SQL(name), sql.SQL(value)))
    return owner


def test_text_keys_are_fenced_whatever_the_settings(dsn: str, changed: psycopg.Connection) -> None:
    changed.execute("CREATE TABLE texts (a text, b text, v text, PRIMARY KEY (a, b))")
    made = protect(dsn, "texts", strict=True)
    key = ("x,y\\z", "'\\#")
    with changed.transaction():
        changed.execute("SELECT set_config('fenced_store.token', '7', true)")
        changed.execute("INSERT INTO texts VALUES (%s, %s, 'v')", key)
    changed.execute("SELECT fenced_store.claim(%s, 8)", [[made.row(*key)]])
    refused(changed, 7, "UPDATE texts SET v = 'stale'")
    carrying(changed, 8, "UPDATE texts SET v = 'right'")
    unprotect(dsn, "texts")
    assert protected(dsn) == []


def test_resource_keeps_its_name_whatever_the_settings(dsn: str, changed: psycopg.Connection) -> None:
    made = protect(dsn, "orders")
    assert made.resource == "public.orders"
    assert made.row(1) == "public.orders:1"
    carrying(changed, 7, "UPDATE orders SET v = 'x'")
    changed.execute("SELECT fenced_store.claim('{public.orders:1}', 9)")
    refused(changed, 8, "UPDATE orders SET v = 'stale' WHERE id = 1")
    changed.execute("ALTER TABLE orders RENAME TO renamed")
    unprotect(dsn, "renamed")
    fences = changed.execute("SELECT resource FROM fenced_store.fences WHERE token > 0 ORDER BY 1").fetchall()
    assert fences == [("public.orders",), ("public.orders:1",), ("public.renamed",)]
    assert protect(dsn, "renamed", per="table").resource == "public.renamed"
    refused(changed, 8, "UPDATE renamed SET v = 'stale'")


def test_schema_is_installed_whatever_the_settings(dsn: str, changed: psycopg.Connection) -> None:
    fenced_store.install(dsn, "other")
    protect(dsn, "orders", schema="other")
    carrying(changed, 7, "UPDATE orders SET v = 'x'")
    refused(changed, 6, "UPDATE orders SET v = 'x'")


def test_list_shows_a_fence_of_which_a_trigger_is_disabled(dsn: str, owner: psycopg.Connection) -> None:
    """Each of the triggers closes a way past the fence."""
    protect(dsn, "orders")
    names = owner.execute("SELECT tgname FROM pg_trigger WHERE tgname LIKE 'zz_fenced_store%' ORDER BY 1").fetchall()
    assert len(names) == 4
    for (name,) in names:
        for how, enabled in (("DISABLE", False), ("ENABLE REPLICA", False), ("ENABLE ALWAYS", True), ("ENABLE", True)):
            owner.execute(f"ALTER TABLE orders {how} TRIGGER {name}".encode())
            found = owner.execute("SELECT enabled FROM fenced_store.protected_tables()").fetchone()
            assert found == (enabled,), (name, how)


def test_list_shows_that_sessions_start_as_replicas(dsn: str, owner: psycopg.Connection) -> None:
    """Triggers do not fire in a session with session_replication_role = replica."""
    protect(dsn, "orders", strict=True)
    assert protected(dsn)[0].enabled
    owner.execute(
        sql.SQL("ALTER DATABASE {} SET session_replication_role = replica").format(sql.Identifier(owner.info.dbname))
    )
    assert not protected(dsn)[0].enabled
