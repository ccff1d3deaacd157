"""The gate in env.py: which commands take the lock, on which connections it works, and what it costs at the head."""

from __future__ import annotations

import importlib.util
import logging
import re
import time
from typing import Any

import psycopg
import pytest

from dblock.errors import DatabaseAhead, InvalidArgument
from dblock.integrations.alembic import EXIT_CODES, migration_gate
from dblock.integrations.alembic import style as styles
from tests.dblock.integrations.conftest import Projects, Start, rows, runs
from tests.support.alembic_project import Project
from tests.support.eventually import eventually
from tests.support.machine import measured
from tests.support.stages import first

CREATE = "op.create_table('t', sa.Column('id', sa.Integer))"
DROP = "op.drop_table('t')"
TOKEN = "op.execute(\"INSERT INTO seen SELECT current_setting('application_name'), current_setting('{setting}')\")"
CONCURRENTLY = "with op.get_context().autocommit_block():\n    op.execute('CREATE INDEX CONCURRENTLY i ON t (id)')"

DRIVERS = [
    name
    for name, module in (("psycopg", "psycopg"), ("psycopg2", "psycopg2"), ("asyncpg", "asyncpg"))
    if importlib.util.find_spec(module)
]


PATIENCE = 1800
"""Seconds for a hundred programs to start on a busy machine."""


def first_of(number: int, rows: list[Any]) -> list[Any]:
    """Return rows of parameters, of which all but the first few are for the second stage."""
    return [*rows[:number], *(pytest.param(*row, marks=pytest.mark.second_stage) for row in rows[number:])]


def exists(owner: psycopg.Connection, table: str) -> bool:
    return rows(owner, f"SELECT to_regclass('public.{table}') IS NOT NULL") == [True]


def grants(owner: psycopg.Connection) -> int:
    return len(rows(owner, "SELECT token FROM distributed_locks")) + len(runs(owner))


@pytest.mark.second_stage
@pytest.mark.parametrize(
    ("style", "driver"),
    first_of(
        2,
        [
            ("connect", "psycopg"),
            ("begin", "psycopg"),
            ("async", "psycopg"),
            ("statement before", "psycopg"),
            ("committed statement before", "psycopg"),
            ("autocommit", "psycopg"),
            *((style, "psycopg2") for style in ("connect", "begin", "statement before") if "psycopg2" in DRIVERS),
            *((style, "asyncpg") for style in ("async",) if "asyncpg" in DRIVERS),
        ],
    ),
)
def test_tables_are_there_afterwards_or_an_error_came_before_the_first_statement(
    style: str, driver: str, projects: Projects, owner: psycopg.Connection
) -> None:
    check_style_of_env(projects(style=style, driver=driver), owner)


def check_style_of_env(project: Project, owner: psycopg.Connection) -> None:
    project.revision("a", None, CREATE, DROP)
    project.revision("b", "a", "op.execute('ALTER TABLE t ADD COLUMN b int')")
    code, said = project.call("upgrade", "head")
    if code == 0:
        assert exists(owner, "t"), "the program succeeded, and the migrations were rolled back"
        assert rows(owner, "SELECT version_num FROM public.alembic_version") == ["b"]
        assert runs(owner) == ["succeeded"]
        assert project.call("downgrade", "base") == (0, "")
        assert not exists(owner, "t")
    else:
        assert not exists(owner, "t")
        assert not exists(owner, "alembic_version")
        assert re.search(r"Move line \d+ of .*env.py \(`connection.execute\(text\(\"SELECT 1\"\)\)`\)", said), said


@pytest.mark.second_stage
def test_statement_before_configure_would_be_silent_without_the_check(
    projects: Projects, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dblock.integrations.alembic.passage.check_style", lambda migrations: None)
    with pytest.raises(AssertionError, match="rolled back"):
        check_style_of_env(projects(style="statement before"), owner)


@pytest.mark.second_stage
def test_gate_on_the_connection_of_alembic_would_roll_the_migrations_back(
    projects: Projects, owner: psycopg.Connection
) -> None:
    with pytest.raises(AssertionError, match="rolled back"):
        check_style_of_env(projects(gate=None, style="lock on the connection"), owner)


def test_check_of_the_style_names_a_statement_that_it_cannot_find() -> None:
    assert "began it" in styles._line_to_move()


@pytest.mark.parametrize("per_migration", first(1, [True, False]))
@pytest.mark.parametrize("driver", first(1, ["psycopg", *(d for d in DRIVERS if d != "psycopg")]))
def test_run_has_one_token_from_the_first_to_the_last_revision(
    per_migration: bool, driver: str, projects: Projects, owner: psycopg.Connection
) -> None:
    owner.execute("CREATE TABLE public.seen (mark text, token text)")
    project = projects(
        configure=f"transaction_per_migration={per_migration}",
        driver=driver,
        style="async" if driver == "asyncpg" else "connect",
    )
    note = TOKEN.format(setting="fenced_store.token")
    project.revision("a", None, f"{CREATE}\n{note}")
    project.revision("b", "a", f"{CONCURRENTLY}\n    {note}\n{note}")
    project.revision("c", "b", note)
    assert project.call("upgrade", "head") == (0, "")
    (token,) = rows(owner, "SELECT token FROM migration_runs")
    (mark,) = rows(owner, "SELECT migration_mark(name, token) FROM migration_runs")
    assert rows(owner, "SELECT * FROM public.seen") == [(mark, str(token))] * 4
    assert rows(owner, "SELECT from_revision, revision, version, migrator FROM migration_runs") == [
        ("base", "c", "c", "alembic")
    ]


@pytest.mark.second_stage
def test_session_has_its_own_settings_again_afterwards(projects: Projects, owner: psycopg.Connection) -> None:
    owner.execute("CREATE TABLE public.after (setting text)")
    project = projects()
    project.revision("a", None, f"{CREATE}\n{CONCURRENTLY}")
    env = project.folder / "env.py"
    names = ("application_name", "statement_timeout", "lock_timeout", "client_connection_check_interval")
    values = " || '|' || ".join(f"current_setting('{name}')" for name in names)
    ask = f'        connection.execute(text("INSERT INTO after SELECT {values}")); connection.commit()\n'
    before = "        connection.execute(text(\"SET application_name = 'mine'\")); connection.commit()\n"
    env.write_text(
        env.read_text().replace("        migrate(connection)\n", before + "        migrate(connection)\n" + ask)
    )
    assert project.call("upgrade", "head") == (0, "")
    assert rows(owner, "SELECT setting FROM public.after") == ["mine|0|0|0"]


def test_offline_output_is_the_same_with_and_without_the_gate(projects: Projects) -> None:
    printed = []
    for gate in ("", None):
        project = projects(on="host=localhost port=1 dbname=nowhere", gate=gate)
        project.revision("a", None, CREATE)
        project.revision("b", "a", CONCURRENTLY)
        printed.append(project.call("upgrade", "head", "--sql"))
    assert printed[0] == printed[1]
    assert "CREATE INDEX CONCURRENTLY" in printed[0][1]


BRANCHES = {
    "root": (None, ""),
    "a1": ("root", "branch_labels = ('a',)"),
    "a2": ("a1", ""),
    "b1": ("root", "branch_labels = ('b',)"),
    "b2": ("b1", "depends_on = 'a1'"),
}

COMMANDS: list[tuple[list[str], list[str], bool]] = [
    (["upgrade heads"], ["upgrade", "heads"], False),
    ([], ["upgrade", "heads"], True),
    (["upgrade a@head"], ["upgrade", "a@head"], False),
    (["upgrade a@head"], ["upgrade", "b@head"], True),
    ([], ["upgrade", "+1"], True),
    (["upgrade root"], ["upgrade", "a1"], True),
    (["upgrade b@head"], ["upgrade", "a1"], False),
    (["upgrade a@head"], ["downgrade", "-1"], True),
    (["upgrade heads"], ["downgrade", "root"], True),
    ([], ["downgrade", "base"], False),
    (["stamp heads"], ["stamp", "heads"], False),
    ([], ["stamp", "heads"], True),
    (["stamp heads"], ["stamp", "--purge", "heads"], True),
    (["stamp heads"], ["current"], False),
    (["stamp heads"], ["history", "-i"], False),
    ([], ["current"], False),
]


@pytest.mark.second_stage
@pytest.mark.parametrize(("before", "command", "takes_lock"), first_of(3, COMMANDS))
def test_lock_is_taken_only_if_a_step_follows(
    before: list[str], command: list[str], takes_lock: bool, projects: Projects, owner: psycopg.Connection
) -> None:
    plain = projects(gate=None)
    gated = projects()
    for project in (plain, gated):
        for name, (down, more) in BRANCHES.items():
            project.revision(name, down, "pass", more=more)
    for one in before:
        assert plain.call(*one.split())[0] == 0
    assert gated.call(*command)[0] == 0
    assert runs(owner) == (["succeeded"] if takes_lock else [])
    assert gated.call("merge", "-m", "merged", "a2", "b2")[0] == 0
    assert gated.call("upgrade", "head")[0] == 0
    assert runs(owner)[-1] == "succeeded", "a merge is a step"


@pytest.fixture
def at_the_head(projects: Projects) -> list[Project]:
    """A project without the gate and one with it, both at the head. They print each statement."""
    count = "__import__('sqlalchemy').event.listen(connection, 'before_cursor_execute', lambda *a: print('STATEMENT'))"
    both = [projects(gate=None), projects()]
    for project in both:
        project.revision("a", None, CREATE)
        env = project.folder / "env.py"
        env.write_text(env.read_text().replace("        migrate(conn", f"        {count}\n        migrate(conn"))
    assert both[0].call("upgrade", "head")[0] == 0
    return both


def test_command_at_the_head_costs_one_statement_and_writes_nothing(
    at_the_head: list[Project], owner: psycopg.Connection
) -> None:
    plain, gated = (project.call("upgrade", "head")[1].count("STATEMENT") for project in at_the_head)
    assert gated <= plain + 1
    assert grants(owner) == 0


@pytest.mark.second_stage
@pytest.mark.alone
def test_command_at_the_head_takes_little_time(at_the_head: list[Project]) -> None:
    plain, gated = map(cpu_of, at_the_head)
    assert gated - plain < 0.05


def cpu_of(project: Project) -> float:
    """Return the least of the processor's time that this command has needed at the head."""
    needed = []
    for _ in range(5):
        began = time.process_time()
        assert project.call("upgrade", "head")[0] == 0
        needed.append(time.process_time() - began)
    return min(needed)


@pytest.mark.parametrize(
    "replicas", [pytest.param(5, marks=pytest.mark.second_stage), pytest.param(100, marks=pytest.mark.nightly)]
)
@pytest.mark.timeout(0)
def test_replicas_at_the_head_take_no_ticket_and_no_grant(
    replicas: int, projects: Projects, start: Start, owner: psycopg.Connection
) -> None:
    plain, gated = projects(gate=None), projects()
    for project in (plain, gated):
        project.revision("a", None, CREATE)
    assert plain.call("upgrade", "head")[0] == 0
    started = [start(gated, "upgrade", "head") for _ in range(replicas)]
    said = [one.communicate(timeout=PATIENCE)[1] for one in started]
    assert [one.returncode for one in started] == [0] * replicas, said
    assert grants(owner) == 0
    # Sessions have reported what they wrote when they are gone. A ticket that was given up counts too.
    written = "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del) FROM pg_stat_user_tables WHERE schemaname = 'dblock'"
    assert rows(owner, written) == [0], "a row of dblock's tables was written"


WAIT = "pathlib.Path('{0}/running').touch()\nwhile not pathlib.Path('{0}/go').exists(): time.sleep(0.05)"


@pytest.mark.second_stage
def test_commands_that_read_reply_while_a_first_migration_runs(
    projects: Projects, start: Start, owner: psycopg.Connection
) -> None:
    project = projects(configure="target_metadata=__import__('sqlalchemy').MetaData()")
    project.revision("a", None, f"{CREATE}\n{WAIT.format(project.folder)}")
    running = start(project, "upgrade", "head")
    eventually(lambda: (project.folder / "running").exists())
    for command in (
        ["current"],
        ["heads"],
        ["history", "-i"],
        ["check"],
        ["revision", "--autogenerate", "-m", "new", "--rev-id", "new"],
    ):
        with measured() as lateness:
            began = time.monotonic()
            project.call(*command)
            assert time.monotonic() - began < 2 + 20 * lateness(), command
    (project.folder / "go").touch()
    assert running.wait(60) == 0
    assert exists(owner, "t")


@pytest.mark.second_stage
def test_replica_that_waits_holds_no_transaction(projects: Projects, start: Start, owner: psycopg.Connection) -> None:
    check_waiter_holds_no_transaction(projects(), start, owner)


def check_waiter_holds_no_transaction(project: Project, start: Start, owner: psycopg.Connection) -> None:
    project.revision("a", None, CREATE)
    owner.execute("CREATE TABLE public.alembic_version (version_num varchar(32) PRIMARY KEY)")
    owner.execute("SELECT try_acquire('alembic:public.alembic_version', interval '1 minute')")
    waiting = start(project, "upgrade", "head")
    eventually(lambda: rows(owner, "SELECT 1 FROM list_waiters('alembic:public.alembic_version')"))
    held = rows(owner, "SELECT pid FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'")
    assert held == [], "a replica waits in an open transaction"
    owner.execute("SELECT release(name, token) FROM distributed_locks")
    assert waiting.wait(60) == 0


@pytest.mark.second_stage
def test_waiter_in_a_transaction_would_be_found(
    projects: Projects, start: Start, owner: psycopg.Connection, seeded: Any
) -> None:
    packages = seeded("import dblock.integrations.alembic.drivers as d\nd.forget = lambda *a, **k: None\n")
    with pytest.raises(AssertionError, match="open transaction"):
        check_waiter_holds_no_transaction(projects(packages=packages), start, owner)


@pytest.mark.parametrize("when_ahead", first(1, ["fail", "ok"]))
def test_revision_that_the_scripts_do_not_have_is_ahead(
    when_ahead: str, projects: Projects, owner: psycopg.Connection
) -> None:
    newer, older = projects(), projects(gate=f"when_ahead={when_ahead!r}")
    for project in (newer, older):
        project.revision("b", None, CREATE)
    # Its name sorts before the known one, as that of a revision that was written earlier and merged later.
    newer.revision("a", "b", "pass")
    assert newer.call("upgrade", "head")[0] == 0
    code, said = older.call("upgrade", "head")
    assert runs(owner) == ["succeeded"]
    if when_ahead == "ok":
        assert code == 0
    else:
        assert code == EXIT_CODES[DatabaseAhead]
        assert "is at 'a', which is newer than 'b'" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"when_ahead": "no"}, "'fail' or 'ok'"),
        ({"lock_timeout": 0}, "above 0"),
        ({"retries": -1}, "from 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    class Context:
        opts = {"destination_rev": "head"}  # noqa: RUF012
        as_sql = False
        _migrations_fn = config = None

        def get_context(self) -> Context:
            return self

    with pytest.raises(InvalidArgument, match=message), migration_gate(Context(), **options):
        pass


def test_migrations_whose_target_is_not_given_are_refused(projects: Projects, owner: psycopg.Connection) -> None:
    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext
    from alembic.script import ScriptDirectory

    project = projects()
    project.revision("a", None, CREATE)
    config = Config(project.folder / "alembic.ini")
    script = ScriptDirectory.from_config(config)
    with (
        pytest.raises(InvalidArgument, match="destination_rev"),
        EnvironmentContext(config, script, fn=lambda heads, context: script._upgrade_revs("head", heads)),
    ):
        script.run_env()
    assert not exists(owner, "t")


def test_warning_is_logged_although_file_config_has_disabled_the_logger(
    projects: Projects,
    owner: psycopg.Connection,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("dblock"), "disabled", True)
    owner.execute("CREATE TABLE public.alembic_version AS SELECT 'later'::varchar(32) AS version_num")
    project = projects(gate="when_ahead='ok'")
    project.revision("a", None, CREATE)
    assert project.call("upgrade", "head")[0] == 0
    assert "the database is at later, which these scripts do not have" in caplog.text
