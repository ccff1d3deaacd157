"""Migrations that fail reach all replicas. Migrations that cannot lock a table are retried, and blockers are named."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from dblock._runtime.target import resolve
from dblock.admin import schema
from dblock.admin.migration_ledger import MigrationLedger
from dblock.errors import LockTimeout, MigrationBlocked, MigrationFailed
from dblock.integrations.alembic import EXIT_CODES
from dblock.recipes.migrations import retry
from dblock.recipes.migrations.blockers import described
from tests.dblock.integrations.conftest import Projects, Start, rows, runs
from tests.support.eventually import eventually
from tests.support.machine import measured
from tests.support.stages import first

CREATE = "op.create_table('t', sa.Column('id', sa.Integer))"
ALTER = "op.execute('ALTER TABLE t ADD COLUMN b int')"
FAIL = "op.execute('SELECT pg_sleep(0.5)')\nop.execute('SELECT 1 / (SELECT 0)')"
NAME = "alembic:public.alembic_version"
BUILD = "with op.get_context().autocommit_block():\n    op.execute('CREATE INDEX CONCURRENTLY {0} ON t (id)')"
INDEXES = (
    "SELECT c.relname, i.indisvalid FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid"
    " WHERE i.indrelid = 'public.t'::regclass ORDER BY 1"
)


@pytest.fixture
def blocker(dsn: str, owner: psycopg.Connection) -> Iterator[psycopg.Connection]:
    """A session that reads a table in a transaction, and so keeps every ALTER TABLE from it."""
    owner.execute("CREATE TABLE public.t (id int)")
    with psycopg.connect(dsn, application_name="billing") as connection:
        connection.execute("SELECT id, 'a long report' FROM public.t")
        yield connection


@pytest.mark.second_stage
def test_failure_is_recorded_and_told_to_the_next_replica(projects: Projects, owner: psycopg.Connection) -> None:
    project = projects()
    project.revision("a", None, FAIL)
    with pytest.raises(Exception, match="division by zero"):
        project.call("upgrade", "head")
    assert rows(owner, "SELECT outcome, error FROM migration_runs") == [("failed", "DivisionByZero: division by zero")]
    code, said = project.call("upgrade", "head")
    assert code == EXIT_CODES[MigrationFailed]
    assert "division by zero" in said
    assert runs(owner) == ["failed"], "it was not run again"


@pytest.mark.second_stage
def test_replica_that_cannot_be_guarded_does_not_fail_the_version(
    dsn: str, projects: Projects, owner: psycopg.Connection, role: str
) -> None:
    schema.grant(resolve(dsn), role, may=["lock"])
    project = projects(gate=f"dsn={make_conninfo(dsn, user=role, password='app')!r}")
    project.revision("a", None, CREATE)
    code, said = project.call("upgrade", "head")
    assert code == 1
    assert "use the same role" in said
    assert runs(owner) == ["killed"], "nothing of the version was run"
    assert project.call("upgrade", "head")[0] == 1, "the second try has the same error"


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("replicas", "restarts"),
    [pytest.param(3, 2, marks=pytest.mark.second_stage), pytest.param(10, 5, marks=pytest.mark.nightly)],
)
def test_version_fails_as_often_as_it_may_over_all_replicas(
    replicas: int, restarts: int, dsn: str, projects: Projects, start: Start, owner: psycopg.Connection
) -> None:
    project = projects(gate="attempts=2")
    project.revision("a", None, FAIL)
    said = []
    for _ in range(restarts):
        started = [start(project, "upgrade", "head") for _ in range(replicas)]
        said += [one.communicate(timeout=600)[1] for one in started]
        assert all(one.returncode != 0 for one in started)
    assert runs(owner) == ["failed", "failed"]
    assert all("division by zero" in text for text in said)
    with MigrationLedger(resolve(dsn)) as ledger:
        ledger.retry(NAME, "ann", "fixed")
    with pytest.raises(Exception, match="division by zero"):
        project.call("upgrade", "head")
    assert len(runs(owner)) == 3, "a retry clears the failures"
    project.revision("a", None, CREATE)
    project.revision("b", "a", "pass")
    assert project.call("upgrade", "head")[0] == 0, "a new version runs"


@pytest.mark.alone
@pytest.mark.second_stage
@pytest.mark.timeout(300)
def test_replicas_that_wait_stop_soon_after_the_failure(
    projects: Projects, start: Start, owner: psycopg.Connection
) -> None:
    project = projects()
    go = project.folder / "go"
    project.revision("a", None, f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.05)\n{FAIL}")
    started = [start(project, "upgrade", "head") for _ in range(3)]
    eventually(lambda: rows(owner, f"SELECT 1 FROM list_waiters('{NAME}') OFFSET 1"))
    go.touch()
    eventually(lambda: runs(owner) == ["failed"])
    with measured() as lateness:
        began = time.monotonic()
        eventually(lambda: all(one.poll() is not None for one in started), "the end of the others")
        took = time.monotonic() - began
        assert took < 2 + 20 * lateness()
    codes = sorted(one.wait() for one in started)
    assert codes == [1, EXIT_CODES[MigrationFailed], EXIT_CODES[MigrationFailed]]


@pytest.mark.second_stage
@pytest.mark.parametrize("per_migration", first(1, [False, True]))
def test_transaction_that_cannot_lock_a_table_is_run_again(
    per_migration: bool,
    dsn: str,
    projects: Projects,
    owner: psycopg.Connection,
    blocker: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.1)
    wait = time.sleep

    def release_and_wait(pause: float) -> None:
        blocker.rollback()
        wait(pause)

    project = projects(
        gate="lock_timeout=0.4",
        configure=f"transaction_per_migration={per_migration}",
        inside="context.execute(\"SELECT set_config('my.prefix', 'kept', true)\")",
    )
    project.revision(
        "a", None, "op.execute(\"CREATE TABLE seen AS SELECT current_setting('my.prefix', true) AS prefix\")"
    )
    project.revision("b", "a", ALTER)
    slowest = 0.0
    over = threading.Event()

    def read() -> None:
        nonlocal slowest
        with psycopg.connect(dsn, autocommit=True) as reader:
            while not over.wait(0.01):
                began = time.monotonic()
                reader.execute("SELECT count(*) FROM public.t")
                slowest = max(slowest, time.monotonic() - began)

    traffic = threading.Thread(target=read)
    traffic.start()
    with measured() as lateness:
        try:
            with monkeypatch.context() as patched:
                patched.setattr(time, "sleep", release_and_wait)
                assert project.call("upgrade", "head")[0] == 0
        finally:
            over.set()
            traffic.join()
        assert slowest < 0.4 + 0.2 + 20 * lateness()
    assert rows(owner, "SELECT version_num FROM public.alembic_version") == ["b"]
    assert rows(owner, "SELECT prefix FROM public.seen") == ["kept"]
    assert runs(owner) == ["succeeded"]


@pytest.mark.second_stage
def test_blockers_are_named_when_the_tries_are_used_up(
    dsn: str,
    projects: Projects,
    owner: psycopg.Connection,
    blocker: psycopg.Connection,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.05)
    project = projects(gate="lock_timeout=0.6, retries=1")
    project.revision("a", None, ALTER)
    others = [psycopg.connect(dsn) for _ in range(6)]
    for other in others:
        other.execute("SELECT id FROM public.t")
    code, said = project.call("upgrade", "head")
    for other in others:
        other.close()
    assert code == 1
    named = f"pid {blocker.info.backend_pid}, for [0-9.]+ s, application 'billing': SELECT id, 'a long report' FROM"
    assert re.search(named, said), said
    assert said.count("pid ") == 5
    assert "2 times" in said
    assert runs(owner) == ["blocked"]
    assert rows(owner, "SELECT error LIKE 'MigrationBlocked: %billing%' FROM migration_runs") == [True]


@pytest.mark.second_stage
def test_deadlock_is_run_again(
    dsn: str, projects: Projects, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.05)
    owner.execute("CREATE TABLE public.t (id int)")
    owner.execute("CREATE TABLE public.u (id int)")
    project = projects()
    signal = "pathlib.Path('{0}/locked').touch()\nwhile not pathlib.Path('{0}/go').exists(): time.sleep(0.02)"
    project.revision(
        "a",
        None,
        f"{ALTER}\n{signal.format(project.folder)}\nop.execute('ALTER TABLE u ADD COLUMN b int')",
    )

    def cross() -> None:
        with psycopg.connect(dsn, options="-c deadlock_timeout=60s") as other:
            other.execute("LOCK TABLE public.u IN ACCESS EXCLUSIVE MODE")
            eventually(lambda: (project.folder / "locked").exists())
            (project.folder / "go").touch()
            other.execute("LOCK TABLE public.t IN ACCESS EXCLUSIVE MODE")

    crossing = threading.Thread(target=cross)
    crossing.start()
    assert project.call("upgrade", "head")[0] == 0
    crossing.join()
    assert runs(owner) == ["succeeded"]


@pytest.mark.second_stage
def test_index_build_is_not_cut_by_the_lock_timeout(
    dsn: str, projects: Projects, owner: psycopg.Connection, start: Start
) -> None:
    owner.execute("CREATE TABLE public.t (id int)")
    project = projects(gate="lock_timeout=0.3")
    project.revision(
        "a", None, "with op.get_context().autocommit_block():\n    op.execute('CREATE INDEX CONCURRENTLY i ON t (id)')"
    )
    with psycopg.connect(dsn) as reader:
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reader.execute("SELECT 1")
        building = start(project, "upgrade", "head")
        running = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'CREATE INDEX%' AND now() - query_start > '1.5 s'"
        eventually(lambda: rows(owner, running))
    assert building.wait(60) == 0


@pytest.mark.second_stage
def test_step_of_which_a_part_is_committed_is_not_run_again(
    projects: Projects, owner: psycopg.Connection, blocker: psycopg.Connection
) -> None:
    owner.execute("CREATE TABLE public.ran (n int)")
    project = projects(gate="lock_timeout=0.3")
    part = "with op.get_context().autocommit_block():\n    op.execute('INSERT INTO ran VALUES (1)')"
    project.revision("a", None, f"{part}\n{ALTER}")
    code, said = project.call("upgrade", "head")
    assert code == 1
    assert "could not lock a table in time, once" in said
    assert rows(owner, "SELECT count(*) FROM public.ran") == [1]


def test_blocker_that_is_not_visible_is_still_named() -> None:
    assert described(0, None, None, None).startswith("pid 0 (a prepared transaction")
    assert str(MigrationBlocked("m", "deadlocked", 1, [])).startswith("Migration 'm' deadlocked, once")


def broken(owner: psycopg.Connection, *indexes: str) -> None:
    """Leave indexes of a table as a CONCURRENTLY that was cut off leaves them."""
    owner.execute("CREATE TABLE public.t AS SELECT 1 AS id FROM generate_series(1, 2)")
    for index in indexes:
        with pytest.raises(psycopg.errors.UniqueViolation):
            owner.execute(f"CREATE UNIQUE INDEX CONCURRENTLY {index} ON public.t (id)".encode())


@pytest.mark.second_stage
@pytest.mark.parametrize("drop_invalid", first(1, [True, False]))
def test_invalid_index_that_a_pending_revision_names_is_dropped_if_asked_for(
    drop_invalid: bool, projects: Projects, owner: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    project = projects(gate=f"drop_invalid={drop_invalid}")
    project.revision("a", None, "pass  # applied")
    assert project.call("upgrade", "head")[0] == 0
    broken(owner, "mine", "applied", "other")
    project.revision("b", "a", BUILD.format("mine"))
    if drop_invalid:
        assert project.call("upgrade", "head")[0] == 0
        assert "dropped the invalid index public.mine on public.t" in caplog.text
        assert "left invalid indexes: public.applied on public.t, public.other on public.t." in caplog.text
    else:
        with pytest.raises(Exception, match="already exists"):
            project.call("upgrade", "head")
        assert "left invalid indexes: public.applied on public.t, public.mine on public.t, public.other" in caplog.text
    assert rows(owner, INDEXES) == [("applied", False), ("mine", drop_invalid), ("other", False)]


@pytest.mark.second_stage
def test_invalid_index_that_is_being_rebuilt_is_not_dropped(
    dsn: str, projects: Projects, owner: psycopg.Connection
) -> None:
    broken(owner, "mine")
    owner.execute("DELETE FROM public.t")
    project = projects(gate="drop_invalid=True")
    project.revision("a", None, "pass  # mine")
    with psycopg.connect(dsn) as reader, psycopg.connect(dsn, autocommit=True) as builder:
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reader.execute("SELECT 1")
        rebuild = threading.Thread(target=builder.execute, args=["REINDEX INDEX CONCURRENTLY public.mine"])
        rebuild.start()
        eventually(lambda: rows(owner, "SELECT 1 FROM pg_stat_progress_create_index WHERE phase LIKE 'waiting%'"))
        assert project.call("upgrade", "head")[0] == 0
        reader.rollback()
        rebuild.join()
    assert rows(owner, INDEXES) == [("mine", True)]


@pytest.mark.second_stage
def test_role_that_may_not_install_gets_one_error_and_does_no_ddl(
    bare_dsn: str, role: str, projects: Projects, owner: psycopg.Connection
) -> None:
    project = projects(on=make_conninfo(bare_dsn, user=role, password="app"))
    project.revision("a", None, CREATE)
    code, said = project.call("upgrade", "head")
    assert code == 1
    assert said.count("FAILED") == 1
    assert "run: dblock install" in said
    with psycopg.connect(bare_dsn, autocommit=True) as database:
        found = rows(database, "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'dblock%'")
        assert found == rows(database, "SELECT relname FROM pg_class WHERE relname IN ('t', 'alembic_version')") == []


@pytest.mark.second_stage
@pytest.mark.parametrize("other", ["version_table_schema='billing'", "version_table='billing_version'"])
def test_services_with_their_own_version_tables_do_not_wait_for_each_other(
    other: str, projects: Projects, owner: psycopg.Connection
) -> None:
    owner.execute("CREATE SCHEMA billing")
    owner.execute("SELECT try_acquire('alembic:public.alembic_version', interval '1 hour')")
    project = projects(gate="timeout=30", configure=other)
    project.revision("a", None, "pass")
    assert project.call("upgrade", "head") == (0, "")
    project = projects(gate="timeout=1")
    project.revision("a", None, "pass")
    code, said = project.call("upgrade", "head")
    assert code == EXIT_CODES[LockTimeout], f"the same table waits: {said}"
