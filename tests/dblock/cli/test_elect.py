"""`dblock elect` runs a command only while it leads, and `dblock leader` names the leader."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import pytest

import dblock
from tests.support.eventually import eventually
from tests.support.shell import Shell, ended

NO_LEADER, USAGE = 3, 64

REPORT = """
import os, sys, time
with open(sys.argv[1], "a") as file:
    file.write(f"{os.environ['DBLOCK_ELECTION']} {os.environ['DBLOCK_TOKEN']} {os.getpid()}\\n")
time.sleep(float(sys.argv[2]))
"""


def reporting(path: Path, seconds: float = 90) -> list[str]:
    """Return a command that writes its election, token and process into a file, and waits."""
    return ["--", sys.executable, "-c", REPORT, str(path), str(seconds)]


def reports(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def test_command_runs_with_its_token_and_its_exit_code_is_returned(shell: Shell, client: dblock.Client) -> None:
    command = "import os, sys; print(os.environ['DBLOCK_TOKEN'], flush=True); sys.exit(7)"
    done = shell.run("elect", "e", "--", sys.executable, "-c", command)
    assert done.code == 7, done.err
    (beginning, end) = client.election("e").observe(0, timeout=0)
    assert beginning.token == int(done.out)
    assert isinstance(end, dblock.Vacancy)
    assert end.how == "resigned"


@pytest.mark.second_stage
def test_leader_is_shown_while_the_command_runs(shell: Shell, tmp_path: Path) -> None:
    none = shell.run("leader", "e")
    assert (none.code, none.err.strip()) == (NO_LEADER, "election 'e' has no leader")
    assert shell.run("leader", "e", "--json").json == {"election": "e", "leader": None}
    elected = shell.start("elect", "e", "--holder", "web-1", "--value", '{"port": 80}', *reporting(tmp_path / "a"))
    eventually(lambda: reports(tmp_path / "a"), "the command")
    ((_, token, _),) = reports(tmp_path / "a")
    shown = shell.run("leader", "e", "--json")
    assert shown.code == 0
    found = shown.json
    assert (found["holder"], found["token"], found["value"]) == ("web-1", int(token), {"port": 80})
    assert "web-1" in shell.run("leader", "e").out
    elected.send_signal(signal.SIGTERM)
    assert ended(elected).code == 128 + signal.SIGTERM
    assert shell.run("leader", "e").code == NO_LEADER, "released when the command has ended"


@pytest.mark.second_stage
def test_command_is_ended_and_started_again_after_a_forced_release(
    shell: Shell, tmp_path: Path, client: dblock.Client
) -> None:
    elected = shell.start("elect", "e", "--ttl", "4", *reporting(tmp_path / "a"))
    eventually(lambda: len(reports(tmp_path / "a")) == 1, "the first command")
    shell.run("force-release", "election:e", "--yes", "--reason", "test")
    eventually(lambda: len(reports(tmp_path / "a")) == 2, "the second command")
    (first, second) = (int(token) for _, token, _ in reports(tmp_path / "a"))
    assert second > first
    elected.send_signal(signal.SIGTERM)
    ended(elected)
    events = list(client.election("e").observe(0, timeout=0))
    assert [one.how for one in events if isinstance(one, dblock.Vacancy)] == ["forced", "resigned"]


@pytest.mark.second_stage
def test_transfer_ends_one_command_and_starts_the_other(shell: Shell, tmp_path: Path, client: dblock.Client) -> None:
    one = shell.start("elect", "e", "--holder", "one", *reporting(tmp_path / "one"))
    eventually(lambda: reports(tmp_path / "one"), "the first command")
    refused = shell.run("leader", "e", "--transfer-to", "two")
    assert refused.code == 1
    assert "no candidate of that name waits" in refused.err
    assert "no candidate waits" in refused.err
    two = shell.start("elect", "e", "--holder", "two", *reporting(tmp_path / "two"))
    eventually(lambda: client.lock("election:e").queue(), "the second candidate")
    assert "candidates that wait: two" in shell.run("leader", "e", "--transfer-to", "three").err
    handed_over = shell.run("leader", "e", "--transfer-to", "two", "--json")
    assert handed_over.json["holder"] == "two"
    eventually(lambda: reports(tmp_path / "two"), "the second command")
    for process in (two, one):
        process.send_signal(signal.SIGTERM)
        ended(process)


@pytest.mark.second_stage
def test_candidate_that_waits_ends_with_a_signal(shell: Shell, client: dblock.Client) -> None:
    with client.election("e").lead():
        waits = shell.start("elect", "e", "--", "true")
        eventually(lambda: client.lock("election:e").queue(), "the candidate")
        waits.send_signal(signal.SIGTERM)
        assert ended(waits).code == 128 + signal.SIGTERM
        assert not client.lock("election:e").queue()


@pytest.mark.second_stage
def test_no_two_commands_run_at_once(shell: Shell, tmp_path: Path) -> None:
    """Three candidates whose commands end by themselves, one after another: each finds the file of no other."""
    script = "import os, sys, time; os.mkdir(sys.argv[1]); time.sleep(0.3); os.rmdir(sys.argv[1]); print('alone')"
    started = [shell.start("elect", "e", "--", sys.executable, "-c", script, str(tmp_path / "d")) for _ in range(3)]
    results: list[str] = []
    threads = [threading.Thread(target=lambda one=one: results.append(ended(one).out.strip())) for one in started]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["alone"] * 3


@pytest.mark.second_stage
@pytest.mark.parametrize(
    "arguments",
    [["e"], ["e", "--value", "{", "--", "true"], ["e", "--ttl", "0.5", "--", "true"]],
)
def test_invalid_command_line_is_refused(shell: Shell, arguments: list[str]) -> None:
    assert shell.run("elect", *arguments).code == USAGE
