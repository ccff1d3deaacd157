"""Many programs of Alembic at once, killed and stopped: each step takes effect once, and none from a stale holder."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psycopg
import pytest

from dblock._runtime.target import resolve
from dblock.admin.inspect import overview
from dblock.errors import LeaseLost
from dblock.integrations.alembic import EXIT_CODES
from tests.dblock.integrations.conftest import Projects, Start, marked, rows, runs
from tests.support.alembic_project import Project
from tests.support.eventually import eventually
from tests.support.machine import measured
from tests.support.stages import first

NOTE = "op.execute(\"INSERT INTO public.ran VALUES ('{0}')\")"
CREATE = "op.create_table('t', sa.Column('id', sa.Integer))"
ALTER = "op.execute('ALTER TABLE t ADD COLUMN {0} int')"
INDEX = """
with op.get_context().autocommit_block():
    op.execute("INSERT INTO public.alone SELECT count(*) FROM pg_stat_activity"
               " WHERE application_name LIKE 'dblock-migrate\\\\:%' AND pid <> pg_backend_pid()")
    op.execute('DROP INDEX CONCURRENTLY IF EXISTS i')
    op.execute('CREATE INDEX CONCURRENTLY i ON t (id)')
"""
PAUSE = """
if 'PAUSE' in os.environ:
    pathlib.Path('{0}/paused').touch()
    while not pathlib.Path('{0}/go').exists():
        time.sleep(0.05)
"""
SECOND = "SELECT 1 FROM public.alone OFFSET 1"
"""Whether a second program has begun with its index."""
BUILDING = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'CREATE INDEX%' AND state = 'active'"
INDEXES = "SELECT c.relname, i.indisvalid FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid WHERE c.relname = 'i'"


def rounds(few: int, many: int) -> pytest.MarkDecorator:
    """Return the numbers of rounds for the second stage and for the nightly run."""
    return pytest.mark.parametrize(
        "rounds", [pytest.param(few, marks=pytest.mark.second_stage), pytest.param(many, marks=pytest.mark.nightly)]
    )


def prepare(owner: psycopg.Connection, *, bare: bool = False) -> None:
    """Empty the database, as far as the migrations and the tests of this module fill it."""
    owner.execute("DROP SCHEMA public CASCADE")
    owner.execute("CREATE SCHEMA public")
    owner.execute("CREATE TABLE public.ran (revision text)")
    owner.execute("CREATE TABLE public.alone (others bigint)")
    if bare:
        owner.execute("DROP SCHEMA IF EXISTS dblock CASCADE")


def replicas_succeed(project: Project, start: Start, number: int) -> None:
    started = [start(project, "upgrade", "head") for _ in range(number)]
    said = [one.communicate(timeout=600)[1] for one in started]
    assert [one.returncode for one in started] == [0] * number, said


@pytest.mark.second_stage
def test_two_replicas_run_every_step_once(projects: Projects, start: Start, owner: psycopg.Connection) -> None:
    prepare(owner)
    project = projects()
    project.revision("a", None, f"{CREATE}\n{NOTE.format('a')}")
    project.revision("b", "a", f"{INDEX}\n{NOTE.format('b')}")
    replicas_succeed(project, start, 2)
    assert rows(owner, "SELECT revision FROM public.ran ORDER BY 1") == ["a", "b"]
    assert rows(owner, INDEXES) == [("i", True)]


@pytest.mark.timeout(0)
@rounds(2, 100)
def test_ten_replicas_on_an_empty_database_run_every_step_once(
    rounds: int, projects: Projects, start: Start, owner: psycopg.Connection
) -> None:
    """In every second round all steps are transactions; in the others one builds an index concurrently."""
    alternate = []
    for step in (INDEX, ALTER.format("b")):
        project = projects(gate="ttl=60")
        project.revision("a", None, f"{CREATE}\n{NOTE.format('a')}")
        project.revision("b", "a", f"{step}\n{NOTE.format('b')}")
        project.revision("c", "b", f"{ALTER.format('c')}\n{NOTE.format('c')}")
        alternate.append(project)
    for number in range(rounds):
        prepare(owner, bare=True)
        replicas_succeed(alternate[number % 2], start, 10)
        assert rows(owner, "SELECT revision FROM public.ran ORDER BY 1") == ["a", "b", "c"]
        assert rows(owner, INDEXES) == [("i", True)] * (number % 2 == 0)
        assert rows(owner, "SELECT outcome FROM dblock.migration_runs") == ["succeeded"]


@pytest.mark.timeout(0)
@rounds(2, 100)
def test_statement_of_a_killed_program_ends_before_the_next_one_begins(
    rounds: int, dsn: str, projects: Projects, start: Start, owner: psycopg.Connection
) -> None:
    check_kills(rounds, projects(), dsn, start, owner)


def is_gone(owner: psycopg.Connection, pid: int) -> bool:
    return pid not in marked(owner)


def is_gone_or_late(owner: psycopg.Connection, pid: int) -> bool:
    return is_gone(owner, pid) or bool(rows(owner, SECOND))


def check_kills(rounds: int, project: Project, dsn: str, start: Start, owner: psycopg.Connection) -> None:
    project.revision("a", None, CREATE)
    project.revision("b", "a", INDEX)
    for _ in range(rounds):
        prepare(owner)
        with psycopg.connect(dsn) as reader:
            # An index that is built concurrently waits for every older snapshot.
            reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            reader.execute("SELECT 1")
            killed = start(project, "upgrade", "head")
            eventually(lambda: rows(owner, BUILDING))
            (old,) = marked(owner)
            assert rows(owner, BUILDING) == [old]
            with measured() as lateness:
                killed.kill()
                next_one = start(project, "upgrade", "head")
                began = time.monotonic()
                eventually(partial(is_gone_or_late, owner, old), "the end of the killed session")
                took = time.monotonic() - began
                assert is_gone(owner, old), "two sessions migrated at once"
                assert took < 5 + 20 * lateness()
            eventually(lambda: rows(owner, SECOND))
        assert next_one.wait(120) == 0, next_one.communicate()
        assert rows(owner, "SELECT DISTINCT others FROM public.alone") == [0], "two sessions migrated at once"
        assert rows(owner, INDEXES) == [("i", True)]
        assert runs(owner)[-2:] == ["killed", "succeeded"]


@pytest.mark.second_stage
@pytest.mark.timeout(300)
def test_program_without_the_sweep_would_run_beside_the_old_statement(
    dsn: str, projects: Projects, start: Start, owner: psycopg.Connection, seeded: Callable[[str], Path]
) -> None:
    packages = seeded(
        "import dblock.admin.migration_ledger as ledger\n"
        "ledger.MigrationLedger.end_sessions = lambda self, name, **how: 0\n"
        "import dblock.recipes.migrations.contract as contract\n"
        "right = contract.session_settings\n"
        "contract.session_settings = lambda *a: right(*a) | {'client_connection_check_interval': '0'}\n"
    )
    with pytest.raises(AssertionError, match="two sessions migrated at once"):
        check_kills(1, projects(packages=packages), dsn, start, owner)


def paused(project: Project, start: Start) -> subprocess.Popen[str]:
    """Start a program, and stop it where its migration pauses."""
    (project.folder / "paused").unlink(missing_ok=True)
    stopped = start(project, "upgrade", "head", PAUSE="1")
    eventually(lambda: (project.folder / "paused").exists(), "the pause", 120)
    stopped.send_signal(signal.SIGSTOP)
    return stopped


@pytest.mark.timeout(0)
@rounds(2, 100)
def test_stopped_program_is_ended_within_its_ttl_and_never_commits(
    rounds: int, projects: Projects, start: Start, owner: psycopg.Connection
) -> None:
    """It is stopped between its last DDL and its version row; in every second round each step is a transaction."""
    alternate = []
    for per_migration in (False, True):
        project = projects(gate="ttl=3", configure=f"transaction_per_migration={per_migration}")
        project.revision("a", None, CREATE)
        project.revision("b", "a", f"{ALTER.format('b')}\n{NOTE.format('b')}\n{PAUSE.format(project.folder)}")
        alternate.append(project)
    for number in range(rounds):
        project = alternate[number % 2]
        prepare(owner)
        (project.folder / "go").unlink(missing_ok=True)
        stopped = paused(project, start)
        with measured() as lateness:
            began = time.monotonic()
            eventually(lambda: not marked(owner), "the end of the session")
            assert time.monotonic() - began < 3 + 1 + 20 * lateness()
        next_one = start(project, "upgrade", "head")
        (project.folder / "go").touch()
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(120) != 0
        assert next_one.wait(120) == 0, next_one.communicate()
        assert rows(owner, "SELECT revision FROM public.ran") == ["b"]
        assert rows(owner, "SELECT version_num FROM public.alembic_version") == ["b"]
        before, last = runs(owner)[-2:]
        assert before in ("lost", "killed"), "the program reports it, or else the next one"
        assert last == "succeeded"


@pytest.mark.second_stage
@pytest.mark.timeout(300)
def test_forced_release_ends_the_program_with_its_own_code(
    dsn: str, projects: Projects, start: Start, owner: psycopg.Connection
) -> None:
    project = projects()
    project.revision("a", None, f"{CREATE}\nop.execute('SELECT pg_sleep(600)')")
    forced = start(project, "upgrade", "head")
    eventually(lambda: rows(owner, "SELECT 1 FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(600)'"))
    with measured() as lateness:
        with overview(resolve(dsn)) as database:
            (lock,) = database.locks("alembic:public.alembic_version")
            assert database.force_release(lock.name, lock.number, actor="ann", reason="stuck", now=True)
        began = time.monotonic()
        eventually(lambda: not marked(owner), "the end of the session")
        assert time.monotonic() - began < 1 + 20 * lateness()
    _, said = forced.communicate(timeout=120)
    assert forced.returncode == EXIT_CODES[LeaseLost], said
    assert rows(owner, "SELECT to_regclass('public.t')") == [None]
    assert runs(owner) == ["lost"]


@pytest.mark.second_stage
@pytest.mark.timeout(300)
def test_migration_that_holds_the_interpreter_keeps_its_lease(projects: Projects, owner: psycopg.Connection) -> None:
    project = projects(gate="ttl=3")
    # PyDLL keeps the interpreter's lock.
    project.revision("a", None, f"{CREATE}\nctypes.PyDLL(None).usleep(9_000_000)\n{ALTER.format('x')}")
    assert project.run("upgrade", "head")[0] == 0
    assert runs(owner) == ["succeeded"]


@pytest.mark.second_stage
def test_timeout_of_the_role_does_not_cut_an_index_build(
    dsn: str, projects: Projects, start: Start, owner: psycopg.Connection
) -> None:
    prepare(owner)
    owner.execute("CREATE TABLE public.t (id int)")
    database = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
    owner.execute(f"ALTER DATABASE {database} SET statement_timeout = '1s'".encode())
    project = projects()
    project.revision("a", None, INDEX)
    with psycopg.connect(dsn, options="-c statement_timeout=0") as reader:
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reader.execute("SELECT 1")
        building = start(project, "upgrade", "head")
        running = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'CREATE INDEX%' AND now() - query_start > '2.5 s'"
        eventually(lambda: rows(owner, running))
    assert building.wait(60) == 0
    assert rows(owner, INDEXES) == [("i", True)]


@pytest.mark.second_stage
@pytest.mark.parametrize("fence", first(1, ["None", "True"]))
def test_program_without_the_gate_fails_at_its_version_row(
    fence: str, projects: Projects, owner: psycopg.Connection
) -> None:
    check_ungated(projects(gate=f"fence={fence}"), projects(gate=None), owner)


@pytest.mark.second_stage
def test_version_table_without_a_fence_would_accept_a_program_without_the_gate(
    projects: Projects, owner: psycopg.Connection
) -> None:
    with pytest.raises(AssertionError, match="did not fail"):
        check_ungated(projects(gate="fence=False"), projects(gate=None), owner)


def check_ungated(gated: Project, ungated: Project, owner: psycopg.Connection) -> None:
    for project in (gated, ungated):
        project.revision("a", None, CREATE)
    assert gated.call("upgrade", "head")[0] == 0
    ungated.revision("b", "a", ALTER.format("b"))
    try:
        ungated.call("upgrade", "head")
    except Exception as error:
        assert "carries no fencing token" in str(error)
    else:
        raise AssertionError("the program without the gate did not fail")
    assert rows(owner, "SELECT count(*) FROM information_schema.columns WHERE table_name = 't'") == [1]
    assert rows(owner, "SELECT version_num FROM public.alembic_version") == ["a"]
    gated.revision("b", "a", ALTER.format("b"))
    assert gated.call("upgrade", "head")[0] == 0
    assert rows(owner, "SELECT version_num FROM public.alembic_version") == ["b"]
