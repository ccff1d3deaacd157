"""`dblock migrate --drop-invalid` drops the invalid indexes that its scripts name, before the command."""

from __future__ import annotations

import threading
from pathlib import Path

import psycopg
import pytest

from dblock.admin import guard
from tests.support.eventually import eventually
from tests.support.migrations import outcomes, query
from tests.support.programs import psql
from tests.support.shell import Shell


def broken(dsn: str, *indexes: str) -> None:
    """Leave invalid indexes on a table whose rows are not unique."""
    query(dsn, "CREATE TABLE IF NOT EXISTS doubled AS SELECT 1 AS n FROM generate_series(1, 2)")
    for index in indexes:
        with pytest.raises(psycopg.errors.UniqueViolation):
            query(dsn, f"CREATE UNIQUE INDEX CONCURRENTLY {index} ON doubled (n)")


def indexes(dsn: str) -> list[tuple[str, bool]]:
    return query(
        dsn,
        "SELECT c.relname, i.indisvalid FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid"
        " WHERE c.relnamespace = 'public'::regnamespace ORDER BY 1",
    )


@pytest.mark.second_stage
def test_indexes_that_scripts_name_are_dropped_and_the_others_reported(shell: Shell, dsn: str, tmp_path: Path) -> None:
    broken(dsn, "mine", "yours", "theirs")
    guard.install(dsn, ["public"], ["migrate"])
    scripts = tmp_path / "scripts"
    (scripts / "more").mkdir(parents=True)
    (scripts / "1.sql").write_text("CREATE INDEX CONCURRENTLY mine ON doubled (n)")
    (scripts / "more" / "2.sql").write_text("CREATE INDEX CONCURRENTLY public.yours ON doubled (n)")
    (scripts / ".hidden").write_text("theirs")
    done = shell.run("migrate", "--drop-invalid", str(scripts), "--", *psql(dsn, scripts / "1.sql"))
    assert done.code == 0, done.err
    for index in ("mine", "yours"):
        assert f"dropped the invalid index public.{index} on public.doubled" in done.err
    assert "invalid indexes: public.theirs on public.doubled. Drop or reindex them." in done.err
    assert indexes(dsn) == [("mine", True), ("theirs", False)]


@pytest.mark.second_stage
def test_index_of_a_killed_build_is_dropped_and_built(shell: Shell, dsn: str, tmp_path: Path) -> None:
    query(
        dsn,
        "CREATE FUNCTION slow(n int) RETURNS int IMMUTABLE LANGUAGE plpgsql"
        " AS 'BEGIN PERFORM pg_sleep(0.05) WHERE n > 100; RETURN n; END';"
        " CREATE TABLE rows AS SELECT n FROM generate_series(1, 5000) AS n",
    )
    script = tmp_path / "1.sql"
    script.write_text("CREATE INDEX CONCURRENTLY by_n ON rows (slow(n))")

    def build() -> None:
        with pytest.raises(psycopg.OperationalError):
            query(dsn, script.read_text())

    builder = threading.Thread(target=build)
    builder.start()
    building = "SELECT pid FROM pg_stat_progress_create_index WHERE phase LIKE 'building index%%'"
    eventually(lambda: query(dsn, building), "the build")
    running = shell.run("migrate", "--drop-invalid", str(script), "--", "true")
    assert (running.code, "dropped" in running.err) == (0, False), "it is not invalid: a session is building it"
    query(dsn, building.replace("pid", "pg_terminate_backend(pid)", 1))
    builder.join()
    assert indexes(dsn) == [("by_n", False)]
    query(dsn, "DELETE FROM rows WHERE n > 100")
    query(dsn, "VACUUM rows")
    done = shell.run("migrate", "--drop-invalid", str(script), "--", *psql(dsn, script))
    assert done.code == 0, done.err
    assert "dropped the invalid index public.by_n on public.rows" in done.err
    assert indexes(dsn) == [("by_n", True)]


@pytest.mark.second_stage
def test_nothing_is_dropped_without_a_run(shell: Shell, dsn: str, tmp_path: Path) -> None:
    broken(dsn, "mine")
    script = tmp_path / "1.sql"
    script.write_text("mine")
    assert shell.run("migrate", "--drop-invalid", "no-such-file", "--", "true").code == 64
    assert shell.run("migrate", "--version", "1", "--wait-only", "--drop-invalid", str(script)).code == 64
    assert shell.run("migrate", "--check", "true", "--drop-invalid", str(script), "--", "true").code == 0
    assert indexes(dsn) == [("mine", False)]
    assert outcomes(dsn) == []
