"""`dblock ls`, `show`, `history` and `waiters`, as text and as JSON."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import psycopg
import pytest

import dblock
from dblock.cli.context import CommandContext
from dblock.cli.watch.stream import _warn
from tests.support.eventually import eventually
from tests.support.machine import measured, too_late_to_renew
from tests.support.proxy import Proxy
from tests.support.shell import Shell, ended
from tests.support.terminal import Terminal
from tests.support.waits import join_queue

HOSTILE = "a\x1b[2J\rb\u202ec\nd"

STILL_ALIVE = "UPDATE lock_clients SET seen_until = now() + interval '1 hour'"
"""Keeps tickets in the queue although no client sends heartbeats for them: a busy machine starts commands slowly."""


def test_locks_are_listed(shell: Shell, client: dblock.Client) -> None:
    client.lock("invoice:1", ttl=60, meta={"who": "me"}).acquire()
    client.lock("report", ttl=60).acquire()
    client.lock("free").acquire().release()
    listed = shell.run("ls")
    assert listed.code == 0
    header, *rows = listed.out.splitlines()
    assert header.split() == ["LOCK", "KIND", "STATE", "HOLDER", "TOKEN", "LEFT", "WAITING"]
    assert [row.split()[:3] for row in rows] == [["invoice:1", "-", "held"], ["report", "-", "held"]]
    assert [one["name"] for one in shell.run("ls", "inv*", "--json").json] == ["invoice:1"]
    everything = shell.run("ls", "--all", "--json").json
    assert {one["name"]: one["state"] for one in everything} == {"invoice:1": "held", "report": "held", "free": "free"}
    limited = shell.run("ls", "--all", "--limit", "1")
    assert len(limited.out.splitlines()) == 2
    assert "more than 1" in limited.err


def test_empty_list_is_reported_and_is_no_error(shell: Shell) -> None:
    for command, said in (("ls", "No lock"), ("waiters", "No client is waiting"), ("history", "No incident")):
        done = shell.run(command)
        assert (done.code, done.out) == (0, "")
        assert said in done.err
        assert shell.run(command, "--json").json == []
    assert shell.run("waiters", "a*").err == "No client is waiting for lock 'a*'.\n"


@pytest.mark.parametrize("pattern", ["a_c", "a%", "a\\"])
def test_pattern_takes_sql_wildcards_literally(shell: Shell, client: dblock.Client, pattern: str) -> None:
    """Only * and ? are wildcards; the wildcards and escapes of LIKE match themselves."""
    client.lock("abc", ttl=60).acquire()
    client.lock(pattern, ttl=60).acquire()
    assert [one["name"] for one in shell.run("ls", pattern, "--json").json] == [pattern]
    assert [one["name"] for one in shell.run("ls", "a?c", "--json").json if one["name"] == "abc"] == ["abc"]


@pytest.mark.usefixtures("patient")
def test_show_prints_the_holder_queue_and_history(shell: Shell, dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("SELECT record_event('a', 1, 'expired', 'yesterday', now() - interval '1 day')")
    with dblock.Client(dsn, holder="ann") as ann, dblock.Client(dsn, holder="bob") as bob:
        ann.lock("a", ttl=60, meta={"job": 7}).acquire()
        with pytest.raises(dblock.LockTimeout):
            bob.lock("a", timeout=0.01).acquire()
        join_queue(owner, "a", "carol")
        owner.execute(STILL_ALIVE)
        shown = shell.run("show", "a").out
        for part in ("held", "ann", '{"job": 7}', "deadline", "queue", "carol", "expired", "yesterday"):
            assert part in shown
        data = shell.run("show", "a", "--json").json
    assert data["lock"]["holder"] == "ann"
    assert [one["holder"] for one in data["waiters"]] == ["carol"]
    assert [one["event"] for one in data["history"]] == ["expired"]


def test_json_keys_are_those_of_the_docs(shell: Shell, client: dblock.Client, owner: psycopg.Connection) -> None:
    client.lock("a", ttl=60).acquire()
    join_queue(owner, "a")
    owner.execute("SELECT record_event('a', 1, 'expired', 'ann', now())")
    owner.execute(STILL_ALIVE)
    page = (Path(__file__).parents[3] / "docs" / "reference" / "cli.md").read_text()
    rows = re.findall(r"^\| (lock|waiter|event) \| (`.*) \|$", page, re.MULTILINE)
    listed = {kind: set(re.findall("`(\\w+)`", re.sub(r"\([^)]*\)", "", text))) for kind, text in rows}
    printed = {"lock": shell.run("ls", "--json"), "waiter": shell.run("waiters", "--json")}
    printed["event"] = shell.run("history", "--json")
    assert {kind: {*done.json[0]} for kind, done in printed.items()} == listed
    shown = shell.run("show", "a", "--json").json
    assert {*shown} == {"lock", "shares", "waiters", "history", "grants_recorded"}
    assert [{*shown["lock"]}, {*shown["waiters"][0]}, {*shown["history"][0]}] == list(listed.values())


def test_unknown_lock_is_an_error(shell: Shell) -> None:
    done = shell.run("show", "nope")
    assert (done.code, done.out) == (1, "")
    assert "does not exist" in done.err


def test_waiters_are_listed_in_order(shell: Shell, owner: psycopg.Connection, client: dblock.Client) -> None:
    client.lock("a", ttl=60).acquire()
    for who in ("first", "second"):
        join_queue(owner, "a", who)
    owner.execute(STILL_ALIVE)
    assert [row.split()[:3] for row in shell.run("waiters").out.splitlines()[1:]] == [
        ["a", "1", "first"],
        ["a", "2", "second"],
    ]
    assert [one["holder"] for one in shell.run("waiters", "a", "--json").json] == ["first", "second"]


def test_history_records_every_grant_on_request(shell: Shell, client: dblock.Client) -> None:
    client.lock("a").acquire().release()
    assert shell.run("history", "--json").json == []
    assert "every grant" in shell.run("history", "--record", "all").out
    client.lock("a").acquire().release()
    assert [one["event"] for one in shell.run("history", "a", "--json").json] == ["released", "granted"]
    assert "only incidents" in shell.run("history", "--record", "incidents").out
    client.lock("a").acquire().release()
    assert len(shell.run("history", "a").out.splitlines()) == 3


def is_renewed_after(lease: dblock.Lease, before: datetime) -> Callable[[], bool]:
    """Return a condition that holds after the next renewal, or when none can come any more."""
    return lambda: lease.expires_at > before or not lease.remaining()


@pytest.mark.second_stage
@pytest.mark.alone
@pytest.mark.alone
@pytest.mark.parametrize(("ttl", "renewals"), [(6, 1), pytest.param(1, 6, marks=pytest.mark.second_stage)])
def test_switching_the_record_costs_no_lease(
    shell: Shell, dsn: str, client: dblock.Client, owner: psycopg.Connection, ttl: float, renewals: int
) -> None:
    """While an open transaction keeps the command from the table, renewals must not wait behind the command."""
    shell.run("history", "--record", "all")
    with measured() as lateness:
        lease = client.lock("a", ttl=ttl).acquire()
        with psycopg.connect(dsn) as other:
            other.execute("SELECT 1 FROM dblock.distributed_locks WHERE name = 'b' FOR SHARE")
            process = shell.start("history", "--record", "incidents")
            waiting = "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'distributed_locks'::regclass"
            eventually(lambda: owner.execute(waiting).fetchone(), "the command's wait for the table")
            for _ in range(renewals):
                eventually(is_renewed_after(lease, lease.expires_at), "a renewal")
            assert process.poll() is None
            assert lease.remaining() > 0 or too_late_to_renew(lateness(), ttl)
        assert ended(process).code == 0
        assert lease.remaining() > 0 or too_late_to_renew(lateness(), ttl)


def test_hostile_names_move_no_cursor(shell: Shell, dsn: str) -> None:
    with dblock.Client(dsn, holder=HOSTILE) as client:
        client.lock(HOSTILE, ttl=60, meta={"x": HOSTILE}).acquire()
        for arguments in (["ls"], ["show", HOSTILE]):
            out = shell.run(*arguments).out
            assert "\\x1b[2J" in out
            assert not set(out) & {"\x1b", "\r", "\u202e"}
            assert "c\\nd" in out
        assert shell.run("ls", "--json").json[0]["name"] == HOSTILE


@pytest.mark.parametrize("command", [["ls"], ["show", "a"], ["history"], ["waiters"]])
def test_unreachable_database_is_exit_code_69(shell: Shell, command: list[str]) -> None:
    done = shell.run(*command, dsn="host=127.0.0.1 port=1 user=x password=hunter2")
    assert (done.code, done.out) == (69, "")
    assert done.err.startswith("dblock: ")
    assert "hunter2" not in done.err
    told = shell.run(*command, "--json", dsn="host=127.0.0.1 port=1 user=x")
    assert '"exit_code": 69' in told.err


@pytest.mark.second_stage
@pytest.mark.parametrize("command", [["ls"], ["show", "a"], ["history"], ["waiters"]])
def test_ctrl_c_ends_a_command_whose_database_stops_replying(shell: Shell, dsn: str, command: list[str]) -> None:
    """Ctrl-C ends the command, with one line on standard error."""
    with Proxy(dsn) as proxy:
        proxy.fall_silent()
        process = shell.start(*command, dsn=proxy.dsn)
        eventually(lambda: proxy.requests, "the request")
        process.send_signal(signal.SIGINT)
        done = ended(process)
    assert done.code in (130, 69)
    assert done.err.count("\n") == 1


def test_missing_schema_suggests_the_install(shell: Shell, bare_dsn: str) -> None:
    done = shell.run("ls", dsn=bare_dsn)
    assert done.code == 78
    assert "dblock install" in done.err


def test_role_without_the_privilege_learns_its_name(shell: Shell, dsn: str, role: str) -> None:
    from psycopg import conninfo

    from dblock.admin import schema

    as_role = conninfo.make_conninfo(dsn, user=role, password="app")
    schema.grant(dsn, role)
    refused = shell.run("ls", dsn=as_role)
    assert refused.code == 77
    assert "--may see" in refused.err
    schema.grant(dsn, role, may=["see"])
    assert shell.run("ls", dsn=as_role).code == 0


@pytest.mark.second_stage
def test_output_that_cannot_be_written_is_an_error(shell: Shell, client: dblock.Client) -> None:
    client.lock("a", ttl=60).acquire()
    with open("/dev/full", "w") as full:
        process = shell.start("ls", stdout=full)
        done = ended(process)
    assert done.code == 74
    assert "No space" in done.err


@pytest.mark.second_stage
def test_table_fits_the_terminal(shell: Shell, client: dblock.Client) -> None:
    client.lock("a" * 100, ttl=60).acquire()
    with Terminal(shell.command("ls"), columns=60) as terminal:
        assert terminal.ended() == 0
        lines = terminal.lines()
    assert sum(line.count("a") for line in lines) >= 100
    assert "held" in "".join(lines)


@pytest.mark.parametrize("say", [CommandContext.notice, lambda context, said: _warn(context, said, "kind")])
def test_notices_and_warnings_move_no_cursor(
    say: Callable[[CommandContext, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A notice may quote an error of the database, and with it a name."""
    say(CommandContext(), "the lock could not be released: a\x9b2J\x1b[2J\u202e")
    assert capsys.readouterr().err == "dblock: the lock could not be released: a\\x9b2J\\x1b[2J\\u202e\n"


def test_json_output_moves_no_cursor(shell: Shell, dsn: str) -> None:
    """JSON leaves 8-bit control characters as they are, but a terminal interprets them."""
    hostile = "a\x7f\x9b2J\x9d0;t\x9c\u202e\u2028\U000e0001 é \U0001f600"
    with dblock.Client(dsn, holder=hostile) as client:
        client.lock(hostile, ttl=60, meta={hostile: hostile}).acquire()
        for arguments in (["ls"], ["show", hostile], ["graph", "--all"]):
            done = shell.run(*arguments, "--json")
            assert not set(done.out) & set("\x7f\x9b\x9d\x9c\u202e\u2028\U000e0001")
            assert "é \U0001f600" in done.out, "harmless characters stay readable"
            assert repr(hostile) in repr(done.json), "a program reads the same value"
