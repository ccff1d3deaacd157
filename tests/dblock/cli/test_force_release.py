"""`dblock break`: a lock is taken from its holder, by somebody who knows what that means, and it is remembered."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import conninfo

import dblock
from dblock._runtime.target import resolve
from dblock.admin import schema
from dblock.admin.inspect import overview
from tests.support.proxy import Proxy
from tests.support.shell import Shell, until
from tests.support.terminal import Terminal


@pytest.fixture
def lease(dsn: str) -> Iterator[dblock.Lease]:
    """A lease that is not kept alive: what its holder does about it is no matter here."""
    with dblock.Client(dsn, holder="ann") as ann:
        yield ann.lock("job", ttl=60, keep_alive=False).acquire()


def holds(owner: psycopg.Connection) -> bool:
    return owner.execute("SELECT count(*) FROM holder('job')").fetchone() == (1,)


def test_the_holder_is_told_and_the_lock_free_later(
    shell: Shell, lease: dblock.Lease, owner: psycopg.Connection
) -> None:
    done = shell.run("break", "job", "--yes", "--why", "stuck")
    assert done.code == 0
    assert f"ann was told to let go of lock 'job', held under token {lease.token}" in done.out
    assert holds(owner)
    with pytest.raises(dblock.LeaseLost, match="forced"):
        lease.renew()
    assert shell.run("ls", "--json").json[0]["state"] == "forced"
    assert "told to let go" in shell.run("show", "job").out


def test_lock_forced_now_is_free_at_once(shell: Shell, lease: dblock.Lease, dsn: str) -> None:
    with dblock.Client(dsn) as client:
        done = shell.run("break", "job", "--now", "--yes")
        assert done.code == 0
        assert "it is free" in done.out
        assert client.lock("job").try_acquire() is not None


def test_the_first_in_line_is_woken(dsn: str, lease: dblock.Lease, owner: psycopg.Connection) -> None:
    """And need not find out by itself."""
    waiter = uuid.uuid4()
    owner.execute("SELECT acquire('job', attempt => gen_random_uuid(), client => %s)", [waiter])
    owner.execute(f'LISTEN "dblock_{waiter.hex}"'.encode())
    with overview(resolve(dsn)) as look:
        assert look.force_release("job", lease.token, actor="me", reason="", now=True)
    assert len(list(owner.notifies(timeout=5, stop_after=1))) == 1


def test_the_first_in_line_has_it_at_once(shell: Shell, lease: dblock.Lease, dsn: str) -> None:
    process = shell.start("run", "job", "--", "echo", "mine")
    with dblock.Client(dsn) as client:
        until(client.lock("job").queue)
    assert shell.run("break", "job", "--now", "--yes").code == 0
    assert process.communicate(timeout=20)[0] == "mine\n"


def test_who_and_why_are_remembered(shell: Shell, lease: dblock.Lease) -> None:
    shell.run("break", "job", "--yes", "--why", "stuck since noon")
    (event,) = shell.run("history", "job", "--json").json
    assert (event["event"], event["token"], event["holder"]) == ("forced", lease.token, "ann")
    assert event["reason"] == "stuck since noon"
    assert "@" in event["actor"]
    assert "stuck since noon" in shell.run("history").out


def test_told_in_json(shell: Shell, lease: dblock.Lease) -> None:
    facts = shell.run("break", "job", "--yes", "--why", "x", "--json").json
    assert 50 < facts.pop("free_within") <= 60
    assert facts == {"name": "job", "token": lease.token, "holder": "ann", "now": False, "why": "x"}


def test_nothing_is_done_unasked(shell: Shell, lease: dblock.Lease, owner: psycopg.Connection) -> None:
    done = shell.run("break", "job", "--now")
    assert done.code == 1
    assert "--yes" in done.err
    assert holds(owner)


def test_at_a_terminal_it_names_the_consequences_and_asks(
    shell: Shell, lease: dblock.Lease, owner: psycopg.Connection
) -> None:
    with Terminal(shell.command("break", "job", "--now")) as terminal:
        seen = terminal.wait_for("Go ahead?")
        assert "held by ann" in seen
        assert "two may be at work" in " ".join(seen.split())
        assert holds(owner)
        terminal.press("n\r")
        terminal.wait_for("nothing was done")
        assert terminal.ended() == 1
    assert holds(owner)
    with Terminal(shell.command("break", "job")) as terminal:
        terminal.wait_for("Go ahead?")
        terminal.press("y\r")
        terminal.wait_for("Why?")
        terminal.press("it is late\r")
        terminal.wait_for("told to let go")
        assert terminal.ended() == 0
    assert shell.run("history", "job", "--json").json[0]["reason"] == "it is late"


@pytest.mark.parametrize("question", ["Go ahead?", "Why?"])
def test_ctrl_c_at_a_question_does_nothing(
    shell: Shell, lease: dblock.Lease, owner: psycopg.Connection, question: str
) -> None:
    with Terminal(shell.command("break", "job", "--now")) as terminal:
        terminal.wait_for("Go ahead?")
        if question == "Why?":
            terminal.press("y\r")
            terminal.wait_for(question)
        terminal.press("\x03")
        terminal.wait_for("interrupted")
        assert terminal.ended() == 130
    assert holds(owner)


def test_one_that_has_changed_hands_since_it_was_looked_at(shell: Shell, lease: dblock.Lease, dsn: str) -> None:
    """Whoever has it now is not the one that was meant."""
    with dblock.Client(dsn, holder="bob") as bob, Terminal(shell.command("break", "job", "--now")) as terminal:
        terminal.wait_for("held by ann")
        lease.release()
        next_one = bob.lock("job", ttl=60).acquire()
        terminal.press("y\rwhy not\r")
        terminal.wait_for("any more; nothing was done")
        assert terminal.ended() == 1
        next_one.renew()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "not held"),
        (["free"], "not held"),
        (["job", "--token", "999"], "not held under token 999"),
    ],
)
def test_what_cannot_be_broken_is_said(
    shell: Shell, lease: dblock.Lease, client: dblock.Client, arguments: list[str], says: str
) -> None:
    client.lock("free").acquire().release()
    done = shell.run("break", *arguments, "--yes")
    assert (done.code, done.out) == (1, "")
    assert says in done.err


def test_told_twice_it_says_so_and_offers_more(shell: Shell, lease: dblock.Lease, owner: psycopg.Connection) -> None:
    shell.run("break", "job", "--yes")
    again = shell.run("break", "job", "--yes")
    assert again.code == 1
    assert "--now" in again.err
    assert shell.run("break", "job", "--yes", "--now").code == 0
    assert not holds(owner)


def test_a_lock_without_durability_can_be_broken(shell: Shell, dsn: str, owner: psycopg.Connection) -> None:
    with dblock.Client(dsn) as client:
        client.efficiency_lock("job", ttl=60, keep_alive=False).acquire()
        assert "without durability" in shell.run("break", "job", "--yes", "--now").out
        assert not holds(owner)


def test_one_without_durability_that_has_changed_hands(shell: Shell, dsn: str, owner: psycopg.Connection) -> None:
    command = shell.command("break", "job", "--now")
    with dblock.Client(dsn) as client, Terminal(command, columns=200) as terminal:
        lock = client.efficiency_lock("job", ttl=60, keep_alive=False)
        first = lock.acquire()
        terminal.wait_for("without durability")
        first.release()
        lock.acquire()
        terminal.press("y\rwhy not\r")
        terminal.wait_for("any more; nothing was done")
        assert terminal.ended() == 1
        assert holds(owner)


def test_a_transaction_at_work_on_the_lock_is_not_waited_for_without_end(
    shell: Shell, lease: dblock.Lease, dsn: str
) -> None:
    with psycopg.connect(dsn) as other:
        other.execute("SELECT 1 FROM dblock.distributed_locks WHERE name = 'job' FOR UPDATE")
        done = shell.run("break", "job", "--yes")
    assert done.code == 1
    assert "Another transaction is in the way" in done.err


def test_only_who_may(shell: Shell, lease: dblock.Lease, dsn: str, role: str, owner: psycopg.Connection) -> None:
    as_role = conninfo.make_conninfo(dsn, user=role, password="app")
    schema.grant(dsn, role, may=["lock", "see"])
    refused = shell.run("break", "job", "--yes", "--now", dsn=as_role)
    assert refused.code == 1
    assert "--may force-release" in refused.err
    assert holds(owner)
    schema.grant(dsn, role, may=["see", "force-release"])
    assert shell.run("break", "job", "--yes", "--now", dsn=as_role).code == 0
    assert not holds(owner)


def test_a_database_that_goes_away_at_the_question(shell: Shell, lease: dblock.Lease, dsn: str) -> None:
    with Proxy(dsn) as proxy, Terminal(shell.command("break", "job", dsn=proxy.dsn)) as terminal:
        terminal.wait_for("Go ahead?")
        proxy.close()
        terminal.press("y\rwhy\r")
        assert terminal.ended() == 69
        assert "Traceback" not in terminal.text
