"""The client of docs/languages for bash: a command runs under the lock, and only as long as the lease is trusted."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

import dblock
from tests.robustness.languages.programs import CLIENTS, skip_without, standing_still, variables
from tests.support.eventually import eventually
from tests.support.machine import before_long, measured, not_judged, too_late_to_renew

pytestmark = [pytest.mark.second_stage]

NAME = """it's "a lock" of C:\\new; -- $1 %s :x é"""


@pytest.fixture(autouse=True)
def _bash() -> None:
    skip_without("bash")


@contextmanager
def started_bash(dsn: str, script: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """Start the script in a process group of its own, which ends with the block."""
    process = subprocess.Popen(
        ["bash", "-c", f"source {CLIENTS / 'dblock.sh'}\n{script}"],
        env=variables(dsn) | {"DBLOCK_PATIENCE": "60", "NAME": NAME} | more,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    with process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def run_bash(dsn: str, script: str, given: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    with started_bash(dsn, script, **more) as process:
        out, errors = process.communicate(given, timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def test_bash_command_runs_under_the_lock_and_passes_its_status_on(tcp_dsn: str) -> None:
    quoted = NAME.replace("'", "''")
    seen = f"SELECT token, holder LIKE 'bash pid %' FROM dblock.holder('{quoted}')"
    show = 'psql -XAtq -d "$DBLOCK_DSN" -c "$SEEN"; echo $DBLOCK_TOKEN; exit 7'
    done = run_bash(tcp_dsn, 'dblock_run "$NAME" bash -c "$COMMAND"', COMMAND=show, SEEN=seen)
    assert done.returncode == 7, done.stderr
    held, token = done.stdout.splitlines()
    assert held == f"{token}|t"
    with dblock.Client(tcp_dsn) as client:
        lease = client.lock(NAME).try_acquire()
        assert lease is not None, "the lock was released"
        assert lease.token > int(token)


def test_bash_command_outlives_its_ttl_and_keeps_the_lock(tcp_dsn: str) -> None:
    with measured() as lateness:
        done = run_bash(tcp_dsn, "dblock_run job sleep 2.5", DBLOCK_TTL="2")
        if done.returncode and too_late_to_renew(lateness(), 2):
            not_judged("to renew")
    assert done.returncode == 0, done.stderr


def test_bash_waiter_gives_up_a_busy_lock_and_leaves_no_ticket(tcp_dsn: str) -> None:
    with dblock.Client(tcp_dsn) as client, client.lock("job"):
        done = run_bash(tcp_dsn, "dblock_run job touch /nonexistent", DBLOCK_TIMEOUT="1")
        assert (done.returncode, done.stderr) == (75, "")
        with psycopg.connect(tcp_dsn) as connection:
            assert connection.execute("SELECT count(*) FROM dblock.lock_tickets").fetchone() == (0,)


def test_bash_command_is_ended_when_its_lease_is_lost(tcp_dsn: str) -> None:
    take = "SELECT dblock.force_release('job', $DBLOCK_TOKEN, now => true)"
    command = f'psql -XAtq -d "$DBLOCK_DSN" -c "{take}"; exec sleep 30'
    with before_long(3):
        done = run_bash(tcp_dsn, 'dblock_run job bash -c "$COMMAND"', COMMAND=command, DBLOCK_TTL="2")
    assert done.returncode == 76, done.stderr


def test_bash_script_fails_closed_without_the_database(tcp_dsn: str) -> None:
    done = run_bash(tcp_dsn, "dblock_run job echo ran", DBLOCK_DSN="host=/nonexistent")
    assert done.returncode == 69
    assert done.stdout == ""


def test_bash_command_that_ignores_the_signal_is_killed_with_its_trust_window(tcp_dsn: str) -> None:
    take = "SELECT dblock.force_release('job', $DBLOCK_TOKEN, now => true)"
    command = f'psql -XAtq -d "$DBLOCK_DSN" -c "{take}"; trap "" TERM; while true; do sleep 0.1; done'
    with before_long(3):
        done = run_bash(tcp_dsn, 'dblock_run job bash -c "$COMMAND"', COMMAND=command, DBLOCK_TTL="2")
    assert done.returncode == 76, done.stderr


def test_bash_command_is_killed_in_time_while_the_server_stands_still(tcp_dsn: str) -> None:
    with (
        psycopg.connect(tcp_dsn, autocommit=True) as operator,
        measured() as lateness,
        started_bash(tcp_dsn, "dblock_run job bash -c 'echo $$; exec sleep 60'", DBLOCK_TTL="2") as script,
    ):
        assert script.stdout is not None
        command = int(script.stdout.readline())
        time.sleep(1)  # renewals have taken place
        with standing_still(operator):
            began = time.monotonic()
            eventually(lambda: not is_running(command), "the end of the command")
            # The last request that got a reply was sent before, so the trust window has ended.
            # The script, the command and this test run one after another, and each may be late.
            assert time.monotonic() - began < 2 + 3 * lateness()
        assert script.wait(30) == 76


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it has ended before the file was opened, or before it was read
        return False


def test_bash_command_reads_the_standard_input_of_the_script(tcp_dsn: str) -> None:
    done = run_bash(tcp_dsn, "dblock_run job cat", given="a line\n")
    assert (done.returncode, done.stdout) == (0, "a line\n")


def test_bash_script_with_strict_options_runs_and_releases(tcp_dsn: str) -> None:
    script = "set -euo pipefail\ndblock_run job sleep 1\ndblock_run job echo again"
    with before_long(3):
        done = run_bash(tcp_dsn, script)
    assert (done.returncode, done.stdout) == (0, "again\n"), done.stderr


@pytest.mark.parametrize("variable", ["DBLOCK_TTL", "DBLOCK_TIMEOUT", "DBLOCK_PATIENCE"])
def test_bash_script_refuses_a_variable_that_it_cannot_compute_with(tcp_dsn: str, variable: str) -> None:
    done = run_bash(tcp_dsn, "dblock_run job echo ran", **{variable: "1.5"})
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr == "dblock: 1.5 is not a whole number of seconds\n"


def test_bash_waiter_that_is_ended_leaves_no_ticket(tcp_dsn: str) -> None:
    with psycopg.connect(tcp_dsn, autocommit=True) as operator, dblock.Client(tcp_dsn) as client:

        def tickets() -> int:
            ((number,),) = operator.execute("SELECT count(*) FROM dblock.lock_tickets").fetchall()
            return int(number)

        with client.lock("job"), started_bash(tcp_dsn, "dblock_run job echo ran; exit $?") as script:
            eventually(lambda: tickets() == 1)
            (subshell,) = children(script.pid)
            os.kill(subshell, signal.SIGTERM)
            out, _ = script.communicate(timeout=30)
            assert (script.returncode, out) == (143, "")
            assert tickets() == 0


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("to_all", [False, True])
def test_bash_command_is_ended_with_its_script_and_the_lock_is_free(tcp_dsn: str, to_all: bool) -> None:
    """A signal to the whole group also ends psql."""
    command = "trap 'echo ended; exit 3' TERM; echo started; while true; do sleep 0.1; done"
    script = 'trap : TERM; dblock_run job bash -c "$COMMAND"; exit $?'
    with started_bash(tcp_dsn, script, COMMAND=command) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        if to_all:
            os.killpg(process.pid, signal.SIGTERM)
        else:
            (subshell,) = children(process.pid)
            os.kill(subshell, signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
        assert (process.returncode, out) == (3, "ended\n")
    with dblock.Client(tcp_dsn) as client:
        assert client.lock("job").try_acquire() is not None


def test_bash_lease_is_lost_once_its_trust_window_has_passed(tcp_dsn: str) -> None:
    script = "dblock_open && dblock_acquire job && sleep 1 && dblock_renew job; echo $?; dblock_close"
    assert run_bash(tcp_dsn, script, DBLOCK_TTL="1").stdout == "76\n"


def test_bash_renewal_after_a_forced_release_says_that_the_lease_is_lost(tcp_dsn: str) -> None:
    take = "SELECT dblock.force_release('job', $DBLOCK_TOKEN, now => true)"
    script = f"""
        dblock_open && dblock_acquire job && dblock_renew job || exit
        dblock_call "{take}"
        dblock_renew job; echo $?
        dblock_release job; echo $REPLY
        dblock_close
    """
    assert run_bash(tcp_dsn, script).stdout == "76\nf\n"
