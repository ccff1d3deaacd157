"""Only an invalid index that a migration names is dropped, and only by the holder of the lock."""

from __future__ import annotations

import logging

import psycopg
import pytest

from dblock.errors import LeaseLost
from dblock.recipes.migrations.invalid_indexes import drop_named, marked_session, named_in

LONG = "i" * 63


@pytest.mark.parametrize(
    ("text", "index", "is_named"),
    [
        ("CREATE INDEX CONCURRENTLY by_day ON orders (day)", "public.by_day", True),
        ("op.create_index('by_day', 'orders')", "public.by_day", True),
        ("CREATE INDEX CONCURRENTLY By_Day ON orders (day)", "public.by_day", True),
        ("CREATE INDEX by_day_2 ON orders (day)", "public.by_day", False),
        ("CREATE INDEX old_by_day ON orders (day)", "public.by_day", False),
        ("CREATE INDEX by_day$ ON orders (day)", "public.by_day", False),
        ('CREATE INDEX "By Day" ON orders (day)', 'public."By Day"', True),
        ('CREATE INDEX "by day" ON orders (day)', 'public."By Day"', False),
        ('CREATE INDEX "a.b""c" ON orders (day)', 'public."a.b""c"', True),
        ('CREATE INDEX "a.b" ON orders (day)', 'public."a.b"', True),
        ("CREATE INDEX by_day ON orders (day)", "billing.by_day", False),
        ("SET search_path TO billing; CREATE INDEX by_day ON orders (day)", "billing.by_day", True),
        ("CREATE INDEX by_day ON billing.orders (day)", "billing.by_day", True),
        (f"CREATE INDEX {LONG}_and_more ON orders (day)", f"public.{LONG}", True),
        ("", "public.by_day", False),
    ],
)
def test_index_is_named_as_a_whole_word(text: str, index: str, is_named: bool) -> None:
    pair = (index, "public.orders")
    assert named_in(text, [pair]) == [pair] * is_named


def held(owner: psycopg.Connection) -> int:
    row = owner.execute("SELECT token FROM try_acquire('m', interval '1 minute')").fetchone()
    assert row is not None
    return int(row[0])


def broken(owner: psycopg.Connection, *indexes: str) -> None:
    """Leave invalid indexes."""
    owner.execute("CREATE TABLE IF NOT EXISTS public.doubled AS SELECT 1 AS n FROM generate_series(1, 2)")
    for index in indexes:
        with pytest.raises(psycopg.errors.UniqueViolation):
            owner.execute(f"CREATE UNIQUE INDEX CONCURRENTLY {index} ON public.doubled (n)".encode())


def left(owner: psycopg.Connection) -> list[str]:
    found = owner.execute("SELECT relname FROM pg_class WHERE relname IN ('mine', 'other', 'fine') ORDER BY 1")
    return [name for (name,) in found.fetchall()]


def test_only_invalid_indexes_that_the_text_names_are_dropped(
    dsn: str, owner: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    broken(owner, "mine", "other")
    owner.execute("CREATE INDEX fine ON public.doubled (n)")
    token = held(owner)
    with marked_session(dsn, "dblock-migrate:m:1", 15.0) as connection:
        shown = connection.execute("SELECT current_setting('application_name'), current_setting('lock_timeout')")
        assert shown.fetchone() == ("dblock-migrate:m:1", "0")
        with caplog.at_level(logging.WARNING, "dblock"):
            dropped = drop_named(connection, "mine fine", lock="m", token=token)
    assert dropped == [("public.mine", "public.doubled")]
    assert "dropped the invalid index public.mine on public.doubled" in caplog.text
    assert left(owner) == ["fine", "other"]


def test_index_that_another_session_is_building_stays(dsn: str, owner: psycopg.Connection) -> None:
    broken(owner, "mine")
    token = held(owner)
    with psycopg.connect(dsn) as builder, marked_session(dsn, "mark", 15.0) as connection:
        # CONCURRENTLY holds this lock on the table until the index is valid.
        builder.execute("LOCK TABLE public.doubled IN SHARE UPDATE EXCLUSIVE MODE")
        assert drop_named(connection, "mine", lock="m", token=token) == []
    assert left(owner) == ["mine"]


def test_holder_that_has_lost_the_lock_drops_nothing(dsn: str, owner: psycopg.Connection) -> None:
    broken(owner, "mine")
    with marked_session(dsn, "mark", 15.0) as connection, pytest.raises(LeaseLost):
        drop_named(connection, "mine", lock="m", token=held(owner) - 1)
    assert left(owner) == ["mine"]


def test_index_of_another_owner_stays_and_is_logged(
    dsn: str, owner: psycopg.Connection, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken(owner, "mine")
    owner.execute(f"GRANT USAGE ON SCHEMA dblock TO {role}".encode())
    owner.execute(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA dblock TO {role}".encode())
    token = held(owner)
    as_role = psycopg.conninfo.make_conninfo(dsn, user=role, password="app")
    with marked_session(as_role, "mark", 15.0) as connection:
        assert drop_named(connection, "mine", lock="m", token=token) == []
    assert "must be owner" in caplog.text
    assert left(owner) == ["mine"]
