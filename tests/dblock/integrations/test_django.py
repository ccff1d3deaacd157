"""Django's migrate behind the gate: the real manage.py, many at once, killed and stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support.django_project import Project, step

SLOW = "SELECT pg_sleep(30)"


@pytest.fixture
def project(tmp_path: Path, bare_dsn: str) -> Project:
    return Project(tmp_path, bare_dsn)


@pytest.fixture
def database(bare_dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(bare_dsn, autocommit=True) as connection:
        yield connection


def eventually(holds: Callable[[], object], patience: float = 60.0) -> float:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() < began + patience, "it did not happen in time"
        time.sleep(0.02)
    return time.monotonic() - began


def steps(database: psycopg.Connection) -> list[str]:
    return [row[0] for row in database.execute("SELECT step FROM steps ORDER BY at").fetchall()]


def applied(database: psycopg.Connection) -> list[str]:
    rows = database.execute("SELECT name FROM django_migrations WHERE app = 'shop' ORDER BY id").fetchall()
    return [row[0] for row in rows]


def migrating(database: psycopg.Connection, state: str) -> bool:
    found = "SELECT 1 FROM pg_stat_activity WHERE application_name LIKE 'dblock-migrate:%%' AND state = %s"
    return database.execute(found, [state]).fetchone() is not None


@pytest.mark.second_stage
@pytest.mark.parametrize("round_number", range(3))
def test_ten_replicas_at_once_migrate_an_empty_database_once(
    project: Project, database: psycopg.Connection, round_number: int
) -> None:
    replicas = [project.start("migrate") for _ in range(10)]
    said = [replica.communicate(timeout=110) for replica in replicas]
    assert [replica.returncode for replica in replicas] == [0] * 10, said
    assert steps(database) == ["initial", "index"]
    assert applied(database) == ["0001_initial", "0002_index"]
    assert database.execute("SELECT outcome FROM dblock.migration_runs").fetchall() == [("succeeded",)]


@pytest.mark.second_stage
def test_nothing_to_do_takes_no_lock_and_writes_nothing(project: Project, database: psycopg.Connection) -> None:
    project.run("migrate")
    before = database.execute("SELECT name, token FROM dblock.distributed_locks").fetchall()
    assert before[0][0] == "django:public"
    project.run("migrate")
    assert database.execute("SELECT name, token FROM dblock.distributed_locks").fetchall() == before
    assert database.execute("SELECT count(*) FROM dblock.migration_runs").fetchone() == (1,)


@pytest.mark.second_stage
def test_reading_commands_answer_while_a_migration_runs(project: Project, database: psycopg.Connection) -> None:
    project.run("migrate")
    project.add("0003_slow", step("slow", "0002_index", SLOW))
    slow = project.start("migrate")
    eventually(lambda: migrating(database, "active"))
    assert "[ ] 0003_slow" in project.run("showmigrations", "shop")
    assert "0003_slow" in project.run("migrate", "--plan")
    check = project.start("migrate", "--check")
    check.communicate(timeout=30)
    assert check.returncode == 1
    slow.kill()
    slow.communicate()


@pytest.mark.second_stage
def test_migration_and_its_record_commit_together(project: Project, database: psycopg.Connection) -> None:
    """Without the gate Django records a migration with deferred SQL after its transaction."""
    database.execute(
        """
        CREATE TABLE django_migrations
            (id bigserial PRIMARY KEY, app varchar(255), name varchar(255), applied timestamptz);
        CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no record'; END $$;
        CREATE TRIGGER fail BEFORE INSERT ON django_migrations FOR EACH ROW EXECUTE FUNCTION fail();
        """
    )
    replica = project.start("migrate")
    _, said = replica.communicate(timeout=60)
    assert replica.returncode == 1
    assert "no record" in said
    assert database.execute("SELECT to_regclass('shop_shop')").fetchone() == (None,)


@pytest.mark.second_stage
def test_killed_migration_is_finished_by_the_next_replica(project: Project, database: psycopg.Connection) -> None:
    project.run("migrate")
    project.add("0003_slow", step("slow", "0002_index", "SELECT pg_sleep(3)"))
    killed = project.start("migrate")
    eventually(lambda: migrating(database, "active"))
    killed.kill()
    killed.communicate()
    project.run("migrate")
    assert steps(database) == ["initial", "index", "slow"]
    outcomes = database.execute("SELECT outcome FROM dblock.migration_runs ORDER BY run").fetchall()
    assert outcomes == [("succeeded",), ("killed",), ("succeeded",)]


@pytest.mark.second_stage
def test_stopped_migration_is_ended_and_commits_nothing(project: Project, database: psycopg.Connection) -> None:
    project.run("migrate")
    project.add("0003_stop", step("stop", "0002_index", "SELECT pg_sleep(1)"))
    stopped = project.start("migrate")
    eventually(lambda: migrating(database, "active"))
    stopped.send_signal(signal.SIGSTOP)
    eventually(lambda: migrating(database, "idle in transaction"))
    assert eventually(lambda: not migrating(database, "idle in transaction")) < 3.0 + 1.0
    project.run("migrate")
    stopped.send_signal(signal.SIGCONT)
    stopped.communicate(timeout=60)
    assert stopped.returncode != 0
    assert steps(database) == ["initial", "index", "stop"], "once, by the second replica"
    assert applied(database) == ["0001_initial", "0002_index", "0003_stop"]


@pytest.mark.second_stage
def test_failure_is_told_to_the_other_replicas(project: Project, database: psycopg.Connection) -> None:
    project.run("migrate")
    project.add("0003_fails", step("fails", "0002_index", "SELECT 1 / (SELECT count(*) FROM pg_sleep(1) WHERE false)"))
    replicas = [project.start("migrate") for _ in range(4)]
    said = [replica.communicate(timeout=110)[1] for replica in replicas]
    assert [replica.returncode for replica in replicas] == [1] * 4
    assert sum("has failed once" in text and "division by zero" in text for text in said) == 3, said
    assert database.execute("SELECT count(*) FROM dblock.migration_runs WHERE outcome = 'failed'").fetchone() == (1,)


@pytest.mark.second_stage
def test_migration_can_be_taken_back_and_applied_again(project: Project, database: psycopg.Connection) -> None:
    project.run("migrate")
    project.run("migrate", "shop", "0001")
    assert applied(database) == ["0001_initial"]
    project.run("migrate")
    assert applied(database) == ["0001_initial", "0002_index"]


@pytest.mark.second_stage
def test_lock_timeout_is_retried_and_does_not_stall_readers(project: Project, database: psycopg.Connection) -> None:
    project.options |= {"lock_timeout": 0.3}
    project.run("migrate")
    project.add("0003_alter", step("alter", "0002_index", "ALTER TABLE shop_shop ADD COLUMN extra int"))
    with psycopg.connect(project.dsn) as reader:
        reader.execute("SELECT count(*) FROM shop_shop")  # in an open transaction
        migration = project.start("migrate")
        worst = 0.0
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline:
            began = time.monotonic()
            database.execute("SELECT count(*) FROM shop_shop")
            worst = max(worst, time.monotonic() - began)
            time.sleep(0.01)
        reader.rollback()
        out, said = migration.communicate(timeout=100)
    assert migration.returncode == 0, out + said
    assert worst < 0.3 + 0.5
    assert steps(database) == ["initial", "index", "alter"]


@pytest.mark.second_stage
def test_unknown_setting_is_refused(project: Project) -> None:
    project.options = {"tll": 3}
    wrong = project.start("migrate")
    _, said = wrong.communicate(timeout=60)
    assert wrong.returncode == 1
    assert "DBLOCK_MIGRATE has no setting 'tll'" in said


@pytest.mark.second_stage
def test_two_schemas_of_one_database_do_not_wait_for_each_other(
    tmp_path: Path, bare_dsn: str, database: psycopg.Connection
) -> None:
    database.execute("CREATE SCHEMA other")
    one, two = Project(tmp_path / "one", bare_dsn), Project(tmp_path / "two", bare_dsn)
    one.add("0003_slow", step("slow", "0002_index", SLOW))
    slow = one.start("migrate")
    eventually(lambda: migrating(database, "active"))
    two.search_path = "other"
    two.run("migrate")
    assert slow.poll() is None
    assert database.execute("SELECT to_regclass('other.shop_shop') IS NULL").fetchone() == (False,)
    slow.kill()
    slow.communicate()
