"""`dblock once` runs a command once per slot, and `dblock schedules` shows what ran, what runs and what is overdue."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from dblock.cli.durations import seconds, written
from tests.robustness.faults.clock import library
from tests.support.eventually import eventually
from tests.support.shell import Shell, ended
from tests.support.still_clock import NOON, StillClock

LOST, USAGE, OVERDUE = 76, 64, 3
HOURLY = ("--every", "1h")
PRINT = ("--", sys.executable, "-c")


@pytest.fixture
def clock(dsn: str) -> Iterator[StillClock]:
    clock = StillClock(dsn, NOON)
    yield clock
    clock.close()


def test_command_runs_once_with_its_slot_in_the_environment(shell: Shell, clock: StillClock) -> None:
    show = "import os, json; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('DBLOCK_')}))"
    first = shell.run("once", "job", *HOURLY, *PRINT, show)
    assert first.code == 0
    given = {key: value for key, value in first.json.items() if key not in {"DBLOCK_TOKEN", *os.environ}}
    assert given == {
        "DBLOCK_SCHEDULE": "job",
        "DBLOCK_SLOT": "2026-11-16T12:00:00+00:00",
        "DBLOCK_LOCK": "once:job",
        "DBLOCK_DEADLINE": "2026-11-16T12:00:30+00:00",
    }
    second = shell.run("once", "job", *HOURLY, "--json", *PRINT, show)
    assert (second.code, second.json["result"], second.json["why"]) == (0, "skipped", "none")


@pytest.mark.second_stage
def test_exit_code_of_the_command_is_kept_and_shown_to_all(
    shell: Shell, clock: StillClock, owner: psycopg.Connection
) -> None:
    assert shell.run("once", "job", *HOURLY, *PRINT, "raise SystemExit(3)").code == 3
    assert shell.run("once", "job", *HOURLY, "--wait", *PRINT, "raise SystemExit(9)").code == 3, "the winner's code"
    listed = shell.run("schedules", "--json")
    (schedule,) = listed.json["schedules"]
    last = schedule["last_run"]
    assert (schedule["name"], schedule["kind"], schedule["missed"], schedule["running"]) == ("job", "every", 0, 0)
    assert (last["outcome"], last["exit_code"], last["number"]) == ("failed", 3, 1)
    assert "pid" in last["holder"]
    text = shell.run("schedules", "--name", "job")
    assert "failed" in text.out
    assert "registered" in text.out


@pytest.mark.second_stage
def test_loser_waits_for_the_slot_and_leaves_with_its_exit_code(
    shell: Shell, clock: StillClock, tmp_path: Path, owner: psycopg.Connection
) -> None:
    wait = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.05)\nraise SystemExit(4)"
    winner = shell.start("once", "job", *HOURLY, *PRINT, wait)
    eventually(lambda: owner.execute("SELECT FROM slot_runs WHERE outcome IS NULL").fetchone() is not None)
    losers = [shell.start("once", "job", *HOURLY, "--wait", *PRINT, "raise SystemExit(9)") for _ in range(2)]
    with pytest.raises(TimeoutError):
        _within(losers[0], 2.0)
    (tmp_path / "go").touch()
    assert ended(winner).code == 4
    assert [ended(loser).code for loser in losers] == [4, 4]


@pytest.mark.second_stage
@pytest.mark.parametrize("delivery", ["at-most-once", "at-least-once"])
def test_loser_does_not_wait_for_a_dead_run_of_a_paused_schedule(
    shell: Shell, clock: StillClock, owner: psycopg.Connection, delivery: str
) -> None:
    owner.execute("SELECT claim_slot('job', every => '1 hour', delivery => %s)", [delivery])
    owner.execute("SELECT pause_schedule('job')")
    clock.at("12:10")
    again = ["--at-least-once"] if delivery == "at-least-once" else []
    loser = ended(shell.start("once", "job", *HOURLY, *again, "--wait", *PRINT, "raise SystemExit(9)"))
    assert loser.code == LOST
    assert "died" in loser.err


def _within(process: object, seconds: float) -> None:
    import subprocess

    assert isinstance(process, subprocess.Popen)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise TimeoutError from None


@pytest.mark.second_stage
def test_all_missed_slots_run_in_order_from_one_call(shell: Shell, clock: StillClock, tmp_path: Path) -> None:
    note = f"import os; open({str(tmp_path / 'ran')!r}, 'a').write(os.environ['DBLOCK_SLOT'][11:13] + ' ')"
    assert shell.run("once", "job", *HOURLY, "--catch-up", "all", *PRINT, note).code == 0
    clock.at("15:30")
    assert shell.run("once", "job", *HOURLY, "--catch-up", "all", *PRINT, note).code == 0
    assert (tmp_path / "ran").read_text().split() == ["12", "13", "14", "15"]


@pytest.mark.second_stage
@pytest.mark.skipif(library() is None, reason="libfaketime is not installed")
def test_host_whose_clock_is_a_day_ahead_cannot_run_tomorrows_slot(
    shell: Shell, clock: StillClock, owner: psycopg.Connection
) -> None:
    ahead = {"LD_PRELOAD": str(library()), "FAKETIME": "+1d"}
    cron = ("--cron", "0 3 * * *", "--tz", "UTC", "--catch-up", "latest")
    done = shell.run("once", "job", *cron, "--json", *PRINT, "print('ran')", env=ahead)
    assert done.json["result"] == "skipped", "deployed at noon, it does not run the slot of three o'clock either"
    assert owner.execute("SELECT count(*) FROM slot_runs").fetchone() == (0,)


@pytest.mark.second_stage
def test_command_that_outlives_its_at_most_is_ended_and_recorded_as_died(
    shell: Shell, clock: StillClock, owner: psycopg.Connection
) -> None:
    done = shell.run("once", "job", *HOURLY, "--at-most", "2s", *PRINT, "import time; time.sleep(60)")
    assert done.code == LOST
    assert "--at-most 2s of schedule 'job' has passed; the command was ended." in done.err
    clock.at("13:00")
    assert shell.run("once", "job", *HOURLY, "--at-most", "2s", *PRINT, "pass").code == 0
    rows = owner.execute("SELECT outcome, exit_code FROM slot_runs ORDER BY run").fetchall()
    assert rows == [("died", None), ("succeeded", 0)]


@pytest.mark.second_stage
def test_killed_supervisor_leaves_a_run_that_the_next_host_records_as_died(
    shell: Shell, clock: StillClock, owner: psycopg.Connection
) -> None:
    runner = shell.start("once", "job", *HOURLY, "--at-least-once", *PRINT, "import time; time.sleep(60)")
    eventually(lambda: owner.execute("SELECT FROM slot_runs WHERE outcome IS NULL").fetchone() is not None)
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    clock.advance(31)
    assert shell.run("once", "job", *HOURLY, "--at-least-once", *PRINT, "pass").code == 0
    rows = owner.execute("SELECT outcome, number FROM slot_runs ORDER BY run").fetchall()
    assert rows == [("died", 1), ("succeeded", 2)]


def test_overdue_schedule_is_seen_without_a_host(shell: Shell, clock: StillClock, owner: psycopg.Connection) -> None:
    owner.execute("SELECT end_slot('job', token, 'succeeded') FROM claim_slot('job', every => '1 hour')")
    assert shell.run("schedules", "--overdue").code == 0
    clock.at("13:10:30")
    found = shell.run("schedules", "--overdue", "--json")
    assert found.code == OVERDUE
    assert [one["name"] for one in found.json["schedules"]] == ["job"]
    examined = shell.run("doctor", "--json")
    texts = [one["what"] for one in examined.json["findings"] if one["id"] == "overdue-schedule"]
    assert len(texts) == 1
    assert "'job' is overdue since 2026-11-16 13:10:00 UTC" in texts[0]
    shell.run("schedules", "delete", "job", "--why", "retired")
    assert shell.run("schedules", "--overdue").code == 0


def test_pause_resume_and_run_now_are_recorded_with_their_reasons(
    shell: Shell, clock: StillClock, owner: psycopg.Connection
) -> None:
    owner.execute("SELECT end_slot('job', token, 'succeeded') FROM claim_slot('job', every => '1 hour')")
    assert shell.run_here("schedules", "pause", "job", "--why", "disk is full").code == 0
    assert shell.run_here("schedules", "pause", "job").code == 1
    assert shell.run_here("schedules", "--json").json["schedules"][0]["pause_reason"] == "disk is full"
    assert shell.run_here("schedules", "run", "job", "--why", "try it").code == 0
    assert owner.execute("SELECT decision FROM claim_slot('job', every => '1 hour')").fetchone() == ("run",)
    assert shell.run_here("schedules", "resume", "job", "--why", "fixed").code == 0
    assert shell.run_here("schedules", "resume", "nothing").code == 1
    events = shell.run_here("schedules", "--name", "job", "--json").json["events"]
    assert [(one["event"], one["reason"]) for one in events][:3] == [
        ("resumed", "fixed"),
        ("run now", "try it"),
        ("paused", "disk is full"),
    ]
    assert all("@" in one["actor"] and " as " in one["actor"] for one in events[:3])


@pytest.mark.second_stage
def test_host_that_lacks_the_program_leaves_the_slot_to_others(
    shell: Shell, clock: StillClock, owner: psycopg.Connection, tmp_path: Path
) -> None:
    no_program = tmp_path / "text"
    no_program.write_text("text")
    for program, code in (("no-such-program", 127), (str(no_program), 126)):
        done = shell.run("once", "job", *HOURLY, "--", program)
        assert done.code == code
        assert "No slot was claimed." in done.err
    assert owner.execute("SELECT FROM slot_runs").fetchall() == []
    assert shell.run("once", "job", *HOURLY, *PRINT, "print('ran')").out == "ran\n"


def read_all(controller: int, terminal: int) -> str:
    """Close a terminal, and return all that was written to it. One read returns only a part."""
    os.close(terminal)
    written = b""
    with contextlib.suppress(OSError):  # the end
        while part := os.read(controller, 4096):
            written += part
    os.close(controller)
    return written.decode()


@pytest.mark.second_stage
def test_narrow_terminal_shows_fewer_columns(shell: Shell, clock: StillClock, owner: psycopg.Connection) -> None:
    owner.execute("SELECT end_slot('job', token, 'succeeded') FROM claim_slot('job', every => '1 hour')")

    def shown(columns: int) -> str:
        controller, terminal = os.openpty()
        environment = os.environ | {"COLUMNS": str(columns), "TERM": "dumb"}
        subprocess.run(
            shell.command("schedules"), stdout=terminal, stdin=subprocess.DEVNULL, env=environment, check=True
        )
        return read_all(controller, terminal)

    assert "HOST" in shown(160)
    narrow = shown(80)
    assert "HOST" not in narrow
    assert "succeeded" in narrow, "no word is broken"


def test_refused_change_says_whether_the_schedule_is_unknown(
    shell: Shell, clock: StillClock, owner: psycopg.Connection
) -> None:
    owner.execute("SELECT end_slot('job', token, 'succeeded') FROM claim_slot('job', every => '1 hour')")
    assert "'job' is not paused; nothing was done" in shell.run_here("schedules", "resume", "job").err
    assert "'jbo' is not registered. See: dblock schedules" in shell.run_here("schedules", "resume", "jbo").err
    assert "'jbo' is not registered. See: dblock schedules" in shell.run_here("schedules", "delete", "jbo").err


def test_unknown_schedule_does_not_pass_for_one_that_is_in_time(
    shell: Shell, clock: StillClock, owner: psycopg.Connection
) -> None:
    for asked in (("--name", "jbo"), ("--name", "jbo", "--overdue"), ("--name", "jbo", "--json")):
        done = shell.run_here("schedules", *asked)
        assert (done.code, "'jbo' is not registered" in done.err) == (1, True)
    owner.execute("SELECT end_slot('job', token, 'succeeded') FROM claim_slot('job', every => '1 hour')")
    assert shell.run_here("schedules", "--name", "job", "--overdue").code == 0
    assert "dblock schedules --name job" in shell.run_here("schedules", "job").err
    shell.run_here("schedules", "delete", "job", "--why", "retired")
    assert "retired" in shell.run_here("schedules", "--name", "job").out, "its events stay"


def test_table_shows_a_schedule_as_it_is_written(shell: Shell, clock: StillClock, owner: psycopg.Connection) -> None:
    for every in ("1 hour", "90 minutes", "7 days", "1.5 seconds"):
        owner.execute("SELECT FROM claim_slot(%s, every => %s::interval)", [every, every])
    listed = shell.run_here("schedules").out
    for shown in ("every 1h ", "every 1h30m ", "every 7d ", "every 1.5s "):
        assert shown in listed
    clock.at("13:20")
    owner.execute("SELECT FROM claim_slot('1 hour', every => '1 hour')")
    text = shell.run_here("schedules", "--name", "1 hour").out
    (missed,) = (line for line in text.splitlines() if "missed" in line)
    assert missed.split()[2:] == ["1", "-", "missed", *["-"] * 5], "a slot that did not run took no time"
    assert "registered" in text
    assert "every 1h" in text.split("events")[1]


@pytest.mark.second_stage
def test_person_at_a_terminal_learns_why_nothing_ran(shell: Shell, clock: StillClock) -> None:
    def said(*arguments: str) -> str:
        controller, terminal = os.openpty()
        command = shell.command("once", "job", *HOURLY, *arguments, *PRINT, "pass")
        code = subprocess.run(command, stderr=terminal, stdin=subprocess.DEVNULL, check=False).returncode
        text = read_all(controller, terminal)
        assert code == 0
        return text.strip()

    assert said() == ""
    assert said() == "dblock: the command was not run: schedule 'job' is next due in 1 h 00 min."
    assert said("--quiet") == ""
    shell.run_here("schedules", "pause", "job")
    resume = "To resume it: dblock schedules resume job"
    assert said() == f"dblock: the command was not run: schedule 'job' is paused. {resume}"
    done = shell.run("once", "job", *HOURLY, *PRINT, "pass")
    assert (done.code, done.err) == (0, ""), "cron would mail it from every host"


@pytest.mark.second_stage
def test_command_line_without_one_valid_schedule_is_refused(shell: Shell) -> None:
    long = shell.run_here("once", "job", *HOURLY, "--at-most", "2d", *PRINT, "pass")
    assert "--at-most must be from 1 s" in long.err
    for arguments in (
        (), ("--every", "1h", "--delay", "1h"), ("--every", "soon"), ("--cron", "x"), ("--every", "1h", "--tz", "UTC"),
    ):  # fmt: skip
        done = shell.run_here("--json", "once", "job", *arguments, *PRINT, "pass")
        assert done.code == USAGE
        assert json.loads(done.err.splitlines()[-1])["exit_code"] == USAGE


@pytest.mark.parametrize(
    ("text", "expected"), [("90", 90), ("45s", 45), ("10m", 600), ("1h30m", 5400), ("7d", 604_800), ("250ms", 0.25)]
)
def test_duration_is_read_as_people_write_it(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["1ms", "1.5s", "45s", "10m", "1h30m", "7d", "1d1h1m1s"])
def test_duration_is_shown_as_it_is_read(text: str) -> None:
    assert written(seconds(text)) == text
