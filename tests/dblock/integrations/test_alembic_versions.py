"""The gate with the oldest Alembic that is supported, in the real program, and behind a promotion of the database."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from dblock._runtime.target import resolve
from dblock.admin import schema
from tests.dblock.integrations.conftest import Projects, Start, rows, runs
from tests.fenced_store.postgres.test_alembic_versions import OLDEST, folder_of
from tests.support import standby
from tests.support.eventually import eventually
from tests.support.servers import private_server

CREATE = "op.create_table('t', sa.Column('id', sa.Integer))"
PART = "with op.get_context().autocommit_block():\n    op.execute('CREATE INDEX CONCURRENTLY i ON t (id)')"
WAIT = """
if 'WAIT' in os.environ:
    pathlib.Path({running!r}).touch()
    while not pathlib.Path({go!r}).exists():
        time.sleep(0.05)
"""
FAIL = "op.execute('SELECT 1 / (SELECT 0)')"


@pytest.mark.second_stage
def test_oldest_alembic_migrates_behind_the_gate(tmp_path: Path, projects: Projects, owner: psycopg.Connection) -> None:
    project = projects(packages=folder_of(OLDEST, tmp_path / "packages"))
    project.revision("a", None, CREATE, "op.drop_table('t')")
    project.revision("b", "a", PART, "op.drop_index('i')")
    assert project.run("--version")[1].split()[-1].startswith(OLDEST)
    for command in (["upgrade", "head"], ["upgrade", "head"], ["current"], ["downgrade", "-1"], ["stamp", "b"]):
        code, said = project.run(*command)
        assert code == 0, said
    assert runs(owner) == ["succeeded"] * 3
    assert rows(owner, "SELECT version_num FROM public.alembic_version") == ["b"]
    project.revision("c", "b", FAIL)
    assert "division by zero" in project.run("upgrade", "head")[1]
    code, said = project.run("upgrade", "head")
    assert code == 65
    assert "division by zero" in said


@pytest.mark.second_stage
def test_another_replica_finishes_after_a_promotion(projects: Projects, start: Start) -> None:
    with private_server() as primary, standby.standby_of(primary) as follower:
        schema.install(resolve(primary.url))
        first, second = (projects(on=server.url, gate="ttl=3") for server in (primary, follower))
        running, go = (first.folder / name for name in ("running", "go"))
        for project in (first, second):
            project.revision("a", None, CREATE)
            project.revision("b", "a", "op.execute('ALTER TABLE t ADD COLUMN b int')")
            project.revision("c", "b", WAIT.format(running=str(running), go=str(go)))
        migrating = start(first, "upgrade", "head", WAIT="1")
        eventually(running.exists)
        standby.wait_until_caught_up(primary, follower)
        standby.kill(primary)
        standby.promote(follower)
        code, said = second.run("upgrade", "head")
        assert code == 0, said
        go.touch()
        assert migrating.wait(60) != 0
        with psycopg.connect(follower.url, autocommit=True) as owner:
            assert rows(owner, "SELECT version_num FROM public.alembic_version") == ["c"]
            assert rows(owner, "SELECT outcome FROM dblock.migration_runs ORDER BY run") == ["killed", "succeeded"]
