"""`dblock demo`: its story is true, its drawings fit, and it leaves nothing behind."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import psycopg
import pytest
from psycopg import conninfo, sql

from dblock.admin import schema
from dblock.cli.demo import command
from dblock.cli.demo.story import TTL
from tests.support.eventually import eventually
from tests.support.machine import measured, not_judged, too_late_to_renew
from tests.support.proxy import Proxy
from tests.support.shell import Done, Shell, ended
from tests.support.terminal import Terminal

COLUMNS = 72


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"  # it has ended, although its parent has not waited for it yet


def schemas(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as connection:
        found = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'dblock_demo%'").fetchall()
    return [name for (name,) in found]


def schema_of(output: str) -> str:
    return "dblock_demo_" + output.partition("'demo:ledger:")[2].partition("'")[0]


def heard_until(process: Any, part: str) -> tuple[str, list[int]]:
    """Read a demo's output up to this text; return all of it, and the workers' process IDs."""
    output = ""
    while part not in output:
        line = process.stdout.readline()
        assert line, f"{part!r} was never printed, only:\n{output}{process.stderr.read()}"
        output += line
    return output, [int(pid) for pid in re.findall(r"process (\d+)", output)]


@pytest.fixture
def role_dsn(dsn: str, role: str) -> str:
    """The database, for a role that may lock and create schemas."""
    schema.grant(dsn, role)
    with psycopg.connect(dsn, autocommit=True) as connection:
        name = connection.info.dbname
        connection.execute(
            sql.SQL("GRANT CREATE ON DATABASE {} TO {}").format(sql.Identifier(name), sql.Identifier(role))
        )
    return conninfo.make_conninfo(dsn, user=role, password="app")


@pytest.mark.second_stage
def test_demo_runs_three_times_at_once_in_every_format(shell: Shell, dsn: str, role_dsn: str) -> None:
    """As text and as a picture; at a terminal; as JSON, by a role with few privileges."""
    picture = shell.folder / "demo.svg"
    with measured() as lateness:
        plain = shell.start("demo", "--svg", str(picture))
        as_json = shell.start("demo", "--json", dsn=role_dsn)
        with Terminal(shell.command("demo"), columns=COLUMNS, rows=120) as terminal:
            code = terminal.ended()
            screen = terminal.lines()
        output, data = ended(plain), ended(as_json)
        said = " ".join("\n".join([*screen, output.err, data.err]).split())
        if "the machine is too busy for the demo" in said and too_late_to_renew(lateness(), TTL):
            not_judged("to renew")
    assert (code, output.code, data.code) == (0, 0, 0), said
    _is_the_story(data.json)
    _is_narrated(output.out)
    _fits(screen)
    _is_drawn(picture.read_text())
    assert schemas(dsn) == []


def _is_the_story(events: list[dict[str, Any]]) -> None:
    acts = list(dict.fromkeys(event["act"] for event in events))
    assert len(acts) == 3
    tokens = [event["token"] for event in events if event["kind"] == "held"]
    assert len(tokens) == 8
    assert sorted(set(tokens)) == tokens
    assert [event["at"] for event in events] == sorted(event["at"] for event in events)
    sums = {event["act"]: (event["due"], event["amount"]) for event in events if event["kind"] == "sums"}
    assert list(sums.values()) == [(180, 130), (180, 180)]
    for act, late in zip(acts[1:], ("corrupted", "refused"), strict=True):
        happened = [(event["worker"], event["kind"]) for event in events if event["act"] == act]
        order = [
            ("alice", "held"), ("alice", "read"), ("alice", "frozen"), ("alice", "expired"), ("bob", "held"),
            ("bob", "read"), ("bob", "stored"), ("alice", "woken"), ("alice", late),
        ]  # fmt: skip
        places = [happened.index(one) for one in order]
        assert places == sorted(places)
    killed = next(event for event in events if event["kind"] == "killed")
    next_held = next(event for event in events if event["kind"] == "held" and event["at"] > killed["at"])
    assert killed["worker"] == "bob"
    assert next_held["worker"] == "alice"


def _is_narrated(out: str) -> None:
    for part in (
        r"alice  holds 'demo:ledger:\w+' under token \d+, for 1.8 s unless renewed",
        r"bob    tries once: alice holds it",
        r"bob    holds it under token \d+, \d+ ms after the release",
        r"bob    is killed with kill -9",
        r"alice  holds it under token \d+, \d+ ms after the kill",
        r"alice  writes 130, unaware of the pause: stored",
        r"the balance should be 100 \+ 50 \+ 30 = 180, is 130: 50 are gone",
        r"alice  writes 130, unaware of the pause: refused, because token \d+ was seen",
        r"the balance should be 100 \+ 50 \+ 30 = 180, is 180: the books add up",
        r"tokens in the order of the grants: \d+(, \d+){7}\n",
    ):
        assert re.search(part, out), part
    drawn = out[out.index("tokens in the order") :].partition("\n")[2]
    assert drawn.isascii()
    assert max(map(len, drawn.splitlines())) <= 80
    assert re.search(r"^alice  =\d.*#+~+.*!", drawn, re.MULTILINE)


def _fits(screen: list[str]) -> None:
    drawn = screen[next(place for place, line in enumerate(screen) if "tokens in the order" in line) + 1 :]
    lanes = [line for line in drawn if line.startswith(("alice", "bob"))]
    assert len(lanes) == 6, "one lane for each worker and act, none of them wrapped"
    assert "▒" in lanes[2]
    assert any("frozen, holding the lock" in line for line in drawn)


def _is_drawn(picture: str) -> None:
    root = ElementTree.fromstring(picture)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for text in ("Act one: without a fence", "Act two: with the fence", "writes 130: refused", "kill -9"):
        assert text in texts


@pytest.mark.second_stage
def test_demo_ended_by_a_signal_leaves_nothing(shell: Shell, dsn: str) -> None:
    """While one worker is frozen and one is in the queue; two demos, ended by two signals."""
    numbers = (signal.SIGTERM, signal.SIGKILL)
    started = [shell.start("demo", "--svg", f"{number}.svg") for number in numbers]

    def end(process: Any, number: signal.Signals) -> tuple[Done, str, list[int]]:
        output, pids = heard_until(process, "bob    joins the queue for the lock")
        assert not any(is_gone(pid) for pid in (pids[0], pids[-1]))
        process.send_signal(number)
        return ended(process), output, pids

    # Each has a thread: the story of the one goes on while the other is ended.
    with ThreadPoolExecutor() as threads:
        (terminated, output, pids), (_, _, orphans) = threads.map(end, started, numbers)
    assert (terminated.code, terminated.err) == (128 + signal.SIGTERM, "")
    assert all(map(is_gone, pids))
    assert schema_of(output) not in schemas(dsn)
    assert not (shell.folder / f"{signal.SIGTERM}.svg").exists()
    # The killed conductor could not remove its schema, but the kernel has ended its workers, frozen ones too.
    eventually(lambda: all(map(is_gone, orphans)), "the end of the workers")


@pytest.mark.second_stage
def test_repeated_ctrl_c_does_not_disturb_the_cleanup(shell: Shell, dsn: str, owner: psycopg.Connection) -> None:
    process = shell.start("demo")
    output, pids = heard_until(process, "bob    joins the queue for the lock")
    name = schema_of(output)
    with psycopg.connect(dsn) as reading:
        # This open transaction blocks the removal of the table.
        reading.execute(sql.SQL("SELECT FROM {}").format(sql.Identifier(name, "accounts")))
        waiting = "SELECT FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'"
        process.send_signal(signal.SIGINT)
        eventually(lambda: owner.execute(waiting).fetchone() is not None, "the removal")
        assert all(map(is_gone, pids))
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
    done = ended(process)
    assert (done.code, done.err) == (130, "dblock: interrupted\n")
    assert name not in schemas(dsn)


@pytest.mark.second_stage
def test_database_that_goes_away_is_exit_code_69(shell: Shell, dsn: str) -> None:
    with Proxy(dsn) as proxy:
        process = shell.start("demo", dsn=proxy.dsn)
        _, pids = heard_until(process, "is frozen with SIGSTOP")
        proxy.close()
        done = ended(process)
    assert done.code == 69
    assert done.err.count("\n") == 1
    assert schemas(dsn)[0] in done.err, "the error names the schema that is left behind"
    assert all(map(is_gone, pids))


def test_unreachable_database_leaves_no_file(shell: Shell) -> None:
    done = shell.run_here("demo", "--svg", "new.svg", dsn="host=127.0.0.1 port=1 user=x")
    assert done.code == 69
    assert done.err.count("\n") == 1
    assert not (shell.folder / "new.svg").exists(), "a new file is removed if the story fails"


def test_existing_file_is_not_overwritten_without_force(shell: Shell) -> None:
    there = shell.folder / "there.svg"
    there.write_text("mine")
    refused = shell.run_here("demo", "--svg", str(there))
    assert (refused.code, refused.out) == (1, "")
    assert "--force" in refused.err
    assert there.read_text() == "mine"
    unreachable = shell.run_here("demo", "--svg", str(there), "--force", dsn="host=127.0.0.1 port=1 user=x")
    assert unreachable.code == 69
    assert there.read_text() == "mine"


@pytest.mark.parametrize("path", ["missing/demo.svg", "."])
def test_file_that_cannot_be_written_is_reported_before_the_story(shell: Shell, path: str) -> None:
    done = shell.run_here("demo", "--svg", path, "--force")
    assert (done.code, done.out) == (74, "")
    assert "cannot be written" in done.err


@pytest.mark.parametrize(("seconds", "stopped"), [(0.0, True), (0.2, True), (60.0, False)])
def test_server_of_the_story_is_stopped_when_the_sessions_of_its_workers_have_ended(
    monkeypatch: pytest.MonkeyPatch, seconds: float, stopped: bool
) -> None:
    """The session of a killed worker is seen for a moment. A session that stays is that of another client."""
    server = mock.Mock()
    ends_at = time.monotonic() + seconds
    server.in_use.side_effect = lambda: time.monotonic() < ends_at
    monkeypatch.setattr("dblock.embedded.status", mock.Mock(side_effect=[None, server]))
    monkeypatch.setattr(command, "SESSIONS_END_WITHIN", 60.0 if stopped else 0.2)
    with command._temporary_server(mock.Mock()):
        pass
    assert server.stop.called == stopped
