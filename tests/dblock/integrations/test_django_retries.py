"""Django's migrations on busy tables: transactions are retried, blockers are named, and index builds are not cut."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator

import psycopg
import pytest

from tests.dblock.integrations.django_cases import Start, applied, database, outcomes, project, rows, start
from tests.support.django_project import Project
from tests.support.eventually import eventually
from tests.support.machine import measured

__all__ = ["database", "project", "start"]

pytestmark = [pytest.mark.second_stage, pytest.mark.timeout(300)]

ALTER = "SQL('ALTER TABLE shop_shop ADD COLUMN extra int')"
INDEXES = "SELECT i.indisvalid FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid WHERE c.relname = 'shop_name'"


@pytest.fixture
def blocker(project: Project) -> Iterator[psycopg.Connection]:
    """A session that reads a table in a transaction, and so keeps every ALTER TABLE from it."""
    project.run("migrate")
    with psycopg.connect(project.dsn, application_name="billing") as connection:
        connection.execute("SELECT id, 'a long report' FROM shop_shop")
        yield connection


def test_transaction_that_cannot_lock_a_table_is_run_again(
    project: Project, start: Start, database: psycopg.Connection, blocker: psycopg.Connection
) -> None:
    project.options |= {"lock_timeout": 0.4}
    project.add("0002_alter", ALTER, "0001_initial")
    slowest = 0.0
    with measured() as lateness:
        migrating = start(project, "migrate")
        while migrating.poll() is None:
            began = time.monotonic()
            database.execute("SELECT count(*) FROM shop_shop")
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(0.01)
            if "is run again" in migrating.said:
                blocker.rollback()
        assert slowest < 0.4 + 0.2 + 20 * lateness()
    assert migrating.wait() == 0, migrating.said
    assert re.search(
        rf"Blocked by pid {blocker.info.backend_pid}, for [0-9.]+ s, application 'billing'", migrating.said
    )
    assert applied(database) == ["0001_initial", "0002_alter"]
    assert outcomes(database) == ["succeeded"] * 2


def test_blockers_are_named_when_the_tries_are_used_up(
    project: Project, database: psycopg.Connection, blocker: psycopg.Connection
) -> None:
    project.options |= {"lock_timeout": 0.8, "retries": 0}
    project.add("0002_alter", ALTER, "0001_initial")
    others = [psycopg.connect(project.dsn) for _ in range(6)]
    for other in others:
        other.execute("SELECT id FROM shop_shop")
    said = project.run("migrate", code=1)
    for other in others:
        other.close()
    named = f"pid {blocker.info.backend_pid}, for [0-9.]+ s, application 'billing': SELECT id, 'a long report' FROM"
    assert re.search(named, said), said
    assert said.count("pid ") == 5
    assert outcomes(database)[-1] == "blocked"
    assert rows(database, "SELECT error LIKE 'MigrationBlocked: %billing%' FROM dblock.migration_runs")[-1]


def test_deadlock_is_run_again(project: Project, start: Start, database: psycopg.Connection) -> None:
    project.run("migrate")
    project.add("0002_alter", f"{ALTER}, PAUSE, SQL('ALTER TABLE shop_sale ADD COLUMN more int')", "0001_initial")
    migrating = start(project, "migrate", PAUSE=str(project.folder))

    def cross() -> None:
        with psycopg.connect(project.dsn, options="-c deadlock_timeout=60s") as other:
            other.execute("LOCK TABLE shop_sale IN ACCESS EXCLUSIVE MODE")
            eventually((project.folder / "paused").exists)
            (project.folder / "go").touch()
            other.execute("LOCK TABLE shop_shop IN ACCESS EXCLUSIVE MODE")

    crossing = threading.Thread(target=cross)
    crossing.start()
    assert migrating.wait() == 0, migrating.said
    crossing.join()
    assert "deadlocked (try 1 of 11)" in migrating.said
    assert applied(database) == ["0001_initial", "0002_alter"]


def test_timeouts_do_not_cut_an_index_build(project: Project, start: Start, database: psycopg.Connection) -> None:
    """Neither the role's timeouts nor the lock_timeout of transactions apply outside of transactions."""
    project.run("migrate")
    (name,) = rows(database, "SELECT current_database()")
    for setting in ("statement_timeout", "lock_timeout"):
        database.execute(f"ALTER DATABASE {name} SET {setting} = '2s'".encode())
    project.options |= {"lock_timeout": 0.3}
    project.add_index()
    with psycopg.connect(project.dsn, options="-c statement_timeout=0") as reader:
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reader.execute("SELECT 1")
        building = start(project, "migrate")
        running = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'CREATE INDEX%' AND now() - query_start > '3.5 s'"
        running += " AND datname = current_database()"
        eventually(lambda: rows(database, running) or building.poll() is not None)
    assert building.wait() == 0, building.said
    assert rows(database, INDEXES) == [True]


def test_migration_that_is_not_atomic_is_not_run_again(
    project: Project, database: psycopg.Connection, blocker: psycopg.Connection
) -> None:
    project.options |= {"lock_timeout": 0.8}
    alter = "lambda apps, editor: editor.execute('ALTER TABLE shop_shop ADD COLUMN extra int')"
    project.add("0002_alter", f"note('part'), migrations.RunPython({alter}, atomic=True)", "0001_initial", atomic=False)
    said = project.run("migrate", code=1)
    assert "is not run again, because it is not atomic. Blocked by pid" in said
    assert rows(database, "SELECT count(*) FROM steps WHERE step = 'part'") == [1]
