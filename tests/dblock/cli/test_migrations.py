"""`dblock migrations` shows what migrations do and did, and serves as a readiness probe."""

from __future__ import annotations

import time
from pathlib import Path

import psycopg
import pytest

from dblock._runtime.target import resolve
from dblock.admin import schema
from dblock.admin.inspect import overview
from tests.support.eventually import eventually
from tests.support.migrations import marked, outcomes, query
from tests.support.programs import psql
from tests.support.shell import Shell


@pytest.fixture
def seeing(dsn: str, role: str) -> str:
    """The DSN of a role that may only see."""
    schema.grant(resolve(dsn), role, may=["see"])
    return psycopg.conninfo.make_conninfo(dsn, user=role, password="app")


@pytest.mark.second_stage
def test_running_migration_shows_holder_statement_progress_and_waiters(shell: Shell, dsn: str, seeing: str) -> None:
    query(
        dsn,
        "CREATE FUNCTION slow(n int) RETURNS int IMMUTABLE LANGUAGE plpgsql"
        " AS 'BEGIN PERFORM pg_sleep(0.05); RETURN n; END';"
        " CREATE TABLE rows AS SELECT n FROM generate_series(1, 5000) AS n",
    )
    build = psql(dsn, "CREATE INDEX CONCURRENTLY by_n ON rows (slow(n))")
    running = shell.start("migrate", "--name", "m", "--version", "7", "--holder", "pod-1", "--", *build)
    eventually(
        lambda: query(dsn, "SELECT 1 FROM pg_stat_progress_create_index WHERE phase LIKE 'building%'"), "the build"
    )
    waiting = shell.start("migrate", "--name", "m", "--version", "7", "--holder", "pod-2", "--", "true")
    eventually(lambda: query(dsn, "SELECT 1 FROM dblock.list_waiters('m')"), "the waiter")
    (found,) = shell.run("migrations", "m", "--json", dsn=seeing).json["migrations"]
    assert [found[key] for key in ("name", "phase", "holder", "version", "waiting")] == [
        "m",
        "migrating",
        "pod-1",
        "7",
        1,
    ]
    assert found["token"] > 0
    assert found["since"] is not None
    assert [one["holder"] for one in found["waiters"]] == ["pod-2"]
    (session,) = found["sessions"]
    assert session["statement"].startswith("CREATE INDEX CONCURRENTLY by_n")
    assert session["seconds"] >= 0
    assert session["progress"]["relation"] == "public.rows"
    assert session["progress"]["phase"].startswith("building index")
    text = shell.run("migrations", dsn=seeing).out
    for words in ("migration  m", "phase      migrating, since", "holder     pod-1", "building index", "pod-2"):
        assert words in text
    for one in (running, waiting):
        one.terminate()
        one.wait(60)


@pytest.mark.second_stage
def test_sessions_that_block_a_statement_are_named(
    shell: Shell, dsn: str, seeing: str, owner: psycopg.Connection
) -> None:
    owner.execute("CREATE TABLE public.busy (n int)")
    with psycopg.connect(dsn, application_name="report") as blocker:
        blocker.execute("SELECT * FROM public.busy")
        running = shell.start("migrate", "--", *psql(dsn, "ALTER TABLE busy ADD COLUMN m int"))
        waits = "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'public.busy'::regclass"
        eventually(lambda: query(dsn, waits), "the wait")
        (found,) = shell.run("migrations", "--json").json["migrations"]
        (named,) = found["sessions"][0]["blockers"]
        assert (named["pid"], named["application"]) == (blocker.info.backend_pid, "report")
        assert named["statement"] == "SELECT * FROM public.busy"
        assert "blocked by" in shell.run("migrations").out
        (found,) = shell.run("migrations", "--json", dsn=seeing).json["migrations"]
        (named,) = found["sessions"][0]["blockers"]
        assert named["application"] == "report"
        assert named["statement"] is None, "Postgres does not show it to this role either"
    assert running.wait(60) == 0


@pytest.mark.alone
@pytest.mark.second_stage
def test_answer_takes_little_time_of_the_database(shell: Shell, dsn: str, owner: psycopg.Connection) -> None:
    owner.execute(
        "INSERT INTO migration_runs (name, token, version, migrator, holder, session_role, database_identity,"
        " started_at, ended_at, outcome) SELECT 'm' || n % 20, n, n::text, 'psql', 'pod', current_user,"
        " database_identity(), now(), now(), 'succeeded' FROM generate_series(1, 10000) AS n"
    )
    owner.execute("ANALYZE migration_runs")
    with overview(resolve(dsn)) as database:
        times = []
        for _ in range(20):  # the best of them counts, because other programs may delay most
            began = time.perf_counter()
            assert len(database.migrations()) == 20
            database.invalid_indexes()
            times.append(time.perf_counter() - began)
    assert min(times) < 0.2, times


@pytest.mark.second_stage
def test_every_run_is_in_the_ledger(shell: Shell, dsn: str) -> None:
    assert shell.run("migrate", "--name", "m", "--version", "1", "--", "sh", "-c", "echo no >&2; exit 2").code == 2
    killed = shell.run("migrate", "--name", "m", "--version", "2", "--", "sh", "-c", "kill -9 $$")
    assert killed.code == 137
    assert shell.run("migrate", "--name", "m", "--version", "2", "--", "true").code == 0
    (found,) = shell.run("migrations", "m", "--json").json["migrations"]
    shown = [(run["version"], run["outcome"], run["error"], run["migrator"]) for run in found["runs"]]
    assert shown == [
        ("2", "succeeded", None, "true"),
        ("2", "killed", "the command ended with exit code 137", "sh"),
        ("1", "failed", "no", "sh"),
    ]
    assert all(run["seconds"] >= 0 and " pid " in run["holder"] for run in found["runs"])
    assert found["phase"] == "done"
    lines = shell.run("migrations", "m").out.splitlines()
    assert [line.split()[1:3] for line in lines[-3:]] == [["2", "succeeded"], ["2", "killed"], ["1", "failed"]]


@pytest.mark.second_stage
def test_readiness_follows_the_version(shell: Shell, dsn: str, bare_dsn: str, seeing: str) -> None:
    assert shell.run("migrations", "--ready", "1", dsn=bare_dsn).code == 1, "dblock is not installed yet"
    assert shell.run("migrations", "--ready", "1", dsn=seeing).code == 1
    assert shell.run("migrate", "--version", "1", "--", "true").code == 0
    done = shell.run("migrations", "--ready", "1", dsn=seeing)
    assert done == (0, "migration 'migrate' to version '1' is done\n", "")
    assert shell.run("migrations", "other", "--ready", "1", "--json", dsn=seeing).json["ready"] is False


@pytest.mark.second_stage
def test_invalid_indexes_are_shown_and_reported_at_the_start(shell: Shell, dsn: str, tmp_path: Path) -> None:
    query(dsn, "CREATE TABLE doubled AS SELECT 1 AS n FROM generate_series(1, 2)")
    with pytest.raises(psycopg.errors.UniqueViolation):
        query(dsn, "CREATE UNIQUE INDEX CONCURRENTLY broken ON doubled (n)")
    assert shell.run("migrations", "--json").json == {
        "migrations": [],
        "invalid_indexes": [{"index": "public.broken", "table": "public.doubled"}],
        "guards": [],
    }
    assert "public.broken" in shell.run("migrations").out
    done = shell.run("migrate", "--", "true")
    assert done.code == 0
    assert "invalid indexes: public.broken on public.doubled" in done.err


def test_no_migration_is_said_on_standard_error(shell: Shell, dsn: str) -> None:
    assert shell.run("migrations") == (0, "", "No migration is recorded yet.\n")
    assert outcomes(dsn) == []
    assert marked(dsn) == 0


def test_role_without_a_privilege_is_told_which_one_it_needs(shell: Shell, dsn: str, role: str) -> None:
    schema.grant(resolve(dsn), role, may=["lock"])
    done = shell.run("migrations", dsn=psycopg.conninfo.make_conninfo(dsn, user=role, password="app"))
    assert done.code == 77
    assert "dblock grant ROLE --may see" in done.err
