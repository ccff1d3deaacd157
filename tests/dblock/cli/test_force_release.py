"""`dblock force-release` takes a lock from its holder, states the consequences, and records actor and reason."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import conninfo

import dblock
from dblock._runtime.target import resolve
from dblock.admin import inspect, schema
from dblock.admin.inspect import overview
from tests.support.eventually import eventually
from tests.support.proxy import Proxy
from tests.support.shell import Shell
from tests.support.terminal import Terminal
from tests.support.waits import join_queue


@pytest.fixture
def lease(dsn: str) -> Iterator[dblock.Lease]:
    """A lease without keep-alive, so that its holder does not react to the forced release."""
    with dblock.Client(dsn, holder="ann") as ann:
        yield ann.lock("job", ttl=60, keep_alive=False).acquire()


def holds(owner: psycopg.Connection) -> bool:
    return owner.execute("SELECT count(*) FROM holder('job')").fetchone() == (1,)


def test_forced_holder_keeps_the_lock_until_it_releases(
    shell: Shell, lease: dblock.Lease, owner: psycopg.Connection
) -> None:
    done = shell.run("force-release", "job", "--yes", "--reason", "stuck")
    assert done.code == 0
    assert f"ann was told to release lock 'job', held under token {lease.token}" in done.out
    assert holds(owner)
    with pytest.raises(dblock.LeaseLost, match="forced"):
        lease.renew()
    assert shell.run("ls", "--json").json[0]["state"] == "forced"
    assert "told to release" in shell.run("show", "job").out


def test_lock_forced_now_is_free_at_once(shell: Shell, lease: dblock.Lease, dsn: str) -> None:
    with dblock.Client(dsn) as client:
        done = shell.run("force-release", "job", "--now", "--yes")
        assert done.code == 0
        assert "The lock is free." in done.out
        assert client.lock("job").try_acquire() is not None


def test_force_release_now_wakes_the_first_waiter(dsn: str, lease: dblock.Lease, owner: psycopg.Connection) -> None:
    """The waiter is notified and need not poll."""
    waiter = uuid.uuid4()
    join_queue(owner, "job", client=waiter)
    owner.execute(f'LISTEN "dblock_{waiter.hex}"'.encode())
    with overview(resolve(dsn)) as database:
        assert database.force_release("job", lease.token, actor="me", reason="", now=True)
    assert len(list(owner.notifies(timeout=60, stop_after=1))) == 1


@pytest.mark.second_stage
def test_first_waiter_acquires_at_once_after_force_release_now(shell: Shell, lease: dblock.Lease, dsn: str) -> None:
    process = shell.start("run", "job", "--", "echo", "mine")
    with dblock.Client(dsn) as client:
        eventually(client.lock("job").queue)
    assert shell.run("force-release", "job", "--now", "--yes").code == 0
    assert process.communicate(timeout=20)[0] == "mine\n"


def test_history_records_actor_and_reason(shell: Shell, lease: dblock.Lease) -> None:
    shell.run("force-release", "job", "--yes", "--reason", "stuck since noon")
    (event,) = shell.run("history", "job", "--json").json
    assert (event["event"], event["token"], event["holder"]) == ("forced", lease.token, "ann")
    assert event["reason"] == "stuck since noon"
    assert "@" in event["actor"]
    assert "stuck since noon" in shell.run("history").out


def test_force_release_prints_json(shell: Shell, lease: dblock.Lease) -> None:
    data = shell.run("force-release", "job", "--yes", "--reason", "x", "--json").json
    assert 50 < data.pop("free_within") <= 60
    assert data == {"name": "job", "token": lease.token, "holder": "ann", "now": False, "reason": "x"}


def test_force_release_without_confirmation_does_nothing(
    shell: Shell, lease: dblock.Lease, owner: psycopg.Connection
) -> None:
    done = shell.run("force-release", "job", "--now")
    assert done.code == 1
    assert "--yes" in done.err
    assert holds(owner)


@pytest.mark.second_stage
def test_terminal_shows_consequences_and_asks_for_confirmation(
    shell: Shell, lease: dblock.Lease, owner: psycopg.Connection
) -> None:
    with Terminal(shell.command("force-release", "job", "--now")) as terminal:
        seen = terminal.wait_for("Go ahead?")
        assert "held by ann" in seen
        assert "two holders may work" in " ".join(seen.split())
        assert holds(owner)
        terminal.press("n\r")
        terminal.wait_for("nothing was done")
        assert terminal.ended() == 1
    assert holds(owner)
    with Terminal(shell.command("force-release", "job")) as terminal:
        terminal.wait_for("Go ahead?")
        terminal.press("y\r")
        terminal.wait_for("Reason, for the history")
        terminal.press("it is late\r")
        terminal.wait_for("told to release")
        assert terminal.ended() == 0
    assert shell.run("history", "job", "--json").json[0]["reason"] == "it is late"


@pytest.mark.second_stage
@pytest.mark.parametrize("question", ["Go ahead?", "Reason, for the history"])
def test_ctrl_c_at_a_prompt_does_nothing(
    shell: Shell, lease: dblock.Lease, owner: psycopg.Connection, question: str
) -> None:
    with Terminal(shell.command("force-release", "job", "--now")) as terminal:
        terminal.wait_for("Go ahead?")
        if question != "Go ahead?":
            terminal.press("y\r")
            terminal.wait_for(question)
        terminal.press("\x03")
        terminal.wait_for("interrupted")
        assert terminal.ended() == 130
    assert holds(owner)


@pytest.mark.second_stage
def test_lock_with_a_new_holder_is_not_force_released(shell: Shell, lease: dblock.Lease, dsn: str) -> None:
    """The command acts only on the grant that it showed."""
    command = shell.command("force-release", "job", "--now")
    with dblock.Client(dsn, holder="bob") as bob, Terminal(command, columns=200) as terminal:
        terminal.wait_for("held by ann")
        lease.release()
        next_one = bob.lock("job", ttl=60).acquire()
        terminal.press("y\rwhy not\r")
        terminal.wait_for("is no longer held under token")
        assert terminal.ended() == 1
        next_one.renew()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "not held; there is nothing to release.\n"),
        (["free"], "not held; there is nothing to release. See: dblock show free\n"),
        (["job", "--token", "999"], "not 999; nothing was done"),
    ],
)
def test_lock_that_is_not_held_as_given_is_an_error(
    shell: Shell, lease: dblock.Lease, client: dblock.Client, arguments: list[str], says: str
) -> None:
    client.lock("free").acquire().release()
    done = shell.run("force-release", *arguments, "--yes")
    assert (done.code, done.out) == (1, "")
    assert says in done.err


def test_lock_without_a_token_is_not_held_under_one(shell: Shell, client: dblock.Client) -> None:
    with client.efficiency_lock("job"):
        done = shell.run_here("force-release", "job", "--token", "999", "--yes")
    assert done.code == 1
    assert "held without durability or token, not under token 999; nothing was done" in done.err


def test_second_force_release_fails_and_suggests_now(
    shell: Shell, lease: dblock.Lease, owner: psycopg.Connection
) -> None:
    shell.run("force-release", "job", "--yes")
    again = shell.run("force-release", "job", "--yes")
    assert again.code == 1
    assert "--now" in again.err
    assert shell.run("force-release", "job", "--yes", "--now").code == 0
    assert not holds(owner)


def test_lock_without_durability_can_be_force_released(shell: Shell, dsn: str, owner: psycopg.Connection) -> None:
    with dblock.Client(dsn) as client:
        client.efficiency_lock("job", ttl=60, keep_alive=False).acquire()
        assert "without durability" in shell.run("force-release", "job", "--yes", "--now").out
        assert not holds(owner)


@pytest.mark.second_stage
def test_lock_without_durability_and_with_a_new_holder_is_not_force_released(
    shell: Shell, dsn: str, owner: psycopg.Connection
) -> None:
    command = shell.command("force-release", "job", "--now")
    with dblock.Client(dsn) as client, Terminal(command, columns=200) as terminal:
        lock = client.efficiency_lock("job", ttl=60, keep_alive=False)
        first = lock.acquire()
        terminal.wait_for("without durability")
        first.release()
        lock.acquire()
        terminal.press("y\rwhy not\r")
        terminal.wait_for("nothing was done")
        assert terminal.ended() == 1
        assert holds(owner)


def test_force_release_gives_up_behind_an_open_transaction(
    shell: Shell, lease: dblock.Lease, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "FORCE_PATIENCE", "200ms")
    with psycopg.connect(dsn) as other:
        other.execute("SELECT 1 FROM dblock.distributed_locks WHERE name = 'job' FOR UPDATE")
        done = shell.run("force-release", "job", "--yes")
    assert done.code == 71
    assert "Another transaction is in the way" in done.err


def test_role_without_the_privilege_cannot_force_release(
    shell: Shell, lease: dblock.Lease, dsn: str, role: str, owner: psycopg.Connection
) -> None:
    as_role = conninfo.make_conninfo(dsn, user=role, password="app")
    schema.grant(dsn, role, may=["lock", "see"])
    refused = shell.run("force-release", "job", "--yes", "--now", dsn=as_role)
    assert refused.code == 77
    assert "--may force-release" in refused.err
    assert holds(owner)
    schema.grant(dsn, role, may=["see", "force-release"])
    assert shell.run("force-release", "job", "--yes", "--now", dsn=as_role).code == 0
    assert not holds(owner)


@pytest.mark.second_stage
def test_database_that_goes_away_at_the_prompt_is_unreachable(shell: Shell, lease: dblock.Lease, dsn: str) -> None:
    with Proxy(dsn) as proxy, Terminal(shell.command("force-release", "job", dsn=proxy.dsn)) as terminal:
        terminal.wait_for("Go ahead?")
        proxy.close()
        terminal.press("y\rwhy\r")
        assert terminal.ended() == 69
        assert "Traceback" not in terminal.text
