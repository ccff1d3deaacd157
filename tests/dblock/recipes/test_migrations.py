"""Migrations: one run for all replicas, and no statement of a stale migrator after the next one has begun."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from dblock import Client
from dblock._runtime.target import resolve
from dblock.admin import schema
from dblock.admin.inspect import overview
from dblock.admin.migration_ledger import MigrationLedger, MigrationSession
from dblock.errors import (
    DatabaseAhead,
    DatabaseError,
    InvalidArgument,
    LockTimeout,
    MigrationFailed,
    SessionsRemain,
    Unavailable,
)
from dblock.recipes.migrations import gate as gate_module
from dblock.recipes.migrations import keeper
from dblock.recipes.migrations.gate import Gate
from dblock.recipes.migrations.turn import Plan, Turn
from tests.support import migrator
from tests.support.eventually import eventually
from tests.support.machine import measured, soon

Start = Callable[..., subprocess.Popen[str]]
SLOW = "SELECT pg_sleep(60)"


@pytest.fixture
def start(dsn: str) -> Iterator[Start]:
    """Start migrators, and kill at the end those that are left."""
    started: list[subprocess.Popen[str]] = []

    def one(statement: str, *how: str, version: str = "1", ttl: float = 3.0) -> subprocess.Popen[str]:
        started.append(migrator.start(dsn, "m", version, ttl, statement, *how))
        return started[-1]

    yield one
    for process in started:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def marked(owner: psycopg.Connection) -> int:
    row = owner.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'dblock-migrate:m:%'"
    ).fetchone()
    assert row is not None
    return int(row[0])


def outcomes(owner: psycopg.Connection) -> list[str | None]:
    return [row[0] for row in owner.execute("SELECT outcome FROM migration_runs ORDER BY run").fetchall()]


@pytest.mark.second_stage
def test_replicas_that_wait_find_the_migration_done(owner: psycopg.Connection, start: Start) -> None:
    owner.execute("CREATE TABLE public.steps (n int)")
    replicas = [start("INSERT INTO public.steps SELECT 1 FROM pg_sleep(0.5)") for _ in range(3)]
    assert [replica.wait(60) for replica in replicas] == [0, 0, 0]
    assert owner.execute("SELECT count(*) FROM public.steps").fetchone() == (1,)
    assert outcomes(owner) == ["succeeded"]


@pytest.mark.second_stage
def test_statement_of_a_killed_migrator_takes_no_effect_after_the_next_began(
    dsn: str, owner: psycopg.Connection, start: Start
) -> None:
    owner.execute("CREATE TABLE public.steps (n int)")
    killed = start("INSERT INTO public.steps SELECT 1 FROM pg_sleep(3)")
    migrator.wait_until_running(killed)
    eventually(lambda: marked(owner))
    killed.kill()
    began = time.monotonic()
    with Turn(dsn, Plan("m", "1", ttl=3)) as turn:
        with soon(5):
            assert turn.take()
        assert marked(owner) == 0, "the old session is gone before the next run begins"
        assert outcomes(owner) == ["killed", None]
        turn.finish("succeeded")
    time.sleep(max(began + 3.2 - time.monotonic(), 0))
    assert owner.execute("SELECT count(*) FROM public.steps").fetchone() == (0,)


@pytest.mark.second_stage
def test_keeper_ends_the_session_of_a_killed_migrator_without_another_replica(
    owner: psycopg.Connection, start: Start
) -> None:
    killed = start(SLOW)
    migrator.wait_until_running(killed)
    eventually(lambda: marked(owner))
    killed.kill()
    with soon(5):  # the statement takes a minute
        eventually(lambda: outcomes(owner) == ["killed"])
    assert marked(owner) == 0


@pytest.mark.second_stage
def test_stopped_migrator_is_ended_by_the_server_within_its_ttl_and_commits_nothing(
    owner: psycopg.Connection, start: Start
) -> None:
    owner.execute("CREATE TABLE public.steps (n int)")
    stopped = start("INSERT INTO public.steps VALUES (1)", "in-transaction")
    migrator.wait_until_running(stopped)
    eventually(lambda: owner.execute("SELECT 1 FROM pg_stat_activity WHERE state = 'idle in transaction'").fetchone())
    with measured() as lateness:
        stopped.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        eventually(lambda: not marked(owner), "the end of the session")
        took = time.monotonic() - began
        assert took < 3.0 + 1.0 + 3 * lateness()
    stopped.send_signal(signal.SIGCONT)
    _, said = stopped.communicate("\n", timeout=30)
    assert stopped.returncode == 1, said
    assert owner.execute("SELECT count(*) FROM public.steps").fetchone() == (0,)
    assert "succeeded" not in outcomes(owner)


@pytest.mark.second_stage
def test_migrator_that_holds_the_interpreter_keeps_its_lease(owner: psycopg.Connection, start: Start) -> None:
    busy = start("SELECT 1", "hold-interpreter", ttl=2.0)
    _, said = busy.communicate(timeout=60)
    assert busy.returncode == 0, said
    assert outcomes(owner) == ["succeeded"]


@pytest.mark.second_stage
def test_forced_release_ends_the_session_at_once(dsn: str, owner: psycopg.Connection, start: Start) -> None:
    forced = start(SLOW, ttl=60.0)
    migrator.wait_until_running(forced)
    eventually(lambda: marked(owner))
    with overview(resolve(dsn)) as database:
        (lock,) = database.locks("m")
        with measured() as lateness:
            assert database.force_release("m", lock.number, actor="ann", reason="stuck", now=True)
            began = time.monotonic()
            eventually(lambda: not marked(owner), "the end of the session")
            took = time.monotonic() - began
            # The keeper, the session that ends the other one, and the server wake one after another.
            assert took < 1.0 + 3 * lateness()
    assert forced.wait(30) == 1


@pytest.mark.second_stage
def test_migrator_whose_keeper_was_killed_is_fenced_by_the_next(
    dsn: str, owner: psycopg.Connection, start: Start
) -> None:
    orphan = start(SLOW)
    migrator.wait_until_running(orphan)
    eventually(lambda: marked(owner))
    (holder,) = subprocess.run(
        ["pgrep", "-P", str(orphan.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    subprocess.run(["kill", "-9", holder], check=True)
    with Turn(dsn, Plan("m", "1", ttl=3)) as turn:
        assert turn.take()
        assert marked(owner) == 0
        turn.finish("succeeded")
    assert orphan.wait(30) == 1
    assert outcomes(owner) == ["killed", "succeeded"]


@pytest.mark.second_stage
def test_failure_reaches_the_replicas_that_wait_and_those_that_come(
    dsn: str, owner: psycopg.Connection, start: Start
) -> None:
    replicas = [start("SELECT 1 / (SELECT count(*) FROM pg_sleep(1) WHERE false)") for _ in range(3)]
    said = [replica.communicate(timeout=60)[1] for replica in replicas]
    assert [replica.returncode for replica in replicas] == [1, 1, 1]
    assert outcomes(owner) == ["failed"]
    assert sum("has failed once" in text and "division by zero" in text for text in said) == 2, said
    with Turn(dsn, Plan("m", "1")) as turn, pytest.raises(MigrationFailed, match="division by zero"):
        turn.take()
    with Turn(dsn, Plan("m", "2")) as turn:
        assert turn.take(), "a new version runs"


def test_older_version_is_told_that_the_database_is_ahead(dsn: str) -> None:
    for version in ("1", "2"):
        with Turn(dsn, Plan("m", version)) as turn:
            assert turn.take()
            turn.finish("succeeded")
    with Turn(dsn, Plan("m", "1")) as turn, pytest.raises(DatabaseAhead, match="'2'.*newer than '1'"):
        turn.take()
    with Turn(dsn, Plan("m", "1", when_ahead="ok")) as turn:
        assert not turn.take()


def test_version_that_is_done_takes_no_lock_and_writes_nothing(dsn: str, owner: psycopg.Connection) -> None:
    with Turn(dsn, Plan("m", "1")) as turn:
        assert turn.take()
        turn.finish("succeeded")
    before = owner.execute("SELECT token FROM distributed_locks").fetchall()
    with Turn(dsn, Plan("m", "1")) as turn:
        assert not turn.take()
    with Turn(dsn, Plan("n"), is_done=lambda: True) as turn:
        assert not turn.take()
    assert owner.execute("SELECT token FROM distributed_locks").fetchall() == before


def test_wait_ends_with_the_timeout(dsn: str, client: Client) -> None:
    with client.lock("m"), Turn(dsn, Plan("m", timeout=0.2)) as turn, pytest.raises(LockTimeout):
        turn.take()


@pytest.mark.second_stage
def test_session_that_may_not_be_ended_is_named(dsn: str, owner: psycopg.Connection, role: str) -> None:
    with Turn(dsn, Plan("m", "1", ttl=2)) as turn:
        assert turn.take()
        mark = turn.mark
        turn.finish("failed")
    with psycopg.connect(dsn, application_name=mark) as left:
        # A role that may lock, and may not end a session of the role that migrated before.
        schema.grant(resolve(dsn), role, may=["lock"])
        with (
            Turn(make_conninfo(dsn, user=role, password="app"), Plan("m", "2", ttl=2)) as turn,
            pytest.raises(SessionsRemain, match=f"pid {left.info.backend_pid}"),
        ):
            turn.take()


@pytest.fixture
def plain_dsn(bare_dsn: str, role: str) -> Iterator[str]:
    """A database for `role`, in which the owner of dblock's schema is neither a superuser nor a member of `role`."""
    owner = f"{role}_owner"
    with psycopg.connect(bare_dsn, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {owner} LOGIN PASSWORD 'app'".encode())
        admin.execute(f"GRANT CREATE ON DATABASE {admin.info.dbname} TO {owner}".encode())
        installed = resolve(make_conninfo(bare_dsn, user=owner, password="app"))
        schema.install(installed)
        schema.grant(installed, role, may=["lock"])
        yield make_conninfo(bare_dsn, user=role, password="app")
        admin.execute(f"DROP OWNED BY {owner} CASCADE".encode())
        admin.execute(f"DROP ROLE {owner}".encode())


def session_left_by_a_run(stack: contextlib.ExitStack, dsn: str, session_dsn: str) -> psycopg.Connection:
    """Return a session of a run that has ended without ending it."""
    with Turn(dsn, Plan("m", "1", ttl=10)) as turn:
        assert turn.take()
        mark = turn.mark
        turn.finish("killed")
    return stack.enter_context(psycopg.connect(session_dsn, application_name=mark))


@pytest.mark.second_stage
def test_plain_role_ends_its_stale_sessions_whatever_the_owner_of_the_schema_may_see(plain_dsn: str) -> None:
    with contextlib.ExitStack() as stack:
        left = session_left_by_a_run(stack, plain_dsn, plain_dsn)
        turn = stack.enter_context(Turn(plain_dsn, Plan("m", "1", ttl=10)))
        assert turn.take()
        with pytest.raises(psycopg.OperationalError):
            left.execute("SELECT 1")


def test_sessions_of_another_role_that_may_be_ended_are_ended(dsn: str, role: str) -> None:
    with contextlib.ExitStack() as stack:
        left = session_left_by_a_run(stack, dsn, make_conninfo(dsn, user=role, password="app"))
        turn = stack.enter_context(Turn(dsn, Plan("m", "1", ttl=10)))
        assert turn.take()
        with pytest.raises(psycopg.OperationalError):
            left.execute("SELECT 1")


@pytest.mark.second_stage
def test_sessions_of_a_role_that_may_not_be_ended_are_reported_while_the_run_lasts(
    dsn: str, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    schema.grant(resolve(dsn), role, may=["lock"])
    with Turn(make_conninfo(dsn, user=role, password="app"), Plan("m", "1", ttl=10)) as turn:
        assert turn.take()
        with psycopg.connect(dsn, application_name=turn.mark) as other:
            eventually(lambda: "which the role of dblock may not end" in caplog.text)
            assert f"role {other.info.user}" in caplog.text


@pytest.mark.second_stage
def test_lease_is_renewed_while_old_sessions_take_their_time_to_end(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[datetime] = []

    def sessions(ledger: MigrationLedger, name: str) -> list[MigrationSession]:
        if not turn.has_lease:
            return []
        deadlines.append(turn.lease.expires_at)
        is_renewed = turn.lease.expires_at > deadlines[0]
        return [] if is_renewed else [MigrationSession(0, 1, None, "dblock-migrate:m:1", "nobody", stale=True)]

    monkeypatch.setattr(MigrationLedger, "sessions", sessions)
    with Turn(dsn, Plan("m", "1", ttl=6), keep_alive=False) as turn:
        assert turn.take()


@pytest.mark.second_stage
def test_lease_outlasts_a_look_that_takes_longer_than_its_ttl(dsn: str, owner: psycopg.Connection) -> None:
    def look() -> tuple[bool, str | None]:
        time.sleep(5)
        return False, None

    gate = Gate(dsn, Plan("m", "1", ttl=3, ledger_decides=False), look=look)
    assert gate.enter()
    gate.leave("succeeded")
    assert outcomes(owner) == ["succeeded"]


@pytest.mark.second_stage
def test_migrator_does_not_wait_for_a_stopped_keeper(
    dsn: str, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_module, "END_MARGIN", 0.5)
    gate = Gate(dsn, Plan("m", "1", ttl=3))
    assert gate.enter()
    assert gate._keeper is not None
    gate._keeper.send_signal(signal.SIGSTOP)
    with pytest.raises(DatabaseError, match="may be repeated"):
        gate.leave("succeeded")
    again = Gate(dsn, Plan("m", "1", ttl=3))
    assert again.enter()
    again.leave("succeeded")
    assert outcomes(owner) == ["killed", "succeeded"]


def test_keeper_records_the_end_of_a_run_after_a_lost_reply(
    dsn: str, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []
    end = MigrationLedger.end

    def end_without_reply(self: MigrationLedger, run: int, token: int, outcome: str, *rest: str | None) -> str:
        tries.append(recorded := end(self, run, token, outcome, *rest))
        if len(tries) == 1:
            raise Unavailable("The reply was lost.")
        return recorded

    monkeypatch.setattr(MigrationLedger, "end", end_without_reply)
    with Turn(dsn, Plan("m", "1")) as turn:
        assert turn.take()
        assert keeper._finished(turn, {"end": "failed", "error": "no"}) == "failed"
    assert tries == ["failed"] * 2
    assert outcomes(owner) == ["failed"]


def test_keeper_imports_no_module_of_the_working_directory(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('this is the queue of an application')")
    monkeypatch.chdir(tmp_path)
    gate = Gate(dsn, Plan("m", "1"))
    assert gate.enter()
    gate.leave("succeeded")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"ttl": 1}, "from 2 s to a day"), ({"attempts": 0}, "from 1"), ({"when_ahead": "no"}, "'fail' or 'ok'")],
)
def test_bad_plans_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Plan("m", **options)  # type: ignore[arg-type]


@pytest.mark.second_stage
def test_gate_that_waits_leaves_no_ticket_when_its_process_dies(
    dsn: str, owner: psycopg.Connection, client: Client, start: Start
) -> None:
    with client.lock("m"):
        waiter = start("SELECT 1")
        eventually(lambda: owner.execute("SELECT 1 FROM list_waiters('m')").fetchone())
        waiter.kill()
        eventually(lambda: not owner.execute("SELECT 1 FROM list_waiters('m')").fetchone())


def test_gate_reports_an_unreachable_database() -> None:
    with pytest.raises(Unavailable):
        Gate("postgresql://localhost:1/nowhere", Plan("m")).enter()


@pytest.mark.second_stage
def test_caller_that_decides_itself_looks_under_the_lock(dsn: str, owner: psycopg.Connection, client: Client) -> None:
    looks: list[bool] = []

    def look() -> tuple[bool, str | None]:
        holder = client.lock("m").holder()
        looks.append(holder is not None)
        return len(looks) == 2, "a"

    plan = Plan("m", "1", ttl=3, ledger_decides=False)
    gate = Gate(dsn, plan, look=look)
    assert gate.enter()
    gate.leave("succeeded")
    assert not Gate(dsn, plan, look=look).enter(), "there is nothing to do"
    again = Gate(dsn, plan, look=look)
    assert again.enter(), "a version that has succeeded runs again"
    again.leave("succeeded")
    assert looks == [True, True, True]
    rows = owner.execute("SELECT outcome, from_revision FROM migration_runs ORDER BY run").fetchall()
    assert rows == [("succeeded", "a")] * 2
