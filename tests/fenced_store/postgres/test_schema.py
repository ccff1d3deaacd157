"""fenced_store's schema: its install is atomic and may run concurrently, and its removal leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql
from sqlalchemy.ext.asyncio import create_async_engine

import dblock
import fenced_store
from dblock.cli import main
from fenced_store import InvalidArgument, schema
from tests.fenced_store.postgres.conftest import url


def test_second_install_changes_nothing(bare_dsn: str) -> None:
    assert fenced_store.install(bare_dsn) is True
    assert fenced_store.install(bare_dsn) is False


def test_ten_concurrent_installs_create_one_schema(bare_dsn: str) -> None:
    with ThreadPoolExecutor(10) as pool:
        made = list(pool.map(lambda _: fenced_store.install(bare_dsn), range(10)))
    assert sorted(made) == [False] * 9 + [True]


def test_install_accepts_every_way_to_name_the_database(bare_dsn: str) -> None:
    assert fenced_store.install(create_async_engine(url(bare_dsn)))
    assert not fenced_store.install(url(bare_dsn).render_as_string(hide_password=False))
    with pytest.raises(InvalidArgument, match="DSN"):
        fenced_store.install("")
    with pytest.raises(InvalidArgument, match="DSN"):
        fenced_store.install(None)  # type: ignore[arg-type]


def test_uninstall_leaves_no_trace(bare_dsn: str) -> None:
    def everything() -> list[tuple[Any, ...]]:
        with psycopg.connect(bare_dsn) as connection:
            return connection.execute(
                "SELECT nspname FROM pg_namespace UNION SELECT relname FROM pg_class UNION SELECT proname FROM pg_proc"
                " ORDER BY 1"
            ).fetchall()

    before = everything()
    fenced_store.install(bare_dsn)
    with psycopg.connect(bare_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY)")
        fenced_store.protect(bare_dsn, "orders")
        with pytest.raises(InvalidArgument, match="still protected: public.orders"):
            fenced_store.uninstall(bare_dsn)
        fenced_store.unprotect(bare_dsn, "orders")
        connection.execute("DROP TABLE orders")
    fenced_store.uninstall(bare_dsn)
    assert everything() == before


def test_ddl_can_be_run_by_hand(bare_dsn: str) -> None:
    with psycopg.connect(bare_dsn, autocommit=True) as connection:
        connection.execute(fenced_store.ddl("my fences").encode())
    store = fenced_store.FencedStore(bare_dsn, schema="my fences")
    with store:
        assert store.put("k", 1, fence=1).version == 1
    assert not fenced_store.install(bare_dsn, "my fences")


HOSTILE = ['a"b', "%s :x", "x; DROP SCHEMA public", "ünï", "'", "$1", "\\"]


@pytest.mark.second_stage
@pytest.mark.parametrize("name", HOSTILE)
def test_schema_may_have_any_valid_name(bare_dsn: str, name: str) -> None:
    fenced_store.install(bare_dsn, name)
    with fenced_store.FencedStore(bare_dsn, schema=name) as store:
        store.put("k", 1, fence=1)
        store.claim("k", fence=2)
        with pytest.raises(fenced_store.StaleTokenError):
            store.put("k", 1, fence=1)
    with psycopg.connect(bare_dsn) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        connection.commit()
        fenced_store.protect(bare_dsn, "t", schema=name)
        with fenced_store.fence(connection, "r", 3, schema=name):
            connection.execute("INSERT INTO t VALUES (1)")
        connection.commit()
        with pytest.raises(fenced_store.StaleTokenError), fenced_store.fence(connection, "s", 2, schema=name):
            connection.execute("DELETE FROM t")
    assert len(fenced_store.rejections(bare_dsn, schema=name)) == 2
    assert fenced_store.high_water(bare_dsn, schema=name) == 3


@pytest.mark.parametrize("name", ["", "pg_x", "public", "information_schema", "x" * 64, "nul\0", 7])
def test_invalid_schema_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"chema"):
        fenced_store.install("host=/nowhere", name)


def test_foreign_schema_is_refused_and_left_alone(bare_dsn: str) -> None:
    with psycopg.connect(bare_dsn, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA fenced_store")
    with pytest.raises(InvalidArgument, match="not fenced_store's"):
        fenced_store.install(bare_dsn)


def test_newer_schema_is_not_touched(bare_dsn: str) -> None:
    fenced_store.install(bare_dsn)
    with psycopg.connect(bare_dsn, autocommit=True) as connection:
        connection.execute("UPDATE fenced_store.installed_revision SET number = 99")
    calls: list[Callable[[str], object]] = [fenced_store.install, fenced_store.high_water]
    for call in calls:
        with pytest.raises(fenced_store.NotInstalled, match="revision 99"):
            call(bare_dsn)


def test_default_privileges_grant_no_access(bare_dsn: str, role: str) -> None:
    with psycopg.connect(bare_dsn, autocommit=True) as connection:
        for things in ("TABLES", "SEQUENCES", "FUNCTIONS", "SCHEMAS"):
            statement = f"ALTER DEFAULT PRIVILEGES GRANT ALL ON {things} TO {{}}"
            connection.execute(sql.SQL(statement).format(sql.Identifier(role)))
        fenced_store.install(bare_dsn)
        assert connection.execute(
            "SELECT count(*) FROM pg_class WHERE relnamespace = 'fenced_store'::regnamespace AND relkind IN ('r')"
            " AND has_table_privilege(%s, oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE')", [role],
        ).fetchone() == (0,)  # fmt: skip
        assert connection.execute(
            "SELECT count(*) FROM pg_proc WHERE pronamespace = 'fenced_store'::regnamespace"
            " AND has_function_privilege(%s, oid, 'EXECUTE')", [role],
        ).fetchone() == (0,)  # fmt: skip
        assert connection.execute("SELECT has_schema_privilege(%s, 'fenced_store', 'CREATE')", [role]).fetchone() == (
            False,
        )


def test_every_public_function_exists_and_has_a_fixed_search_path(owner: psycopg.Connection) -> None:
    """Functions on fenced_store's tables run as their owner with a fixed path; those on user tables run as the user."""
    rows = owner.execute(
        "SELECT proname, prosecdef, coalesce(array_to_string(proconfig, ' '), '') FROM pg_proc"
        " WHERE pronamespace = 'fenced_store'::regnamespace AND proname = ANY(%s)",
        [list(schema.API)],
    ).fetchall()
    assert {name for name, _, _ in rows} == set(schema.API)
    as_the_user = {
        "protect_table", "unprotect_table", "row_key", "key_expression", "has_fence_columns",
        "highest_token", "guard_truncate_trigger",
        "guard_function_name", "lock_table", "is_plain_type",
    }  # fmt: skip
    for name, as_owner, settings in rows:
        assert as_owner == (name not in as_the_user), name
        assert "search_path=fenced_store, pg_temp" in settings or name in (
            "key_expression",
            "row_key",
            "has_fence_columns",
            "guard_function_name",
            "is_plain_type",
        ), name


def run(dsn: str, *arguments: str) -> int:
    return main(["fence", *arguments, "--dsn", dsn])


def test_command_line_runs_every_fence_command(bare_dsn: str, capsys: pytest.CaptureFixture[str], role: str) -> None:
    with psycopg.connect(bare_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int, line int, v text, PRIMARY KEY (id, line))")
        connection.execute("INSERT INTO orders VALUES (1, 1, 'a')")
        assert run(bare_dsn, "install", "orders", "--key", "id", "--key", "line", "--strict") == 0
        assert "Set up fenced_store" in (said := capsys.readouterr().out)
        assert "public.orders is protected per row, by id, line, strictly" in said
        assert run(bare_dsn, "setup") == 0
        assert "nothing to do" in capsys.readouterr().out
        assert run(bare_dsn, "grant", role) == 0
        assert run(bare_dsn, "list") == 0
        assert "public.orders  per row, by id, line, strictly" in capsys.readouterr().out
        assert run(bare_dsn, "log") == 0
        assert "No write was refused." in capsys.readouterr().out
        connection.execute("SELECT fenced_store.write('k', 8, 1, '1', NULL, writer => 'new')")
        connection.execute("SELECT fenced_store.write('k', 7, 1, '1', NULL, writer => 'old')")
        assert run(bare_dsn, "log", "--resource", "k", "--limit", "5") == 0
        assert "k refused token 7 of old against token 8 by new" in capsys.readouterr().out
        assert run(bare_dsn, "high-water") == 0
        assert capsys.readouterr().out == "8\n"
        assert run(bare_dsn, "install", "orders", "--per-table", "--warn-only") == 0
        assert "per table, only warning" in capsys.readouterr().out
        assert run(bare_dsn, "remove", "orders") == 0
        assert run(bare_dsn, "list") == 0
        assert "No table is protected" in capsys.readouterr().out


def test_install_of_a_current_schema_needs_no_privilege_but_that_of_a_writer(dsn: str, role: str) -> None:
    """A program may call `install` at every start, as it may with dblock's."""
    fenced_store.install(dsn)
    fenced_store.grant(dsn, role)
    assert fenced_store.install(conninfo.make_conninfo(dsn, user=role, password="app")) is False


def test_command_line_reports_errors(bare_dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, said in (
        (["list"], 78, "dblock fence setup"),
        (["install", "nowhere"], 2, "There is no table 'nowhere'"),
        (["grant", "no such role"], 2, "There is no role"),
    ):
        assert run(bare_dsn, *arguments) == code
        assert said in capsys.readouterr().err
    assert run("host=/nowhere", "list") == 69
    assert "could not be asked" in capsys.readouterr().err
    assert main(["fence", "setup", "--sql", "--fences", "mine"]) == 0
    assert 'CREATE SCHEMA "mine"' in capsys.readouterr().out


def test_tokens_are_raised_above_every_fence_after_a_restore(
    dsn: str, store: fenced_store.FencedStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dump was restored on a server whose clock is behind: the tokens went back, the resources did not."""
    with dblock.Client(dsn) as client:
        store.put("k", 1, fence=2**52)
        with client.lock("a") as lease, pytest.raises(fenced_store.StaleTokenError):
            store.put("k", 2, fence=lease)
        assert run(dsn, "high-water") == 0
        highest = capsys.readouterr().out.strip()
        assert main(["token", "raise", "--above", highest, "--dsn", dsn]) == 0
        with client.lock("a") as lease:
            assert lease.token > int(highest)
            store.put("k", 2, fence=lease)
