"""ls, show, history, waiters: what goes on, for people and for programs."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import psycopg
import pytest

import dblock
from dblock.cli.context import Asked
from dblock.cli.watch.stream import _warn
from tests.support.proxy import Proxy
from tests.support.shell import Shell, ended, until
from tests.support.terminal import Terminal

HOSTILE = "a\x1b[2J\rb\u202ec\nd"


def test_locks_are_listed(shell: Shell, client: dblock.Client) -> None:
    client.lock("invoice:1", ttl=60, meta={"who": "me"}).acquire()
    client.lock("report", ttl=60).acquire()
    client.lock("free").acquire().release()
    listed = shell.run("ls")
    assert listed.code == 0
    header, *rows = listed.out.splitlines()
    assert header.split() == ["LOCK", "STATE", "HOLDER", "TOKEN", "LEFT", "WAITING"]
    assert [row.split()[:2] for row in rows] == [["invoice:1", "held"], ["report", "held"]]
    assert [one["name"] for one in shell.run("ls", "inv*", "--json").json] == ["invoice:1"]
    everything = shell.run("ls", "--all", "--json").json
    assert {one["name"]: one["state"] for one in everything} == {"invoice:1": "held", "report": "held", "free": "free"}
    limited = shell.run("ls", "--all", "--limit", "1")
    assert len(limited.out.splitlines()) == 2
    assert "more than 1" in limited.err


def test_nothing_to_list_is_said_and_is_no_error(shell: Shell) -> None:
    for command, said in (("ls", "No lock"), ("waiters", "Nobody waits"), ("history", "Nothing has gone wrong")):
        done = shell.run(command)
        assert (done.code, done.out) == (0, "")
        assert said in done.err
        assert shell.run(command, "--json").json == []


@pytest.mark.parametrize("pattern", ["a_c", "a%", "a\\"])
def test_a_pattern_means_only_what_it_says(shell: Shell, client: dblock.Client, pattern: str) -> None:
    """Only * and ? stand for others; what SQL has for that stands for itself."""
    client.lock("abc", ttl=60).acquire()
    client.lock(pattern, ttl=60).acquire()
    assert [one["name"] for one in shell.run("ls", pattern, "--json").json] == [pattern]
    assert [one["name"] for one in shell.run("ls", "a?c", "--json").json if one["name"] == "abc"] == ["abc"]


def test_one_lock_is_shown_with_its_line_and_its_history(shell: Shell, dsn: str, owner: psycopg.Connection) -> None:
    owner.execute("SELECT note('a', 1, 'expired', 'yesterday', now() - interval '1 day')")
    with dblock.Client(dsn, holder="ann") as ann, dblock.Client(dsn, holder="bob") as bob:
        ann.lock("a", ttl=60, meta={"job": 7}).acquire()
        with pytest.raises(dblock.LockTimeout):
            bob.lock("a", timeout=0.01).acquire()
        owner.execute(
            "SELECT acquire('a', attempt => gen_random_uuid(), client => gen_random_uuid(), holder => 'carol')"
        )
        shown = shell.run("show", "a").out
        for part in ("held", "ann", '{"job": 7}', "deadline", "in line", "carol", "ran out unreleased", "yesterday"):
            assert part in shown
        facts = shell.run("show", "a", "--json").json
    assert facts["lock"]["holder"] == "ann"
    assert [one["holder"] for one in facts["waiters"]] == ["carol"]
    assert [one["event"] for one in facts["history"]] == ["expired"]


def test_a_lock_that_is_not_known(shell: Shell) -> None:
    done = shell.run("show", "nope")
    assert (done.code, done.out) == (1, "")
    assert "not known" in done.err


def test_waiters_are_listed_in_order(shell: Shell, owner: psycopg.Connection, client: dblock.Client) -> None:
    client.lock("a", ttl=60).acquire()
    for who in ("first", "second"):
        owner.execute(
            "SELECT acquire('a', attempt => gen_random_uuid(), client => gen_random_uuid(), holder => %s)", [who]
        )
    assert [row.split()[:3] for row in shell.run("waiters").out.splitlines()[1:]] == [
        ["a", "1", "first"],
        ["a", "2", "second"],
    ]
    assert [one["holder"] for one in shell.run("waiters", "a", "--json").json] == ["first", "second"]


def test_the_history_can_have_every_grant(shell: Shell, client: dblock.Client) -> None:
    client.lock("a").acquire().release()
    assert shell.run("history", "--json").json == []
    assert "every grant" in shell.run("history", "--record", "all").out
    client.lock("a").acquire().release()
    assert [one["event"] for one in shell.run("history", "a", "--json").json] == ["released", "granted"]
    assert "only what goes wrong" in shell.run("history", "--record", "incidents").out
    client.lock("a").acquire().release()
    assert len(shell.run("history", "a").out.splitlines()) == 3


def test_turning_it_on_or_off_costs_nobody_a_lease(shell: Shell, dsn: str, client: dblock.Client) -> None:
    """A transaction that stays open keeps the table from us; renewals must not wait behind us."""
    lease = client.lock("a", ttl=1).acquire()
    shell.run("history", "--record", "all")
    with psycopg.connect(dsn) as other:
        other.execute("SELECT 1 FROM dblock.distributed_locks WHERE name = 'b' FOR SHARE")
        process = shell.start("history", "--record", "incidents")
        time.sleep(2.5)
        assert process.poll() is None
        assert lease.remaining() > 0
    assert ended(process).code == 0
    assert lease.remaining() > 0


def test_what_others_have_written_moves_no_cursor(shell: Shell, dsn: str) -> None:
    with dblock.Client(dsn, holder=HOSTILE) as client:
        client.lock(HOSTILE, ttl=60, meta={"x": HOSTILE}).acquire()
        for arguments in (["ls"], ["show", HOSTILE]):
            out = shell.run(*arguments).out
            assert "\\x1b[2J" in out
            assert not set(out) & {"\x1b", "\r", "\u202e"}
            assert "c\\nd" in out
        assert shell.run("ls", "--json").json[0]["name"] == HOSTILE


@pytest.mark.parametrize("command", [["ls"], ["show", "a"], ["history"], ["waiters"]])
def test_a_database_that_cannot_be_reached(shell: Shell, command: list[str]) -> None:
    done = shell.run(*command, dsn="host=127.0.0.1 port=1 user=x password=hunter2")
    assert (done.code, done.out) == (69, "")
    assert done.err.startswith("dblock: ")
    assert "hunter2" not in done.err
    told = shell.run(*command, "--json", dsn="host=127.0.0.1 port=1 user=x")
    assert '"exit_code": 69' in told.err


@pytest.mark.parametrize("command", [["ls"], ["show", "a"], ["history"], ["waiters"]])
def test_a_database_that_falls_silent_in_the_middle(shell: Shell, dsn: str, command: list[str]) -> None:
    """Nothing comes any more; Ctrl-C ends it, in one line."""
    with Proxy(dsn) as proxy:
        proxy.fall_silent()
        process = shell.start(*command, dsn=proxy.dsn)
        until(lambda: proxy.requests, "the request")
        process.send_signal(signal.SIGINT)
        done = ended(process)
    assert done.code in (130, 69)
    assert done.err.count("\n") == 1


def test_a_schema_that_is_not_there(shell: Shell, bare_dsn: str) -> None:
    done = shell.run("ls", dsn=bare_dsn)
    assert done.code == 1
    assert "dblock install" in done.err


def test_a_role_without_the_right_is_told_which(shell: Shell, dsn: str, role: str) -> None:
    from psycopg import conninfo

    from dblock.admin import schema

    as_role = conninfo.make_conninfo(dsn, user=role, password="app")
    schema.grant(dsn, role)
    refused = shell.run("ls", dsn=as_role)
    assert refused.code == 1
    assert "--may see" in refused.err
    schema.grant(dsn, role, may=["see"])
    assert shell.run("ls", dsn=as_role).code == 0


def test_output_that_cannot_be_written_is_an_error(shell: Shell, client: dblock.Client) -> None:
    client.lock("a", ttl=60).acquire()
    with open("/dev/full", "w") as full:
        process = shell.start("ls", stdout=full)
        done = ended(process)
    assert done.code == 1
    assert "No space" in done.err


def test_a_terminal_gets_a_table_that_fits(shell: Shell, client: dblock.Client) -> None:
    client.lock("a" * 100, ttl=60).acquire()
    with Terminal(shell.command("ls"), columns=60) as terminal:
        assert terminal.ended() == 0
        lines = terminal.lines()
    assert sum(line.count("a") for line in lines) >= 100
    assert "held" in "".join(lines)


@pytest.mark.parametrize("say", [Asked.remark, lambda asked, said: _warn(asked, said, "kind")])
def test_nor_does_what_is_said_beside_the_answer(
    say: Callable[[Asked, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """It may quote an error of the database's, and with it a name."""
    say(Asked(), "the lock could not be released: a\x9b2J\x1b[2J\u202e")
    assert capsys.readouterr().err == "dblock: the lock could not be released: a\\x9b2J\\x1b[2J\\u202e\n"


def test_json_moves_no_cursor_either(shell: Shell, dsn: str) -> None:
    """JSON leaves 8-bit control characters as they are; a terminal does not."""
    hostile = "a\x7f\x9b2J\x9d0;t\x9c\u202e\u2028\U000e0001 é \U0001f600"
    with dblock.Client(dsn, holder=hostile) as client:
        client.lock(hostile, ttl=60, meta={hostile: hostile}).acquire()
        for arguments in (["ls"], ["show", hostile], ["graph", "--all"]):
            done = shell.run(*arguments, "--json")
            assert not set(done.out) & set("\x7f\x9b\x9d\x9c\u202e\u2028\U000e0001")
            assert "é \U0001f600" in done.out, "what is harmless stays readable"
            assert repr(hostile) in repr(done.json), "and to a program it is what it was"
