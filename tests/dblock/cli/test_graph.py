"""`dblock graph`: the wait-for graph as text, as a picture and as JSON."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import psycopg
import pytest

import dblock
from tests.support.sessions import Sessions
from tests.support.shell import Shell, ended
from tests.support.terminal import Terminal
from tests.support.waits import WaitGraph

HOSTILE = 'a\x1b[2J\rb"<\u202ec\nd'


def hold(owner: psycopg.Connection, name: str, participant: str) -> None:
    owner.execute("SELECT try_acquire(%s, ttl => '1 hour', holder => %s)", [name, participant])


def wait(owner: psycopg.Connection, name: str, participant: str) -> None:
    owner.execute(
        "SELECT acquire(%s, attempt => gen_random_uuid(), client => gen_random_uuid(), holder => %s)",
        [name, participant],
    )
    # This waiter sends no heartbeats, and the test needs time to start several commands.
    owner.execute("UPDATE lock_clients SET seen_until = clock_timestamp() + interval '1 minute'")


@pytest.fixture
def chain(owner: psycopg.Connection) -> None:
    """Ann holds a. Bob waits for a and holds b. Carol waits for b. Zoe holds a lock without waiters."""
    for name, participant in (("a", "ann"), ("b", "bob"), ("idle", "zoe")):
        hold(owner, name, participant)
    wait(owner, "a", "bob")
    wait(owner, "b", "carol")


@pytest.fixture
def cycle(owner: psycopg.Connection) -> None:
    """Ann and bob wait for each other."""
    hold(owner, "a", "ann")
    hold(owner, "b", "bob")
    wait(owner, "a", "bob")
    wait(owner, "b", "ann")


@pytest.mark.usefixtures("chain")
def test_graph_prints_waiters_as_a_tree(shell: Shell) -> None:
    done = shell.run("graph")
    assert (done.code, done.err) == (0, "")
    first, second, third, fourth = done.out.splitlines()
    assert re.match(r"ann  holds a \(token \d{16}, ", first)
    assert second.startswith("└─ 1  bob, for ")
    assert re.match(r"      holds b \(token \d{16}, ", third)
    assert fourth.startswith("      └─ 1  carol, for ")
    assert "zoe  holds idle" in shell.run("graph", "--all").out
    assert [line[:3] for line in shell.run("graph", "b").out.splitlines()] == ["ann", "└─ ", "   ", "   "]


@pytest.mark.usefixtures("cycle")
def test_deadlock_is_printed_first_with_its_remedy(shell: Shell) -> None:
    done = shell.run("graph")
    assert done.code == 0
    assert done.out.splitlines()[:3] == [
        "Deadlock: these holders wait for each other.",
        "  ann holds a and waits for b",
        "  bob holds b and waits for a",
    ]
    assert "dblock force-release b" in done.out
    assert shell.run("force-release", "b", "--now", "--yes").code == 0
    assert "wait for each other" not in shell.run("graph").out


@pytest.mark.usefixtures("cycle")
def test_deadlock_is_reported_beside_a_picture(shell: Shell) -> None:
    done = shell.run("graph", "--format", "svg", "--output", "g.svg")
    assert (done.code, done.out) == (0, "")
    assert "these holders wait for each other" in done.err
    text = (shell.folder / "g.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert 'class="edge wait stuck"' in text


@pytest.mark.usefixtures("cycle")
def test_json_has_nodes_edges_and_cycles(shell: Shell) -> None:
    data = shell.run("graph", "--json").json
    assert {node["id"] for node in data["nodes"]} == {"participant:ann", "participant:bob", "lock:a", "lock:b"}
    assert len(data["edges"]) == 4
    assert data["cycles"] == [
        [
            {"participant": "ann", "waits_for": "b", "held_by": "bob"},
            {"participant": "bob", "waits_for": "a", "held_by": "ann"},
        ]
    ]


@pytest.mark.usefixtures("chain")
@pytest.mark.parametrize(("format_", "begins"), [("mermaid", "flowchart RL\n"), ("dot", "digraph"), ("svg", "<svg ")])
def test_every_format_is_printed(shell: Shell, format_: str, begins: str) -> None:
    done = shell.run("graph", "--format", format_)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(begins)


def test_empty_graph_is_reported_and_is_no_error(shell: Shell, client: dblock.Client) -> None:
    client.lock("a", ttl=60).acquire()
    done = shell.run("graph")
    assert (done.code, done.out) == (0, "")
    assert "No client is waiting." in done.err
    assert set(map(str, shell.run("graph", "--json").json.values())) == {"[]"}
    ElementTree.fromstring(shell.run("graph", "--format", "svg").out)


@pytest.mark.usefixtures("chain")
def test_existing_file_is_not_overwritten_without_force(shell: Shell) -> None:
    assert shell.run("graph", "--format", "dot", "--output", "g.dot").code == 0
    file = shell.folder / "g.dot"
    file.write_text("mine")
    refused = shell.run("graph", "--format", "dot", "--output", "g.dot")
    assert (refused.code, refused.out) == (1, "")
    assert "--force" in refused.err
    assert file.read_text() == "mine"
    assert shell.run("graph", "--format", "dot", "--output", "g.dot", "--force").code == 0
    assert file.read_text().startswith("digraph")
    assert shell.run("graph", "--output", "g.json", "--json").out == ""
    assert '"nodes"' in (shell.folder / "g.json").read_text()
    assert shell.run("graph", "--output", "-").out.startswith("ann")


@pytest.mark.parametrize(
    ("file", "begins"), [("g.svg", "<svg"), ("g.dot", "digraph"), ("g.mmd", "flowchart"), ("g.txt", "")]
)
def test_end_of_the_files_name_chooses_the_format(shell: Shell, file: str, begins: str) -> None:
    assert shell.run("graph", "--output", file).code == 0
    assert (shell.folder / file).read_text()[: len(begins) or 1] == begins


@pytest.mark.parametrize("path", ["nowhere/g.svg", ".", "/dev/full", "x" * 300])
def test_file_that_cannot_be_written_is_an_error(shell: Shell, path: str) -> None:
    done = shell.run("graph", "--format", "svg", "--output", path, "--force")
    assert (done.code, done.out) == (74, "")
    assert "cannot be written" in done.err
    assert done.err.count("\n") == 1


def test_unknown_format_and_conflicting_formats_are_refused(shell: Shell) -> None:
    assert shell.run("graph", "--format", "png").code == 2
    both = shell.run("graph", "--json", "--format", "svg")
    assert both.code == 2
    assert "one of them" in both.err


def test_hostile_names_move_no_cursor(shell: Shell, owner: psycopg.Connection) -> None:
    hold(owner, HOSTILE, HOSTILE)
    wait(owner, HOSTILE, f"w{HOSTILE}")
    out = shell.run("graph").out
    assert not set(out) & {"\x1b", "\r", "\u202e"}
    assert len(out.splitlines()) == 2
    assert shell.run("graph", "--json").json["nodes"][-1]["name"] == HOSTILE


@pytest.mark.second_stage
@pytest.mark.usefixtures("cycle")
def test_terminal_gets_colours_and_a_pipe_does_not(shell: Shell) -> None:
    assert "\x1b" not in shell.run("graph").out
    with Terminal(shell.command("graph"), columns=40) as terminal:
        assert terminal.ended() == 0
        assert b"\x1b[1;31mDeadlock: these holders wait for" in terminal.raw
        assert "└─ 1  bob" in terminal.text
    with Terminal(shell.command("graph"), env={"NO_COLOR": "1"}) as terminal:
        assert terminal.ended() == 0
        assert b"31m" not in terminal.raw


def test_graph_is_one_snapshot(owner: psycopg.Connection, dsn: str) -> None:
    """Between the two statements ann releases a and waits for bob. There was never a cycle, and none is seen."""
    from dblock._runtime.target import resolve
    from dblock.admin.graph.waits import build_graph
    from dblock.admin.inspect import overview

    hold(owner, "a", "ann")
    hold(owner, "b", "bob")
    with overview(resolve(dsn)) as database, database.one_moment():
        locks = database.locks()
        owner.execute("SELECT release('a', (holder('a')).token)")
        wait(owner, "b", "ann")
        assert database.waiters() == []
    with overview(resolve(dsn)) as database, database.one_moment():
        assert len(build_graph(database.locks(), database.waiters()).waits) == 1
    assert len(locks) == 2


def test_unreachable_database_leaves_no_file(shell: Shell) -> None:
    done = shell.run("graph", "--output", "g.svg", dsn="host=127.0.0.1 port=1 user=x")
    assert (done.code, done.out) == (69, "")
    assert not Path(shell.folder / "g.svg").exists()


@pytest.mark.second_stage
@pytest.mark.usefixtures("chain")
def test_output_that_cannot_be_written_is_an_error(shell: Shell) -> None:
    with open("/dev/full", "w") as full:
        done = ended(shell.start("graph", stdout=full))
    assert done.code == 74
    assert "No space" in done.err


def test_deadlock_over_a_session_is_shown(shell: Shell, owner: psycopg.Connection, sessions: Sessions) -> None:
    """Ann's session waits for a row of bob's session, and bob waits for ann's lock."""
    owner.execute("CREATE TABLE public.accounts AS SELECT 1 AS id")
    graph = WaitGraph(owner)
    ann, bob = graph.add("ann").hold("a"), graph.add("bob").hold("b")
    of_ann, of_bob = sessions.open(), sessions.open()
    for session, participant, name in ((of_ann, ann, "a"), (of_bob, bob, "b")):
        session.do("BEGIN")
        session.do("SELECT bind_transaction(%s, %s)", name, participant.tokens[0])
    of_bob.do("UPDATE public.accounts SET id = 2")
    updating = of_ann.start("UPDATE public.accounts SET id = 3")
    of_ann.wait_until_blocked()
    alone = shell.run("graph")
    here, there = (session.connection.info.backend_pid for session in (of_ann, of_bob))
    wait = f"  ann waits in session {here} for session {there}, in which bob works under token {bob.tokens[0]}\n"
    assert wait in alone.out
    assert "Deadlock" not in alone.out
    bob.wait("a").note()
    owner.execute("UPDATE lock_clients SET seen_until = clock_timestamp() + interval '1 minute'")
    text = shell.run("graph").out
    assert text.startswith("Deadlock: each of these waits for the next.")
    assert f"  bob waits for a, which ann holds under token {ann.tokens[0]}\n" in text
    data = shell.run("graph", "--json").json
    (deadlock,) = data["deadlocks"]
    assert {(one["waiter"], one["lock"], one["session"]) for one in deadlock} == {
        ("bob", "a", None),
        ("ann", None, here),
    }
    assert [one["blocker"] for one in data["session_waits"]] == [there]
    of_bob.do("ROLLBACK")
    updating.result(20)
