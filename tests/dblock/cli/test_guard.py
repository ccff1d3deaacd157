"""`dblock guard` keeps DDL inside migrations, and keeps out of dblock's own way."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo

from dblock.admin import guard, schema
from dblock.errors import AccessDenied
from tests.support.alembic_project import Project
from tests.support.migrations import query
from tests.support.programs import psql
from tests.support.shell import Shell

TRIGGERS = "SELECT count(*) FROM pg_event_trigger"


def test_guard_is_installed_listed_and_removed(shell: Shell, dsn: str) -> None:
    assert "No schema is guarded" in shell.run("guard", "list").out
    made = shell.run("guard", "install", "public", "--name", "orders", "--name", "m", "--json")
    assert made.json == [{"schema": "public", "names": ["m", "orders"], "active": True}]
    with pytest.raises(psycopg.Error, match="needs a migration that holds the lock 'm' or 'orders'"):
        query(dsn, "CREATE TABLE public.orders (n int)")
    assert shell.run("guard", "list").out.splitlines()[1].split() == ["public", "m,", "orders", "yes"]
    shown = shell.run("migrations")
    assert "guarded schemas" in shown.out
    assert shell.run("migrations", "--json").json["guards"] == made.json
    unknown = shell.run("guard", "remove", "other")
    assert (unknown.code, "'other' has no guard. Guarded are: public." in unknown.err) == (2, True), unknown.err
    assert shell.run("guard", "remove").out == "Removed the guard of all schemas.\n"
    query(dsn, "CREATE TABLE public.orders (n int)")
    assert query(dsn, TRIGGERS) == [(0,)]


def test_statements_are_printed_for_a_dba(shell: Shell, dsn: str) -> None:
    printed = shell.run("guard", "install", "public", "it's", "--sql").out
    assert printed == (
        "SELECT \"dblock\".guard_schema('public', ARRAY['migrate']);\n"
        "SELECT \"dblock\".guard_schema('it''s', ARRAY['migrate']);\n"
    )
    assert query(dsn, TRIGGERS) == [(0,)], "nothing was run"
    query(dsn, printed.splitlines()[0])
    assert shell.run("guard", "list", "--json").json == [{"schema": "public", "names": ["migrate"], "active": True}]


@pytest.mark.second_stage
def test_program_under_dblock_migrate_passes_the_guard(shell: Shell, dsn: str, tmp_path: Path) -> None:
    assert shell.run("guard", "install", "public").code == 0
    script = tmp_path / "1.sql"
    script.write_text(
        "BEGIN; CREATE TABLE orders (day date); COMMIT;\n"
        "CREATE INDEX CONCURRENTLY by_day ON orders (day);\n"
        "DROP INDEX CONCURRENTLY by_day;\n"
    )
    by_hand = shell.run("run", "any", "--", *psql(dsn, script))
    assert by_hand.code == 3
    assert "is refused" in by_hand.err
    other = shell.run("migrate", "--name", "another", "--", *psql(dsn, script))
    assert "which does not hold it" in other.err
    done = shell.run("migrate", "--", *psql(dsn, script))
    assert done.code == 0, done.err
    assert query(dsn, "SELECT to_regclass('public.orders') IS NOT NULL") == [(True,)]


@pytest.mark.second_stage
def test_gate_of_alembic_passes_the_guard_and_a_program_without_it_does_not(
    shell: Shell, dsn: str, tmp_path: Path
) -> None:
    assert shell.run("guard", "install", "public", "--name", "alembic:public.alembic_version").code == 0
    step = (
        "op.create_table('t', sa.Column('id', sa.Integer))\n"
        "with op.get_context().autocommit_block():\n"
        "    op.execute('CREATE INDEX CONCURRENTLY by_id ON t (id)')\n"
    )
    plain = Project(tmp_path / "plain", dsn, gate=None)
    plain.revision("a", None, step)
    with pytest.raises(Exception, match="is refused: DDL in schema public"):
        plain.call("upgrade", "head")
    gated = Project(tmp_path / "gated", dsn)
    gated.revision("a", None, step)
    assert gated.call("upgrade", "head")[0] == 0
    assert query(dsn, "SELECT version_num FROM public.alembic_version") == [("a",)]


@pytest.mark.second_stage
def test_dblock_is_repaired_and_uninstalled_while_the_guard_is_on(shell: Shell, dsn: str) -> None:
    query(dsn, "CREATE TABLE public.orders (n int)")
    guard.install(dsn, ["public"], ["m"])
    assert shell.run("install", "--repair").code == 0
    with pytest.raises(psycopg.Error, match="is refused"):
        query(dsn, "DROP TABLE public.orders")
    assert shell.run("uninstall", "--yes").code == 0
    assert query(dsn, TRIGGERS) == [(0,)]
    assert shell.run("install").code == 0
    query(dsn, "DROP TABLE public.orders")


@pytest.mark.second_stage
def test_owner_without_a_superuser_learns_what_to_run_and_can_uninstall(shell: Shell, bare_dsn: str, role: str) -> None:
    query(bare_dsn, f"GRANT CREATE ON DATABASE {conninfo.conninfo_to_dict(bare_dsn)['dbname']} TO {role}")
    as_owner = conninfo.make_conninfo(bare_dsn, user=role, password="app")
    schema.install(as_owner)
    refused = shell.run("guard", "install", "public", "--name", "it's", dsn=as_owner)
    assert (refused.code, refused.out) == (77, ""), refused
    fix = """As a superuser run: dblock guard install public --name 'it'"'"'s' --trust-owner"""
    assert fix in refused.err
    with pytest.raises(AccessDenied, match=f"Role '{role}' owns schema 'dblock'"):
        guard.install(bare_dsn, ["public"], ["m"])
    assert query(bare_dsn, TRIGGERS) == [(0,)]
    assert guard.install(bare_dsn, ["public"], ["m"], trust_owner=True) == [guard.Guard("public", ["m"], True)]
    assert guard.install(as_owner, ["public"], ["n"])[0].names == ["n"], "the event triggers exist now"
    schema.install(as_owner, repair=True)
    schema.uninstall(as_owner)
    assert query(bare_dsn, TRIGGERS) == [(0,)]


@pytest.mark.second_stage
def test_role_that_may_only_see_lists_guards_and_changes_none(shell: Shell, dsn: str, role: str) -> None:
    schema.grant(dsn, role, may=["see"])
    guard.install(dsn, ["public"], ["m"])
    seeing = conninfo.make_conninfo(dsn, user=role, password="app")
    assert shell.run("guard", "list", "--json", dsn=seeing).json[0]["names"] == ["m"]
    assert shell.run("migrations", "--json", dsn=seeing).json["guards"][0]["active"] is True
    assert shell.run("guard", "install", "public", dsn=seeing).code == 77
    assert shell.run("guard", "remove", dsn=seeing).code == 77
    assert [one.names for one in guard.list_all(dsn)] == [["m"]]
