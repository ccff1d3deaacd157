"""Install, upgrade and uninstall: atomic, and safe to run concurrently."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from psycopg import conninfo, sql
from sqlalchemy import Connection, create_engine

import dblock
from dblock import cli
from dblock._core.schema_version import REVISION
from dblock._runtime.target import resolve
from dblock.admin import install_locks, privileges, schema, tables
from tests.support import warm_start
from tests.support.sessions import Sessions
from tests.support.stages import first

CATALOG = """
    SELECT 'function', p.proname, pg_get_functiondef(p.oid), p.proacl::text FROM pg_proc AS p
    WHERE p.pronamespace = 'dblock'::regnamespace
    UNION ALL
    SELECT c.relkind::text, c.relname, c.reloptions::text, '' FROM pg_class AS c
    WHERE c.relnamespace = 'dblock'::regnamespace AND c.relkind <> 'i'
    UNION ALL
    SELECT 'index', c.relname, '', pg_get_indexdef(c.oid) FROM pg_class AS c
    WHERE c.relnamespace = 'dblock'::regnamespace AND c.relkind = 'i'
    UNION ALL
    SELECT 'column', attrelid::regclass::text, attname, format_type(atttypid, atttypmod) FROM pg_attribute AS a
    JOIN pg_class AS c ON c.oid = a.attrelid
    WHERE c.relnamespace = 'dblock'::regnamespace AND attnum > 0 AND c.relkind = 'r'
    ORDER BY 1, 2, 3
"""


def catalog(dsn: str) -> list[tuple[object, ...]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(CATALOG.encode()).fetchall()


def namespaces(dsn: str) -> set[str]:
    with psycopg.connect(dsn) as connection:
        return {name for (name,) in connection.execute("SELECT nspname FROM pg_namespace")}


def test_needed_revision_is_the_newest_migration() -> None:
    assert ScriptDirectory(str(schema.migrations())).get_current_head() == REVISION


def test_every_sql_file_is_installed() -> None:
    files = schema.function_files()
    assert sorted(files) == sorted((schema.PACKAGE / "sql").rglob("*.sql"))
    assert len({path.name for path in files}) == len(files), "tests find a file by its name"
    assert [path.name for path in files][-2:] == ["98_comments.sql", "99_privileges.sql"]


def test_install_returns_the_revision_before(bare_dsn: str) -> None:
    target = resolve(bare_dsn)
    assert schema.status(target).state == "missing"
    assert schema.install(target) is None
    assert schema.status(target).state == "current"
    assert schema.install(target) == REVISION


def test_application_role_may_call_install_when_there_is_nothing_to_do(dsn: str, role: str) -> None:
    application = resolve(conninfo.make_conninfo(dsn, user=role, password="app"))
    with pytest.raises(dblock.AccessDenied):
        schema.install(application)
    schema.grant(resolve(dsn), role)
    assert schema.install(application) == REVISION


@pytest.mark.second_stage
def test_uninstall_leaves_no_trace_and_returns_the_highest_token(bare_dsn: str) -> None:
    target = resolve(bare_dsn)
    before = namespaces(bare_dsn)
    schema.install(target)
    with dblock.Client(bare_dsn) as client:
        for _ in range(3):
            lease = client.lock("a").acquire()
            lease.release()
    assert schema.uninstall(target) == lease.token
    assert namespaces(bare_dsn) == before
    with pytest.raises(dblock.SchemaMissing):
        schema.uninstall(target)
    schema.install(target)
    assert schema.uninstall(target) == 0


@pytest.mark.second_stage
def test_reinstall_gives_the_same_schema(bare_dsn: str) -> None:
    target = resolve(bare_dsn)
    schema.install(target)
    first = catalog(bare_dsn)
    schema.uninstall(target)
    schema.install(target)
    assert catalog(bare_dsn) == first


@pytest.mark.second_stage
def test_printed_statements_create_the_same_schema(bare_dsn: str, dsn: str) -> None:
    with psycopg.connect(bare_dsn, autocommit=True) as dba:
        dba.execute(schema.ddl().encode())
    assert catalog(bare_dsn) == catalog(dsn)
    assert schema.install(resolve(bare_dsn)) == REVISION


@pytest.mark.second_stage
@pytest.mark.parametrize("number", first(1, [8, 20]))
def test_concurrent_installs_succeed(bare_dsn: str, number: int) -> None:
    with ThreadPoolExecutor(number) as threads:
        found = list(threads.map(lambda _: schema.install(resolve(bare_dsn)), range(number)))
    assert sorted(found, key=str) == [REVISION] * (number - 1) + [None]
    with dblock.Client(bare_dsn) as client:
        assert client.lock("a").try_acquire()


@pytest.mark.second_stage
def test_install_succeeds_if_another_one_commits_before_it_creates_the_schema(
    bare_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = schema._create_schema

    def overtaken(connection: Connection, name: str) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(install_locks, "FIRST_INSTALL_PATIENCE", 0.05)  # it stops waiting for the other one
        assert schema.install(resolve(bare_dsn)) is None
        create(connection, name)

    monkeypatch.setattr(schema, "_create_schema", overtaken)
    assert schema.install(resolve(bare_dsn)) == REVISION


def test_failed_install_leaves_nothing(bare_dsn: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.sql"
    broken.write_text("CREATE FUNCTION nonsense")
    right = schema.function_files()
    monkeypatch.setattr(schema, "function_files", lambda: [*right, broken])
    before = namespaces(bare_dsn)
    with pytest.raises(dblock.DatabaseError, match="syntax error"):
        schema.install(resolve(bare_dsn))
    assert namespaces(bare_dsn) == before


@pytest.mark.second_stage
@pytest.mark.parametrize("name", first(2, ['with"quote', "a:b%s", "locks", "Quoted Name", "ünïcode", "50%", "$make$"]))
def test_any_schema_name_works(bare_dsn: str, name: str) -> None:
    target = resolve(bare_dsn)
    schema.install(target, name)
    assert name in namespaces(bare_dsn)
    with dblock.Client(bare_dsn, schema=name) as client:
        lease = client.lock("a").acquire()
        lease.renew()
        assert client.lock("a").holder()
        assert lease.release()
    schema.uninstall(target, name)
    assert name not in namespaces(bare_dsn)
    with psycopg.connect(bare_dsn, autocommit=True) as dba:
        dba.execute(schema.ddl(name).encode())
    assert schema.status(target, name).state == "current"


@pytest.mark.second_stage
def test_two_schemas_in_one_database_are_independent(bare_dsn: str) -> None:
    for name in ("one", "two"):
        schema.install(resolve(bare_dsn), name)
    with dblock.Client(bare_dsn, schema="one") as one, dblock.Client(bare_dsn, schema="two") as two:
        assert one.lock("a").try_acquire()
        assert two.lock("a").try_acquire()


def test_schema_with_other_objects_is_refused(bare_dsn: str) -> None:
    with psycopg.connect(bare_dsn, autocommit=True) as owner:
        owner.execute("CREATE SCHEMA app; CREATE TABLE app.orders (id int)")
    with pytest.raises(dblock.SchemaError, match="already holds 'orders'.*--schema"):
        schema.install(resolve(bare_dsn), "app")
    assert schema.status(resolve(bare_dsn), "app").state == "missing"


@pytest.mark.second_stage
def test_empty_schema_created_by_a_dba_is_used(bare_dsn: str, role: str) -> None:
    """The installing role then needs no privilege to create schemas."""
    with psycopg.connect(bare_dsn, autocommit=True) as dba:
        dba.execute(sql.SQL("CREATE SCHEMA dblock AUTHORIZATION {}").format(sql.Identifier(role)))
    as_role = resolve(conninfo.make_conninfo(bare_dsn, user=role, password="app"))
    schema.install(as_role)
    assert schema.status(as_role).state == "current"


@pytest.mark.parametrize("by_hand", [False, True], ids=["install", "install --sql"])
@pytest.mark.parametrize(
    "made", ["CREATE SCHEMA dblock AUTHORIZATION {}", "CREATE SCHEMA dblock; GRANT CREATE ON SCHEMA dblock TO {}"]
)
def test_schema_open_to_another_role_is_refused(bare_dsn: str, role: str, made: str, by_hand: bool) -> None:
    """That role could add a function, which dblock's functions would call with the installer's privileges."""
    with psycopg.connect(bare_dsn, autocommit=True) as dba:
        dba.execute(sql.SQL(made).format(sql.Identifier(role)))
        if by_hand:
            with pytest.raises(psycopg.Error, match="may create objects in schema 'dblock'"):
                dba.execute(schema.ddl().encode())
        else:
            with pytest.raises(dblock.SchemaError, match="may create objects in schema 'dblock'"):
                schema.install(resolve(bare_dsn))
    assert schema.status(resolve(bare_dsn)).state == "missing"


@pytest.mark.second_stage
def test_default_privileges_open_no_table_to_a_granted_role(bare_dsn: str, role: str) -> None:
    with psycopg.connect(bare_dsn, autocommit=True) as dba:
        for kind in ("SCHEMAS", "TABLES", "SEQUENCES", "FUNCTIONS"):
            statement = "ALTER DEFAULT PRIVILEGES GRANT ALL ON {} TO {}, PUBLIC"
            dba.execute(sql.SQL(statement).format(sql.SQL(kind), sql.Identifier(role)))
    schema.install(resolve(bare_dsn))
    with psycopg.connect(bare_dsn, user=role, password="app", autocommit=True) as application:
        for statement in ("SELECT dblock.try_acquire('a')", "CREATE TABLE dblock.stranger ()"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                application.execute(statement.encode())
    schema.grant(resolve(bare_dsn), role)
    with psycopg.connect(bare_dsn, user=role, password="app", autocommit=True) as application:
        assert application.execute("SELECT granted FROM dblock.try_acquire('a')").fetchone() == (True,)
        for statement in (
            "UPDATE dblock.distributed_locks SET token = 0",
            "DELETE FROM dblock.token_clock",
            "SELECT setval('dblock.token_sequence', 1)",
            "SELECT dblock.raise_tokens(5)",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                application.execute(statement.encode())


def test_role_with_access_to_a_table_is_granted_nothing(dsn: str, role: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as dba:
        dba.execute("GRANT SELECT ON dblock.distributed_locks TO PUBLIC")
    with pytest.raises(dblock.AccessDenied, match="can access 'distributed_locks' directly"):
        schema.grant(resolve(dsn), role)


def test_granted_role_may_call_functions_that_an_upgrade_adds(dsn: str, role: str, owner: psycopg.Connection) -> None:
    schema.grant(resolve(dsn), role)
    owner.execute("DROP FUNCTION abandon")
    for file in schema.function_files():
        owner.execute(file.read_bytes())
    allowed = "SELECT has_function_privilege(%s, 'abandon(text, uuid, boolean)', 'EXECUTE')"
    assert owner.execute(allowed, [role]).fetchone() == (True,)


def test_unknown_revision_is_a_schema_error(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("UPDATE installed_revision SET version_num = '0000'")
    with pytest.raises(dblock.SchemaError, match="another version of dblock"):
        schema.install(resolve(dsn))


def test_uninstall_keeps_a_view_that_depends_on_it(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("CREATE VIEW public.held AS SELECT name FROM dblock.distributed_locks")
    with pytest.raises(dblock.DatabaseError, match="other objects depend on it"):
        schema.uninstall(resolve(dsn))
    assert schema.status(resolve(dsn)).state == "current"


def test_newer_schema_is_left_alone(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("UPDATE installed_revision SET version_num = '9999'")
    for change in (schema.install, schema.uninstall):
        with pytest.raises(dblock.SchemaTooNew):
            change(resolve(dsn))
    assert schema.status(resolve(dsn)).state == "too new"


def test_role_without_the_privilege_to_install_is_denied(bare_dsn: str, role: str) -> None:
    with pytest.raises(dblock.AccessDenied, match="permission denied"):
        schema.install(resolve(conninfo.make_conninfo(bare_dsn, user=role, password="app")))


@pytest.mark.second_stage
def test_version_table_of_the_application_stays_untouched(bare_dsn: str) -> None:
    with psycopg.connect(bare_dsn, autocommit=True) as application:
        application.execute("CREATE TABLE alembic_version (version_num text); INSERT INTO alembic_version VALUES ('x')")
        schema.install(resolve(bare_dsn))
        assert application.execute("SELECT version_num FROM alembic_version").fetchall() == [("x",)]
        schema.uninstall(resolve(bare_dsn))
        assert application.execute("SELECT version_num FROM alembic_version").fetchall() == [("x",)]


def test_metadata_matches_the_migrations(dsn: str) -> None:
    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))

    def ours(name: str | None, kind: str, parents: object) -> bool:
        return name == "dblock" if kind == "schema" else name != schema.VERSION_TABLE

    options = {"include_schemas": True, "include_name": ours, "compare_type": True}
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, tables.metadata()) == []
    engine.dispose()


def test_lock_table_is_tuned_for_hot_updates_and_compares_names_by_bytes(owner: psycopg.Connection) -> None:
    row = owner.execute("SELECT reloptions FROM pg_class WHERE relname = 'distributed_locks'").fetchone()
    assert row is not None
    assert {"fillfactor=50", "autovacuum_vacuum_scale_factor=0.0"} <= set(row[0])
    indexed = owner.execute(
        "SELECT a.attname, c.collname FROM pg_index AS i JOIN pg_attribute AS a ON a.attrelid = i.indexrelid"
        " JOIN pg_collation AS c ON c.oid = a.attcollation WHERE i.indrelid = 'distributed_locks'::regclass"
    ).fetchall()
    assert indexed == [("name", "C"), ("head", "C"), ("kind", "C")]


def test_functions_are_closed_to_other_roles_until_granted(dsn: str, owner: psycopg.Connection) -> None:
    open_to_all = owner.execute(
        "SELECT p.proname FROM pg_proc AS p WHERE p.pronamespace = 'dblock'::regnamespace"
        " AND EXISTS (SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) WHERE grantee = 0)"
    ).fetchall()
    assert open_to_all == []


def test_every_definer_function_fixes_its_search_path(owner: psycopg.Connection) -> None:
    unsafe = owner.execute(
        "SELECT proname FROM pg_proc WHERE pronamespace = 'dblock'::regnamespace AND prosecdef"
        " AND NOT coalesce('search_path=dblock, pg_temp' = ANY(proconfig), false)"
    ).fetchall()
    assert unsafe == []
    definers = owner.execute(
        "SELECT proname FROM pg_proc WHERE pronamespace = 'dblock'::regnamespace AND prosecdef"
    ).fetchall()
    called = {name for right in privileges.PRIVILEGES.values() for name in right}
    assert {name for (name,) in definers} == called | {"guard_ddl"}, "event triggers call guard_ddl in every session"


@pytest.mark.second_stage
def test_command_line_installs_reports_and_removes(bare_dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    at = ["--dsn", bare_dsn]
    assert cli.main(["status", *at]) == 78
    assert "Run: dblock install" in capsys.readouterr().err
    assert cli.main(["install", *at]) == 0
    assert "Installed dblock in schema 'dblock'" in capsys.readouterr().out
    assert cli.main(["install", *at]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert cli.main(["status", *at]) == 0
    assert "current, revision 0001" in capsys.readouterr().out
    assert cli.main(["grant", "ghost", *at]) == 2
    assert "no role 'ghost'" in capsys.readouterr().err
    assert cli.main(["uninstall", *at]) == 1
    assert "--yes" in capsys.readouterr().err
    assert cli.main(["uninstall", "--yes", *at]) == 0
    assert "highest token it issued was 0" in capsys.readouterr().out


def test_command_line_has_nothing_to_uninstall_without_a_schema(
    bare_dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ["--dsn", bare_dsn, "--schema", "locks"]
    for confirmed in (["--yes"], []):
        assert cli.main(["uninstall", *confirmed, *at]) == 1
        said = capsys.readouterr().err
        assert "no dblock in schema 'locks'" in said
        assert "nothing to uninstall" in said
        assert "dblock install" not in said
        assert "This removes" not in said


def test_command_line_prints_statements_without_a_database(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["install", "--sql", "--schema", "locks"]) == 0
    printed = capsys.readouterr().out
    assert 'CREATE SCHEMA "locks"' in printed
    assert "%%" not in printed


@pytest.mark.second_stage
def test_closed_output_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m dblock install --sql | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.split() == ["BEGIN;", "0"]
    assert done.stderr == ""


def test_uninstall_returns_the_highest_token_of_concurrent_grants(dsn: str, sessions: Sessions) -> None:
    granting = sessions.open()
    granting.do("BEGIN")
    granting.do("SELECT try_acquire('a')")
    with ThreadPoolExecutor(1) as thread:
        removing = thread.submit(schema.uninstall, resolve(dsn))
        sessions.wait_until_a_session_waits()
        (second,) = granting.do("SELECT token FROM try_acquire('b')")
        granting.do("COMMIT")
        assert removing.result(60) == second


@pytest.mark.second_stage
def test_invalid_dsn_is_an_error_without_a_traceback() -> None:
    for code, arguments in (
        (2, ["install", "--dsn", "postgresql//u:hunter2@h"]),
        (69, ["status", "--dsn", "host=127.0.0.1 port=1"]),
    ):
        command = [sys.executable, "-m", "dblock.cli", *arguments]
        done = warm_start.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == code
        assert done.stderr.startswith("dblock: ")
        assert "Traceback" not in done.stderr
        assert "hunter2" not in done.stderr


@pytest.mark.second_stage
def test_grant_to_the_owner_takes_nothing_away(bare_dsn: str, role: str) -> None:
    with psycopg.connect(bare_dsn, autocommit=True) as dba:
        dba.execute(sql.SQL("CREATE SCHEMA dblock AUTHORIZATION {}").format(sql.Identifier(role)))
    as_role = conninfo.make_conninfo(bare_dsn, user=role, password="app")
    schema.install(as_role)
    schema.grant(as_role, role)
    with dblock.Client(as_role) as client:
        assert client.lock("a").acquire().release()


def test_install_creates_missing_functions(dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("DROP FUNCTION dblock.queue")
    assert not schema.status(dsn).complete
    schema.install(dsn)
    assert schema.status(dsn).complete
    with dblock.Client(dsn) as client:
        assert client.lock("a").queue() == []


@pytest.mark.second_stage
def test_functions_repaired_by_a_superuser_belong_to_the_schema_owner(
    bare_dsn: str, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A superuser's function that calls a function of the owner would make the owner a superuser."""
    with psycopg.connect(bare_dsn, autocommit=True) as dba:
        dba.execute(sql.SQL("CREATE SCHEMA dblock AUTHORIZATION {}").format(sql.Identifier(role)))
        as_role = conninfo.make_conninfo(bare_dsn, user=role, password="app")
        schema.install(as_role)
        with psycopg.connect(as_role, autocommit=True) as owner:
            owner.execute("DROP FUNCTION dblock.wake_queue")
        schema.install(bare_dsn, repair=True)
        owners = dba.execute(
            "SELECT DISTINCT proowner::regrole::text FROM pg_proc WHERE pronamespace = 'dblock'::regnamespace"
        ).fetchall()
        assert owners == [(role,)]


def test_role_that_may_create_in_the_schema_is_granted_nothing(dsn: str, role: str, owner: psycopg.Connection) -> None:
    owner.execute(sql.SQL("GRANT CREATE ON SCHEMA dblock TO {}").format(sql.Identifier(role)))
    with pytest.raises(dblock.AccessDenied, match="may create objects"):
        schema.grant(dsn, role)
