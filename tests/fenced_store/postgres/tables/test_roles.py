"""Protected tables: what roles may do, and whose code runs."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest
from psycopg import conninfo, sql

import fenced_store
from fenced_store import FencedStoreError, protect, protected, unprotect
from tests.fenced_store.postgres.tables.conftest import carrying, refused


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
