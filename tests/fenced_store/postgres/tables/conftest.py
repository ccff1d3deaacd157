"""Fixtures and helpers for the tests of protected tables."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import conninfo, sql

import fenced_store

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
