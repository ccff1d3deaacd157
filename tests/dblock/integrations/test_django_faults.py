"""Many programs of Django at once, killed and stopped: each step takes effect once, and none from a stale holder."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psycopg
import pytest

from tests.dblock.integrations.django_cases import (
    MARKED,
    Start,
    applied,
    database,
    outcomes,
    project,
    rows,
    start,
    steps,
)
from tests.support.django_project import Program, Project
from tests.support.eventually import eventually
from tests.support.machine import measured

__all__ = ["database", "project", "start"]

SHORT_TTL = 5
"""Seconds that the lease of a program lasts that will be stopped. A busy machine must renew it in time."""

AT_ONCE = 5
"""Rounds that run at the same time, each in a schema of its own: most of a round is the wait for a lease to expire."""

COLUMN = "migrations.AddField('shop', 'extra', models.IntegerField(null=True))"
KEY = "migrations.AddField('sale', 'other', models.ForeignKey('Shop', models.CASCADE, null=True, related_name='+'))"
DROP_COLUMN = "SQL('ALTER TABLE shop_shop DROP COLUMN IF EXISTS extra')"
DROP_KEY = "SQL('ALTER TABLE shop_sale DROP COLUMN IF EXISTS other_id')"
INDEX = 'AddIndexConcurrently("shop", models.Index(fields=["name"], name="shop_name"))'
BUILDING = """
    SELECT pid FROM pg_stat_activity
    WHERE query LIKE 'CREATE INDEX%' AND state = 'active' AND datname = current_database()
"""
INDEXES = "SELECT i.indisvalid FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid WHERE c.relname = 'shop_name'"


def rounds(few: int, many: int) -> pytest.MarkDecorator:
    """Return the numbers of rounds for the second stage and for the nightly run."""
    return pytest.mark.parametrize(
        "rounds", [pytest.param(few, marks=pytest.mark.second_stage), pytest.param(many, marks=pytest.mark.nightly)]
    )


def in_schemas(rounds: int, database: psycopg.Connection, one: Callable[[str], None]) -> None:
    """Run rounds, some at the same time, each with a schema of its own. Their locks are different ones."""
    for first in range(0, rounds, AT_ONCE):
        schemas = [f"round{number}" for number in range(first, min(first + AT_ONCE, rounds))]
        for schema in schemas:
            database.execute(f"CREATE SCHEMA {schema}".encode())
        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(one, schemas))


@pytest.mark.timeout(0)
@rounds(2, 100)
def test_ten_replicas_on_an_empty_database_run_every_step_once(
    rounds: int, project: Project, start: Start, database: psycopg.Connection
) -> None:
    """After a third of the rounds, a step follows that builds an index concurrently."""
    for number in range(rounds):
        concurrently = number >= rounds // 3
        if number == rounds // 3:
            project.add_index()
        database.execute("DROP SCHEMA IF EXISTS dblock CASCADE")
        database.execute("DROP SCHEMA public CASCADE")
        database.execute("CREATE SCHEMA public")
        replicas = [start(project, "migrate", real=True) for _ in range(10)]
        assert [replica.wait(600) for replica in replicas] == [0] * 10, [replica.said for replica in replicas]
        assert steps(database) == ["initial", "index"][: 1 + concurrently]
        assert applied(database) == ["0001_initial", "0002_index"][: 1 + concurrently]
        assert rows(database, INDEXES) == [True] * concurrently
        assert outcomes(database) == ["succeeded"]


@pytest.mark.timeout(0)
@rounds(2, 100)
def test_statement_of_a_killed_program_ends_before_the_next_one_begins(
    rounds: int, project: Project, start: Start, database: psycopg.Connection
) -> None:
    check_kills(rounds, project, start, database)


def check_kills(
    rounds: int, project: Project, start: Start, database: psycopg.Connection, patience: float = 60
) -> None:
    project.run("migrate")
    project.add_index()
    database.execute("CREATE TABLE alone (others bigint)")
    alone = f"INSERT INTO alone SELECT count(*) FROM ({MARKED}) AS m WHERE pid <> pg_backend_pid()".replace("%", "%%")
    project.add("0002_index", f'SQL("""{alone}""", SQL.noop), {INDEX}', "0001_initial", atomic=False)
    for number in range(rounds):
        with psycopg.connect(project.dsn) as reader:
            # An index that is built concurrently waits for every older snapshot.
            reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            reader.execute("SELECT 1")
            killed = start(project, "migrate")
            eventually(partial(is_building, database, killed))
            (old,) = rows(database, BUILDING)
            assert rows(database, MARKED) == [old]
            killed.kill()
            next_one = start(project, "migrate")
            with measured() as lateness:
                began = time.monotonic()
                eventually(partial(is_gone, database, old), "the end of the killed session", patience)
                assert time.monotonic() - began < 5 + 20 * lateness()
            eventually(partial(is_building, database, next_one))
        assert next_one.wait() == 0, next_one.said
        assert rows(database, "SELECT others FROM alone") == [0, 0], "two sessions migrated at once"
        assert rows(database, INDEXES) == [True]
        assert applied(database) == ["0001_initial", "0002_index"]
        assert outcomes(database)[-2:] == ["killed", "succeeded"]
        if number < rounds - 1:
            project.run("migrate", "shop", "0001")
            database.execute("TRUNCATE alone")


def is_building(database: psycopg.Connection, program: Program) -> bool:
    return bool(rows(database, BUILDING)) or program.poll() is not None


def is_gone(database: psycopg.Connection, pid: int) -> bool:
    return pid not in rows(database, BUILDING)


@pytest.mark.second_stage
@pytest.mark.timeout(300)
def test_program_without_the_sweep_would_run_beside_the_old_statement(
    project: Project, start: Start, database: psycopg.Connection, seeded: Callable[[str], Path]
) -> None:
    project.packages = seeded(
        "import dblock.admin.migration_ledger as ledger\n"
        "ledger.MigrationLedger.end_sessions = lambda self, name, **how: 0\n"
        "import dblock.recipes.migrations.contract as contract\n"
        "right = contract.session_settings\n"
        "contract.session_settings = lambda *a: right(*a) | {'client_connection_check_interval': '0'}\n"
    )
    with pytest.raises(AssertionError):
        check_kills(1, project, start, database, patience=10)


def stop_where_it_pauses(program: Program, folder: Path) -> None:
    eventually(lambda: (folder / "paused").exists() or program.poll() is not None, "the pause", 300)
    assert program.poll() is None, program.said
    program.signal(signal.SIGSTOP)


@pytest.mark.second_stage
@pytest.mark.timeout(300)
def test_stopped_program_is_ended_within_its_ttl_and_commits_nothing(
    project: Project, start: Start, database: psycopg.Connection
) -> None:
    project.options = {"ttl": SHORT_TTL}
    project.add("0001_initial", "SQL('CREATE TABLE t ()'), PAUSE", more="initial = True")
    stopped = start(project, "migrate", PAUSE=str(project.folder))
    stop_where_it_pauses(stopped, project.folder)
    with measured() as lateness:
        began = time.monotonic()
        eventually(lambda: not rows(database, MARKED), "the end of the session")
        assert time.monotonic() - began < SHORT_TTL + 1 + 20 * lateness()
    (project.folder / "go").touch()
    stopped.signal(signal.SIGCONT)
    assert stopped.wait() != 0
    assert rows(database, "SELECT to_regclass('t')") == [None]
    assert applied(database) == []
    assert "succeeded" not in outcomes(database)


# A foreign key is deferred SQL, which Django executes after the last operation, and before it records the migration.
CASES = {
    "atomic": (f"{COLUMN}, note('stop')", True),
    "atomic, deferred": (f"{COLUMN}, {KEY}, note('stop')", True),
    "not atomic": (f"{DROP_COLUMN}, {COLUMN}, note('stop')", False),
    "not atomic, deferred": (f"{DROP_COLUMN}, {DROP_KEY}, {COLUMN}, {KEY}, note('stop')", False),
}


@pytest.mark.timeout(0)
@pytest.mark.parametrize("case", CASES)
@rounds(2, 100)
def test_program_that_was_stopped_before_its_record_never_commits(
    rounds: int, case: str, project: Project, start: Start, database: psycopg.Connection
) -> None:
    check_stops(rounds, case, project, start, database)


def check_stops(rounds: int, case: str, project: Project, start: Start, database: psycopg.Connection) -> None:
    short = {"PROJECT_DBLOCK": json.dumps({"ttl": SHORT_TTL})}
    operations, atomic = CASES[case]
    project.add("0002_stop", operations, "0001_initial", atomic=atomic)

    def one(schema: str) -> None:
        folder = project.folder / schema
        folder.mkdir()
        stopped = start(project, "migrate", schema=schema, PAUSE=str(folder), PAUSE_BEFORE="0002_stop", **short)
        stop_where_it_pauses(stopped, folder)
        next_one = start(project, "migrate", schema=schema)
        assert next_one.wait(300) == 0, next_one.said
        (folder / "go").touch()
        stopped.signal(signal.SIGCONT)
        assert stopped.wait(300) != 0, f"the stopped program has succeeded: {stopped.said}"

    in_schemas(rounds, database, one)
    for number in range(rounds):
        schema = f"round{number}"
        assert applied(database, schema) == ["0001_initial", "0002_stop"]
        assert steps(database, schema) == ["initial", "stop", "stop"][: 2 if atomic else 3]
        columns = f"SELECT count(*) FROM information_schema.columns WHERE table_schema = '{schema}'"
        assert rows(database, f"{columns} AND column_name = 'extra'") == [1]


@pytest.mark.second_stage
@pytest.mark.timeout(300)
def test_record_without_a_proof_would_be_written_by_a_stopped_program(
    project: Project, start: Start, database: psycopg.Connection, seeded: Callable[[str], Path]
) -> None:
    project.packages = seeded(
        "import dblock.admin.migration_ledger as ledger\n"
        "ledger.MigrationLedger.end_sessions = lambda self, name, **how: 0\n"
        "import dblock.recipes.migrations.gate as gate\n"
        "gate.Gate.proof = 'true'\n"
    )
    with pytest.raises(
        AssertionError, match="has succeeded|'0002_stop', '0002_stop'|contains one more item: '0002_stop'"
    ):
        check_stops(1, "not atomic", project, start, database)
