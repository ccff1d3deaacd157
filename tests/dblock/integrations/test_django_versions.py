"""The gate with the oldest Django that is supported, in the real program, and behind a pooler in transaction mode."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from tests.dblock.integrations.django_cases import Start, applied, database, outcomes, project, rows, start, steps
from tests.support.django_project import ROOT, Project
from tests.support.pooler import needs_pgbouncer, pooled

__all__ = ["database", "project", "start"]

OLDEST = re.findall(r'"django>=([0-9.]+)', (ROOT / "pyproject.toml").read_text())[0]
ADVISORY = """
    SELECT count(*) FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database
    WHERE l.locktype = 'advisory' AND d.datname = current_database()
"""
ALTER = "SQL('ALTER TABLE shop_shop ADD COLUMN extra int')"


def install(version: str, folder: Path) -> Path:
    """Install this version of Django into a folder."""
    for pip in ([sys.executable, "-m", "pip", "install"], ["uv", "pip", "install", "--python", sys.executable]):
        if shutil.which(pip[0]) is None:
            continue
        command = [*pip, "--quiet", "--no-deps", "--target", str(folder), f"django=={version}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return folder
    pytest.skip(f"Django {version} cannot be installed here: {done.stderr.strip()[-200:]}")


@pytest.mark.second_stage
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="that Django supports Python up to 3.12")
def test_oldest_django_migrates_behind_the_gate(project: Project, database: psycopg.Connection, tmp_path: Path) -> None:
    project.packages = install(OLDEST, tmp_path / "packages")
    project.add_index()
    assert project.run("version").startswith(OLDEST)
    for command in (["migrate"], ["migrate"], ["showmigrations"], ["migrate", "shop", "0001"], ["migrate", "--fake"]):
        project.run(*command)
    assert applied(database) == ["0001_initial", "0002_index"]
    assert outcomes(database) == ["succeeded"] * 3
    project.add("0003_fails", "SQL('SELECT 1 / (SELECT 0)')", "0002_index")
    assert "division by zero" in project.run("migrate", code=1)
    assert "division by zero" in project.run("migrate", code=65)


@needs_pgbouncer
@pytest.mark.second_stage
def test_replicas_behind_a_pooler_run_every_step_once(
    project: Project, start: Start, database: psycopg.Connection
) -> None:
    project.add_index()
    project.add("0003_alter", ALTER, "0002_index")
    before = rows(database, ADVISORY)
    project.options |= {"listen_dsn": project.dsn}
    with pooled(project.dsn) as project.dsn:
        replicas = [start(project, "migrate") for _ in range(10)]
        assert [replica.wait(300) for replica in replicas] == [0] * 10, [replica.said for replica in replicas]
        left = "SELECT DISTINCT setting FROM pg_settings WHERE name = 'lock_timeout'"
        with psycopg.connect(project.dsn) as other:
            assert rows(other, left) == ["0"]
    assert steps(database) == ["initial", "index"]
    assert applied(database) == ["0001_initial", "0002_index", "0003_alter"]
    assert outcomes(database) == ["succeeded"]
    assert rows(database, ADVISORY) == before
