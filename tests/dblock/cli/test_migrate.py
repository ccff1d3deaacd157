"""`dblock migrate` runs a command once for all replicas, and records how it ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psycopg
import pytest

from dblock import Client
from dblock._runtime.target import resolve
from dblock.admin import schema
from tests.support import warm_start
from tests.support.eventually import eventually
from tests.support.migrations import errors, outcomes, query
from tests.support.programs import psql
from tests.support.shell import Shell
from tests.support.terminal import Terminal

FAILED, AHEAD, SESSIONS_REMAIN, NOT_ACQUIRED = 65, 66, 67, 75


@pytest.mark.second_stage
def test_output_and_exit_code_are_passed_on_and_the_error_is_recorded(shell: Shell, dsn: str) -> None:
    line = "echo out; echo first >&2; echo 'postgresql://ann:secret@host/db: no' >&2; exit 3"
    done = shell.run("migrate", "--version", "1", "--", "sh", "-c", line)
    assert (done.code, done.out) == (3, "out\n")
    assert done.err.startswith("first\npostgresql://ann:secret@host/db: no\n")
    assert "no replica tries again until you run: dblock migrate --name migrate --retry" in done.err
    assert outcomes(dsn) == ["failed"]
    assert errors(dsn) == ["first\npostgresql://ann:***@host/db: no"]
    other = shell.run("migrate", "--version", "1", "--", "touch", "ran")
    assert other.code == FAILED
    assert "has failed once" in other.err
    assert "postgresql://ann:***@host/db: no" in other.err
    assert not (shell.folder / "ran").exists()


@pytest.mark.second_stage
def test_empty_version_is_refused_before_anything_runs(shell: Shell) -> None:
    refused = shell.run("migrate", "--version", "", "--", "touch", "ran")
    assert (refused.code, refused.out) == (64, "")
    assert "The version of a migration is empty" in refused.err
    assert not (shell.folder / "ran").exists()


@pytest.mark.second_stage
def test_version_that_is_done_is_not_run_again_and_says_so(shell: Shell, dsn: str) -> None:
    first = shell.run("migrate", "--json", "--version", "1", "--", "echo", "ran")
    ran, result = first.out.splitlines()
    assert (first.code, ran, json.loads(result)["result"]) == (0, "ran", "migrated")
    again = shell.run("migrate", "--version", "1", "--", "echo", "ran")
    assert (again.code, again.out) == (0, "")
    assert "is done already; nothing was run" in again.err
    assert shell.run("migrate", "--json", "--version", "1", "--", "echo", "ran").json["result"] == "nothing to do"
    assert shell.run("migrate", "-q", "--version", "1", "--", "echo", "ran") == (0, "", "")
    assert outcomes(dsn) == ["succeeded"]


@pytest.mark.second_stage
def test_retry_clears_a_failure_and_records_the_reason(shell: Shell, dsn: str) -> None:
    assert shell.run("migrate", "--version", "1", "--", "false").code == 1
    assert shell.run("migrate", "--version", "1", "--", "true").code == FAILED
    assert shell.run("migrate", "--retry", "--why", "disk was full", "--json").json == {"name": "migrate", "cleared": 1}
    assert query(dsn, "SELECT clear_reason FROM dblock.migration_runs") == [("disk was full",)]
    assert shell.run("migrate", "--version", "1", "--", "true").code == 0
    assert outcomes(dsn) == ["failed", "succeeded"]


@pytest.mark.second_stage
def test_retry_with_a_command_and_another_version_run_at_once(shell: Shell, dsn: str) -> None:
    assert shell.run("migrate", "--version", "1", "--", "false").code == 1
    assert shell.run("migrate", "--version", "1", "--retry", "--", "true").code == 0
    assert shell.run("migrate", "--version", "2", "--", "false").code == 1
    assert shell.run("migrate", "--version", "3", "--", "true").code == 0
    assert outcomes(dsn) == ["failed", "succeeded", "failed", "succeeded"]


@pytest.mark.second_stage
def test_check_that_passes_runs_nothing_and_takes_no_lock(shell: Shell, dsn: str) -> None:
    (shell.folder / "done").touch()
    done = shell.run("migrate", "--check", "test -e done", "--", "echo", "ran")
    assert (done.code, done.out) == (0, "")
    assert query(dsn, "SELECT count(*) FROM dblock.distributed_locks") == [(0,)]
    assert shell.run("migrate", "--check", "test -e nothing", "--", "echo", "ran").out == "ran\n"


@pytest.mark.second_stage
def test_check_is_asked_again_under_the_lock(shell: Shell, dsn: str) -> None:
    check = "sh -c 'mkdir asked && exit 1; mkdir again'"
    assert shell.run("migrate", "--check", check, "--", "true").code == 0
    assert (shell.folder / "again").exists()
    missing = shell.run("migrate", "--check", "no-such-program", "--", "true")
    assert missing.code == 127
    assert "'no-such-program' was not found" in missing.err


@pytest.mark.second_stage
def test_command_that_is_missing_does_not_fail_the_version(shell: Shell, dsn: str) -> None:
    assert shell.run("migrate", "--version", "1", "--", "no-such-program").code == 127
    assert outcomes(dsn) == ["killed"]
    assert shell.run("migrate", "--version", "1", "--", "true").code == 0


def test_environment_has_the_session_contract(shell: Shell, dsn: str, owner: psycopg.Connection) -> None:
    shown = "SELECT current_setting('application_name'), current_setting('client_connection_check_interval'),"
    shown += " current_setting('statement_timeout'), current_setting('work_mem')"
    command = [*psql(dsn, shown), "-A", "-t"]
    done = shell.run("migrate", "--name", "m", "--", *command, env={"PGOPTIONS": "-c work_mem=1MB"})
    assert done.code == 0, done.err
    mark, *settings = done.out.strip().split("|")
    assert mark.startswith("dblock-migrate:m:")
    assert settings == ["1s", "0", "1MB"]


@pytest.mark.second_stage
def test_terminal_stays_the_standard_error_of_the_command(shell: Shell, dsn: str) -> None:
    line = "test -t 2 && echo at a terminal >&2; exit 4"
    with Terminal(shell.command("migrate", "--version", "1", "--", "sh", "-c", line)) as terminal:
        assert terminal.ended() == 4
        assert "at a terminal" in terminal.text
    assert errors(dsn) == [
        "the command ended with exit code 4, and its error output went to a terminal and was not kept"
    ]


@pytest.mark.second_stage
def test_error_output_passes_through_byte_by_byte(shell: Shell) -> None:
    every_byte = "import sys; sys.stderr.buffer.write(bytes(range(256)) * 1000)"
    done = warm_start.run(
        shell.command("migrate", "--", sys.executable, "-c", every_byte), capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, bytes(range(256)) * 1000)


@pytest.mark.second_stage
def test_older_version_finds_the_database_ahead(shell: Shell) -> None:
    """The order of the runs counts: the later version has a name that sorts before the earlier one."""
    for version in ("2026-06", "2025-12"):
        assert shell.run("migrate", "--version", version, "--", "true").code == 0
    done = shell.run("migrate", "--version", "2026-06", "--", "true")
    assert done.code == AHEAD
    assert "'2025-12'" in done.err
    assert "'2026-06'" in done.err
    assert shell.run("migrate", "--version", "2026-06", "--when-ahead", "ok", "--", "false").code == 0


@pytest.mark.second_stage
def test_role_that_may_not_install_gets_one_error_and_does_no_ddl(bare_dsn: str, role: str, tmp_path: Path) -> None:
    as_role = psycopg.conninfo.make_conninfo(bare_dsn, user=role)
    done = Shell(as_role, tmp_path).run("migrate", "--", "touch", "ran", env={"PGPASSWORD": "app"})
    assert done.code == 77
    assert len(done.err.splitlines()) == 1
    assert "dblock install" in done.err
    assert "dblock grant" in done.err
    assert not (tmp_path / "ran").exists()
    assert query(bare_dsn, "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'dblock%'") == []


@pytest.mark.second_stage
def test_wait_only_ends_with_the_run_and_takes_no_lock(shell: Shell, dsn: str, role: str) -> None:
    schema.grant(resolve(dsn), role, may=["see"])
    as_role = psycopg.conninfo.make_conninfo(dsn, user=role)
    waiting = shell.start("migrate", "--version", "1", "--wait-only", dsn=as_role, env={"PGPASSWORD": "app"})
    assert "waiting for migration 'migrate' to version '1'" in waiting.stderr.readline()
    assert query(dsn, "SELECT count(*) FROM dblock.distributed_locks") == [(0,)]
    assert shell.run("migrate", "--version", "1", "--", "true").code == 0
    assert waiting.wait(60) == 0


@pytest.mark.second_stage
def test_wait_only_ends_with_the_failure_or_its_timeout(shell: Shell, bare_dsn: str) -> None:
    waiting = shell.start("migrate", "--version", "1", "--wait-only", dsn=bare_dsn)
    assert "waiting for migration" in waiting.stderr.readline(), "dblock is not installed yet"
    assert shell.run("migrate", "--version", "1", "--", "sh", "-c", "echo no >&2; exit 1", dsn=bare_dsn).code == 1
    _, said = waiting.communicate(timeout=60)
    assert waiting.returncode == FAILED
    assert "It reported: no" in said
    late = shell.run("migrate", "--version", "2", "--wait-only", "--timeout", "0.1", dsn=bare_dsn)
    assert late.code == NOT_ACQUIRED
    assert "was not done within 0.1 s" in late.err


@pytest.mark.second_stage
def test_wait_for_the_lock_ends_with_its_timeout_and_counts_as_no_failure(
    shell: Shell, dsn: str, client: Client
) -> None:
    with client.lock("migrate", ttl=60):
        assert shell.run("migrate", "--version", "1", "--timeout", "0.2", "--", "true").code == NOT_ACQUIRED
    assert outcomes(dsn) == []


@pytest.mark.second_stage
def test_long_run_fails_no_replica_that_waits_long_enough(shell: Shell, dsn: str) -> None:
    """A run may last several ttls, and its failures are counted apart from the time that others wait."""
    start = ["migrate", "--version", "1", "--ttl", "6", "--timeout", "90", "--"]
    replicas = [shell.start(*start, "sh", "-c", "sleep 14") for _ in range(3)]
    assert [replica.wait(120) for replica in replicas] == [0, 0, 0]
    assert outcomes(dsn) == ["succeeded"]


@pytest.mark.second_stage
def test_two_names_do_not_wait_for_each_other(shell: Shell, dsn: str) -> None:
    other = shell.start("migrate", "--name", "billing", "--", "sleep", "60")
    eventually(lambda: outcomes(dsn) == [None], "the first run")
    assert shell.run("migrate", "--name", "orders", "--timeout", "0", "--", "true").code == 0
    other.terminate()
    assert other.wait(60) == 143


@pytest.mark.second_stage
def test_command_that_a_signal_ends_has_not_failed(shell: Shell, dsn: str) -> None:
    ended = shell.start("migrate", "--version", "1", "--", "sh", "-c", "trap 'exit 1' TERM; touch on; sleep 60 & wait")
    eventually((shell.folder / "on").exists)
    ended.terminate()
    assert ended.wait(60) == 1
    assert outcomes(dsn) == ["killed"]


@pytest.mark.second_stage
def test_setting_of_the_role_does_not_cut_the_migration(shell: Shell, dsn: str, owner: psycopg.Connection) -> None:
    owner.execute(
        "ALTER DATABASE CURRENT_DATABASE SET statement_timeout TO '200ms'".replace(
            "CURRENT_DATABASE", f'"{owner.info.dbname}"'
        ).encode()
    )
    with pytest.raises(psycopg.errors.QueryCanceled):
        query(dsn, "SELECT pg_sleep(1)")
    done = shell.run("migrate", "--", *psql(dsn, "SELECT pg_sleep(1)"))
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "The command is missing"),
        (["--why", "x", "--", "true"], "--why is the reason"),
        (["--wait-only"], "Name it with --version"),
        (["--wait-only", "--version", "1", "--", "true"], "only reads the ledger"),
        (["--ttl", "1", "--", "true"], "from 2 s"),
        (["--attempts", "0", "--", "true"], "--attempts"),
        (["--check", "'", "--", "true"], "cannot be read"),
    ],
)
def test_bad_command_lines_are_refused(shell: Shell, arguments: list[str], message: str) -> None:
    done = shell.run_here("migrate", *arguments)
    assert done.code == 64
    assert message in done.err


@pytest.mark.second_stage
def test_session_that_may_not_be_ended_is_named_with_its_own_code(
    shell: Shell, dsn: str, owner: psycopg.Connection, role: str
) -> None:
    assert shell.run("migrate", "--version", "1", "--", "true").code == 0
    ((mark,),) = query(dsn, "SELECT dblock.migration_mark(name, token) FROM dblock.migration_runs")
    schema.grant(resolve(dsn), role, may=["lock"])
    as_role = psycopg.conninfo.make_conninfo(dsn, user=role, password="app")
    with psycopg.connect(dsn, application_name=mark) as left:
        done = shell.run("migrate", "--version", "2", "--", "true", dsn=as_role)
        assert done.code == SESSIONS_REMAIN
        assert f"pid {left.info.backend_pid}" in done.err


@pytest.mark.second_stage
def test_passwords_of_the_options_are_not_in_the_arguments(shell: Shell, tcp_dsn: str) -> None:
    line = "tr '\\0' ' ' < /proc/$PPID/cmdline; tr '\\0' ' ' < /proc/$(ps -o ppid= -p $PPID | tr -d ' ')/cmdline"
    done = shell.run("migrate", "--", "sh", "-c", line, dsn=tcp_dsn, cold=True)
    assert done.code == 0, done.err
    assert "secret" not in done.out
    assert "was visible to every user" in done.err
