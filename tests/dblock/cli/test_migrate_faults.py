"""A migrator that is killed, stopped or deprived of its lock changes nothing after the next one has begun."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from dblock._runtime.target import resolve
from dblock.admin.inspect import overview
from tests.support.eventually import eventually
from tests.support.machine import measured
from tests.support.migrations import marked, outcomes, query
from tests.support.programs import psql
from tests.support.shell import Shell

LOST = 76

ROUNDS = pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(2, marks=[pytest.mark.second_stage, pytest.mark.timeout(900)]),
        pytest.param(100, marks=[pytest.mark.nightly, pytest.mark.timeout(7200)]),
    ],
)

SLOW_INDEX = """
CREATE TABLE pace AS SELECT 0.2 AS seconds;
CREATE FUNCTION slow(n int) RETURNS int IMMUTABLE LANGUAGE plpgsql
AS 'BEGIN PERFORM pg_sleep((SELECT seconds FROM public.pace)); RETURN n; END';
CREATE TABLE rows AS SELECT n FROM generate_series(1, 1000) AS n;
"""
"""A statement that has begun keeps its pace."""

BUILD = "DROP INDEX IF EXISTS by_n; CREATE INDEX CONCURRENTLY by_n ON rows (slow(n));"


def process_of_psql(dblock: Any) -> int:
    """Return the process of psql below `dblock migrate` and its keeper."""
    found: list[int] = []

    def search() -> bool:
        pending = [dblock.pid]
        while pending:
            listed = subprocess.run(["pgrep", "-P", str(pending.pop())], capture_output=True, text=True).stdout.split()
            pending += map(int, listed)
            with suppress(FileNotFoundError, ProcessLookupError):  # one has ended since the listing
                found[:] = [int(pid) for pid in listed if Path(f"/proc/{pid}/comm").read_text().strip() == "psql"]
            if found:
                return True
        return False

    eventually(search, "psql")
    return found[0]


def family(process: int) -> list[int]:
    """Return a process and all that it has started, the oldest first."""
    found = [process]
    for one in found:
        listed = subprocess.run(["pgrep", "-P", str(one)], capture_output=True, text=True).stdout
        found += map(int, listed.split())
    return found


def send(what: signal.Signals, processes: list[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):  # a short sleep has ended by now
            os.kill(process, what)


def building(dsn: str) -> list[tuple[int]]:
    return query(dsn, "SELECT pid FROM pg_stat_progress_create_index WHERE datname = current_database()")


class Marks:
    """What a fast poll has seen of the marks of a migration's sessions."""

    def __init__(self, dsn: str) -> None:
        self._connection = psycopg.connect(dsn, autocommit=True, application_name="test")

    def look(self) -> dict[str, int]:
        rows = self._connection.execute(
            "SELECT application_name, count(*) FROM pg_stat_activity"
            " WHERE application_name LIKE 'dblock-migrate:%' AND datname = current_database() GROUP BY 1"
        ).fetchall()
        return dict(rows)

    def close(self) -> None:
        self._connection.close()


@contextmanager
def watched_marks(dsn: str) -> Iterator[Marks]:
    marks = Marks(dsn)
    try:
        yield marks
    finally:
        marks.close()


VICTIMS: list[tuple[str, list[str]]] = [
    ("command", []),
    ("dblock", ["--ttl", "3"]),
    # The server does not notice the killed client, so that only the next holder ends the statement.
    ("dblock", ["--ttl", "3", "--no-options"]),
]


@pytest.mark.second_stage
@ROUNDS
def test_next_run_begins_when_the_statement_of_a_killed_one_is_gone(
    shell: Shell, dsn: str, tmp_path: Path, rounds: int
) -> None:
    script = tmp_path / "1.sql"
    script.write_text(BUILD)
    query(dsn, SLOW_INDEX)
    for number in range(rounds):
        victim, options = VICTIMS[number % len(VICTIMS)]
        arguments = ["migrate", *options, "--"]
        query(dsn, "DROP INDEX IF EXISTS by_n")
        query(dsn, "TRUNCATE dblock.migration_runs")
        query(dsn, "UPDATE pace SET seconds = 0.2")
        with watched_marks(dsn) as marks, measured() as lateness:
            first = shell.start(*arguments, *psql(dsn, script))
            eventually(lambda: building(dsn), "the build")
            ((old,),) = building(dsn)
            second = shell.start(*arguments, *psql(dsn, script))
            eventually(lambda: query(dsn, "SELECT 1 FROM dblock.list_waiters('migrate')"), "the second replica")
            query(dsn, "UPDATE pace SET seconds = 0.001")
            os.kill(process_of_psql(first) if victim == "command" else first.pid, signal.SIGKILL)
            killed, gone = time.monotonic(), None
            while second.poll() is None:
                assert len(marks.look()) <= 1, "sessions of two grants at the same time"
                if gone is None and not query(dsn, "SELECT 1 FROM pg_stat_activity WHERE pid = %s", old):
                    gone = time.monotonic() - killed
            assert gone is not None
            assert gone < 5.0 + 20 * lateness()
        assert second.wait() == 0, second.communicate()[1]
        assert first.wait(60) in (128 + signal.SIGKILL, -signal.SIGKILL)
        assert outcomes(dsn) == ["killed", "succeeded"]
        assert query(dsn, "SELECT indisvalid FROM pg_index WHERE indrelid = 'rows'::regclass") == [(True,)]


@ROUNDS
def test_transaction_of_a_stopped_command_is_over_within_its_ttl(
    shell: Shell, dsn: str, tmp_path: Path, rounds: int
) -> None:
    """The command is stopped, or in every second round dblock."""
    script = tmp_path / "1.sql"
    script.write_text("BEGIN; CREATE TABLE added (n int); \\! touch on; sleep 600\nCOMMIT;")
    ttl = 3.0
    for number in range(rounds):
        victim = ("command", "dblock")[number % 2]
        query(dsn, "TRUNCATE dblock.migration_runs")
        (tmp_path / "on").unlink(missing_ok=True)
        with measured() as lateness:
            stopped = shell.start("migrate", "--version", "1", "--ttl", str(ttl), "--", *psql(dsn, script))
            eventually(lambda: marked(dsn, "idle in transaction"), "the transaction")
            os.kill(process_of_psql(stopped) if victim == "command" else stopped.pid, signal.SIGSTOP)
            began = time.monotonic()
            eventually(lambda: not marked(dsn), "the end of the session")
            took = time.monotonic() - began
            assert took < ttl + 1.0 + 20 * lateness()
        stopped.send_signal(signal.SIGCONT)
        _, said = stopped.communicate(timeout=60)
        assert stopped.returncode == LOST, said
        if victim == "command":
            assert "was stopped by a signal" in said
        assert outcomes(dsn) == ["lost"]
        assert query(dsn, "SELECT to_regclass('added')") == [(None,)]


@ROUNDS
def test_commit_of_a_stopped_command_never_succeeds(shell: Shell, dsn: str, tmp_path: Path, rounds: int) -> None:
    """All processes are frozen between the last DDL and the version row, and resume when another run has begun."""
    script = tmp_path / "1.sql"
    wait = "touch paused; while [ ! -e go ]; do sleep 0.05; done"
    script.write_text(
        f"BEGIN; ALTER TABLE orders ADD COLUMN day date;\n\\! {wait}\nINSERT INTO versions VALUES (1); COMMIT;"
    )
    command = ["--", *psql(dsn, script)]
    for _ in range(rounds):
        query(dsn, "TRUNCATE dblock.migration_runs")
        query(dsn, "DROP TABLE IF EXISTS orders, versions")
        query(dsn, "CREATE TABLE orders (n int); CREATE TABLE versions (n int)")
        for file in ("paused", "go"):
            (tmp_path / file).unlink(missing_ok=True)
        stopped = shell.start("migrate", "--version", "1", "--ttl", "3", *command)
        eventually((tmp_path / "paused").exists, "the pause")
        frozen = family(stopped.pid)
        send(signal.SIGSTOP, frozen)
        # Only the lease of the stopped run has to end.
        next_one = shell.start("migrate", "--version", "1", "--ttl", "30", *command)
        eventually(lambda: outcomes(dsn)[1:] == [None], "the next run")
        (tmp_path / "go").touch()
        send(signal.SIGCONT, frozen)
        assert next_one.wait(60) == 0, next_one.communicate()[1]
        assert stopped.wait(60) == LOST, stopped.communicate()[1]
        assert outcomes(dsn) == ["killed", "succeeded"], "the next run has recorded the end of the first"
        assert query(dsn, "SELECT n FROM versions") == [(1,)]
        assert query(dsn, "SELECT count(*) FROM information_schema.columns WHERE column_name = 'day'") == [(1,)]


@pytest.mark.second_stage
def test_forced_release_ends_the_statement_at_once(shell: Shell, dsn: str) -> None:
    forced = shell.start("migrate", "--version", "1", "--ttl", "60", "--", *psql(dsn, "SELECT pg_sleep(600)"))
    eventually(lambda: marked(dsn, "active"), "the statement")
    with measured() as lateness:
        with overview(resolve(dsn)) as database:
            (lock,) = database.locks("migrate")
            assert database.force_release("migrate", lock.number, actor="ann", reason="stuck", now=True)
        began = time.monotonic()
        eventually(lambda: not marked(dsn), "the end of the session")
        assert time.monotonic() - began < 1.0 + 20 * lateness()
    _, said = forced.communicate(timeout=60)
    assert forced.returncode == LOST, said
    assert outcomes(dsn) == ["lost"], "the version has not failed"


@pytest.mark.second_stage
def test_command_that_reconnects_after_a_forced_release_is_ended(shell: Shell, dsn: str, tmp_path: Path) -> None:
    once = " ".join(f"'{word}'" for word in psql(dsn, "SELECT pg_sleep(600)"))
    forced = shell.start("migrate", "--ttl", "12", "--", "sh", "-c", f"while true; do {once}; done")
    eventually(lambda: marked(dsn, "active"), "the statement")
    with overview(resolve(dsn)) as database:
        (lock,) = database.locks("migrate")
        assert database.force_release("migrate", lock.number, actor="ann", reason="stuck", now=True)
    assert forced.wait(60) == LOST
    assert marked(dsn) == 0
    assert outcomes(dsn) == ["lost"]


@pytest.mark.second_stage
def test_sessions_are_ended_before_the_command(shell: Shell, dsn: str, tmp_path: Path) -> None:
    """The command is told to end after a forced release, and looks then whether its statement still runs."""
    look = tmp_path / "look.sql"
    look.write_text("SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query = 'SELECT pg_sleep(600)'")
    asks, sleeps = (" ".join(f"'{word}'" for word in psql(dsn, what)) for what in (look, "SELECT pg_sleep(600)"))
    line = f'trap "env -u PGAPPNAME {asks} -At > seen; exit 1" TERM; {sleeps} & while true; do sleep 0.1; done'
    forced = shell.start("migrate", "--ttl", "12", "--grace", "4", "--", "sh", "-c", line)
    eventually(lambda: marked(dsn, "active"), "the statement")
    with overview(resolve(dsn)) as database:
        (lock,) = database.locks("migrate")
        assert database.force_release("migrate", lock.number, actor="ann", reason="stuck")
    _, said = forced.communicate(timeout=60)
    assert forced.returncode == LOST, said
    assert (tmp_path / "seen").read_text() == "0\n"
    assert outcomes(dsn) == ["lost"]


@pytest.mark.second_stage
def test_statement_of_a_terminated_command_is_gone_when_the_lock_is_free(shell: Shell, dsn: str) -> None:
    ended = shell.start("migrate", "--version", "1", "--", *psql(dsn, "SELECT pg_sleep(600)"))
    eventually(lambda: marked(dsn, "active"), "the statement")
    ended.terminate()
    eventually(lambda: query(dsn, "SELECT name FROM dblock.list_locks()") == [], "the release")
    assert marked(dsn) == 0
    assert ended.wait(60) == 128 + signal.SIGTERM
    assert outcomes(dsn) == ["killed"]
