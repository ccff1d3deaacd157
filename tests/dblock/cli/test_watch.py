"""`dblock watch`: the contents of the live screen, and the stream of lines without a terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import dblock
from tests.support.eventually import eventually
from tests.support.machine import measured
from tests.support.proxy import Proxy
from tests.support.shell import Shell, ended
from tests.support.terminal import Terminal
from tests.support.waits import join_queue

HOSTILE = "a\x1b[2J\rb\u202ec\nd"
ENTERS = b"\x1b[?1049h"
LEAVES = b"\x1b[?1049l"
"""The sequences that enter and leave the alternate screen."""
HOME = b"\x1b[H"
"""The sequence that moves the cursor to the upper corner."""


@pytest.fixture
def clients(dsn: str) -> Iterator[dict[str, dblock.Client]]:
    """Two clients, by holder name."""
    made = {name: dblock.Client(dsn, holder=name) for name in ("ann", "bob")}
    yield made
    for client in made.values():
        client.close()


def watching(shell: Shell, *arguments: str, dsn: str | None = None, **options: Any) -> Terminal:
    """Start `dblock watch` in a terminal, with a short interval."""
    return Terminal(shell.command("watch", "--interval", "0.1", *arguments, dsn=dsn), **options)


def wait(owner: psycopg.Connection, name: str, holder: str) -> None:
    join_queue(owner, name, holder)
    # Without a heartbeat a waiter is passed over after 3 s, and the command may take longer to start.
    owner.execute("UPDATE lock_clients SET seen_until = clock_timestamp() + interval '1 hour'")


def row(terminal: Terminal, name: str) -> str:
    """Return the row of the table that starts with a name."""
    return next((line for line in terminal.lines() if line.split()[:1] == [name]), "")


def names(terminal: Terminal) -> list[str]:
    """Return the locks of the table, from top to bottom."""
    lines = terminal.lines()
    top = next((number for number, line in enumerate(lines) if line.split()[:1] == ["LOCK"]), None)
    if top is None:
        return []
    below = lines[top + 1 :]
    return [line.split()[0] for line in below[: below.index("") if "" in below else None] if line]


def wait_for_a_drawing(terminal: Terminal) -> None:
    """Return when the screen, which changes no more, was drawn to its end: each drawing begins in the upper corner."""
    begun = terminal.raw.count(HOME)
    eventually(lambda: terminal.raw.count(HOME) >= begun + 2, "a drawing")


@pytest.mark.second_stage
def test_locks_appear_with_holder_token_and_time_left(shell: Shell, clients: dict[str, dblock.Client]) -> None:
    lease = clients["ann"].lock("invoice:1", ttl=60).acquire()
    with watching(shell) as terminal:
        terminal.wait_for("invoice:1")
        wait_for_a_drawing(terminal)
        seen = row(terminal, "invoice:1").split()
        assert seen[1:4] == ["held", "ann", str(lease.token)]
        assert "1 held  0 awaited  0 waiting" in terminal.text
        assert "No lock" not in terminal.text
        # The remaining time counts down from poll to poll.
        left = float(seen[4])
        assert 37 < left <= 60, "the lease is renewed when 40 s are left"
        eventually(lambda: float(row(terminal, "invoice:1").split()[4]) < left)
        clients["bob"].lock("report", ttl=60).acquire()
        terminal.wait_for("report  granted to bob under token")
        assert names(terminal) == ["invoice:1", "report"]
        lease.release()
        terminal.wait_for("invoice:1  freed by ann")
        eventually(lambda: names(terminal) == ["report"])


@pytest.mark.second_stage
def test_time_left_counts_down_between_two_polls(shell: Shell, clients: dict[str, dblock.Client]) -> None:
    clients["ann"].lock("a", ttl=60).acquire()
    with watching(shell, "--interval", "600") as terminal:
        terminal.wait_for("ann")
        wait_for_a_drawing(terminal)
        left = float(row(terminal, "a").split()[4])
        eventually(lambda: float(row(terminal, "a").split()[4]) < left - 0.5)
        # Opening a lock polls at once.
        terminal.press("\r")
        terminal.wait_for("state     held")


@pytest.mark.second_stage
def test_empty_screen_says_so(shell: Shell) -> None:
    with watching(shell) as terminal:
        terminal.wait_for("No lock is held or waited for.")
        terminal.wait_for("none yet")


@pytest.mark.second_stage
def test_hand_off_is_shown_and_counted(shell: Shell, clients: dict[str, dblock.Client]) -> None:
    lease = clients["ann"].lock("a", ttl=60).acquire()
    waits = threading.Thread(target=clients["bob"].lock("a", ttl=60).acquire)
    waits.start()
    with watching(shell) as terminal:
        eventually(lambda: row(terminal, "a").split()[-2:] == ["1", "-"], "the waiter")
        assert "1 held  1 awaited  1 waiting  0.0 hand-offs/s" in terminal.text
        lease.release()
        terminal.wait_for("to bob under token")
        eventually(lambda: row(terminal, "a").split()[-2:] == ["-", "1"], "the hand-off")
        assert "0 awaited  0 waiting  0.0 hand-offs/s" not in terminal.text
    waits.join()


@pytest.mark.second_stage
def test_recorded_events_are_shown_once(shell: Shell, owner: psycopg.Connection) -> None:
    owner.execute("SELECT record_event('old', 1, 'died', 'zoe', now())")
    for name in ("short", "told", "taken"):
        owner.execute("SELECT try_acquire(%s, ttl => '1 min', holder => 'ann')", [name])
    with watching(shell) as terminal:
        terminal.wait_for("old  freed because its holder zoe died")
        # The lease expires only when the screen shows it, however long the command took to start.
        owner.execute(
            "UPDATE distributed_locks SET expires_at = clock_timestamp() + interval '3 seconds' WHERE name = 'short'"
        )
        owner.execute("SELECT force_release('told', (holder('told')).token, 'me', 'late')")
        owner.execute("SELECT force_release('taken', (holder('taken')).token, 'me', 'stuck', true)")
        terminal.wait_for("told  ann was told to release, by me as")
        terminal.wait_for("taken  force-released at once, held by ann, by me as")
        terminal.wait_for("short  expired, held by ann")
        assert row(terminal, "told").split()[1] == "forced"
        # The next grant records the expiry, which was shown already.
        owner.execute("SELECT try_acquire('short', holder => 'bob')")
        terminal.wait_for("short  granted to bob")
        wait_for_a_drawing(terminal)
        assert terminal.text.count("short  expired, held by ann") == 1
        assert "taken  freed" not in terminal.text


@pytest.mark.second_stage
def test_refusal_by_a_fence_is_shown_and_counted(shell: Shell, owner: psycopg.Connection) -> None:
    with watching(shell) as terminal:
        terminal.wait_for("0 refused")
        owner.execute("SELECT fenced_store.record_rejection('ledger', 5, 9, now(), 'bob', 'ann')")
        terminal.wait_for("ledger  refused token 5 of ann; token 9 was already seen")
        terminal.wait_for("1 refused")


@pytest.mark.second_stage
def test_database_without_fences_shows_no_refusals(shell: Shell, owner: psycopg.Connection) -> None:
    owner.execute("DROP SCHEMA fenced_store CASCADE")
    with watching(shell) as terminal:
        assert "refused" not in terminal.wait_for("hand-offs/s")


@pytest.mark.second_stage
def test_locks_are_sorted_reversed_and_filtered(
    shell: Shell, clients: dict[str, dblock.Client], owner: psycopg.Connection
) -> None:
    for name, ttl in (("alpha", 60), ("beta", 50), ("gamma", 70)):
        clients["ann"].lock(name, ttl=ttl).acquire()
    wait(owner, "gamma", "carol")
    with watching(shell) as terminal:
        eventually(lambda: names(terminal) == ["alpha", "beta", "gamma"])
        terminal.press("r")
        eventually(lambda: names(terminal) == ["gamma", "beta", "alpha"])
        terminal.press("rs")
        terminal.wait_for("by time left")
        eventually(lambda: names(terminal) == ["beta", "alpha", "gamma"])
        terminal.press("s")
        terminal.wait_for("by waiting")
        eventually(lambda: names(terminal) == ["gamma", "alpha", "beta"])
        terminal.press("ss/")
        terminal.wait_for("Enter keeps")
        terminal.press("LPx\x7f")  # any letter belongs to the filter
        eventually(lambda: names(terminal) == ["alpha"])
        terminal.press("\r")
        terminal.wait_for("filter: LP")
        eventually(lambda: names(terminal) == ["alpha"])
        terminal.press("\x1b")
        eventually(lambda: names(terminal) == ["alpha", "beta", "gamma"])
        terminal.press("/qs?j\x1b")  # keys with a meaning belong to the filter too
        eventually(lambda: names(terminal) == ["alpha", "beta", "gamma"])
        terminal.press("/b*t\r")
        eventually(lambda: names(terminal) == ["beta"])


@pytest.mark.second_stage
def test_pattern_selects_locks_and_their_changes(shell: Shell, clients: dict[str, dblock.Client]) -> None:
    for name in ("invoice:1", "report"):
        clients["ann"].lock(name, ttl=60).acquire()
    with watching(shell, "inv*") as terminal:
        terminal.wait_for("invoice:1")
        clients["bob"].lock("report:2", ttl=60).acquire()
        clients["bob"].lock("invoice:2", ttl=60).acquire()
        terminal.wait_for("invoice:2  granted to bob")
        assert "report" not in terminal.text


@pytest.mark.second_stage
def test_opened_lock_shows_its_queue_and_history(
    shell: Shell, clients: dict[str, dblock.Client], owner: psycopg.Connection
) -> None:
    owner.execute("SELECT record_event('beta', 1, 'expired', 'yesterday', now() - interval '1 day')")
    clients["ann"].lock("alpha", ttl=60).acquire()
    lease = clients["ann"].lock("beta", ttl=60, meta={"job": 7}).acquire()
    wait(owner, "beta", "carol")
    with watching(shell) as terminal:
        terminal.wait_for("beta")
        terminal.press("\x1b[B\r")
        terminal.wait_for("carol, for")
        wait_for_a_drawing(terminal)
        text = terminal.text
        for part in (
            "holder    ann",
            'meta      {"job": 7}',
            "deadline",
            "QUEUE (1)",
            "yesterday",
            "expired",
        ):
            assert part in text
        lease.release()
        terminal.wait_for("state     free, released")
        terminal.press("\x7f")
        eventually(lambda: "alpha" in names(terminal))
        wait_for_a_drawing(terminal)
        assert "QUEUE" not in terminal.text


@pytest.mark.second_stage
def test_long_list_scrolls_with_the_selection(shell: Shell, owner: psycopg.Connection) -> None:
    owner.execute("SELECT try_acquire('lock' || lpad(n::text, 3, '0')) FROM generate_series(1, 200) AS n")
    with watching(shell, rows=20) as terminal:
        terminal.wait_for("lock001")
        assert "lock100" not in terminal.text
        terminal.press("\x1b[F")
        terminal.wait_for("lock200")
        assert "lock001" not in terminal.text
        terminal.press("k" * 20)
        terminal.wait_while("lock200")
        terminal.press("\x1b[H\r")
        terminal.wait_for("state     held")
        assert "lock001" in terminal.text


@pytest.mark.second_stage
def test_paused_screen_stands_still(shell: Shell, clients: dict[str, dblock.Client]) -> None:
    clients["ann"].lock("a", ttl=60).acquire()
    with watching(shell) as terminal:
        terminal.wait_for("ann")
        terminal.press("p")
        terminal.wait_for("PAUSED")
        wait_for_a_drawing(terminal)
        before = row(terminal, "a")
        clients["bob"].lock("b", ttl=60).acquire()
        time.sleep(0.6)
        assert row(terminal, "a") == before
        assert names(terminal) == ["a"]
        terminal.press("p")
        terminal.wait_for("b  granted to bob")
        wait_for_a_drawing(terminal)
        assert "PAUSED" not in terminal.text


@pytest.mark.second_stage
def test_screen_survives_a_database_that_stops_replying(
    shell: Shell, dsn: str, clients: dict[str, dblock.Client]
) -> None:
    clients["ann"].lock("a", ttl=600).acquire()
    with Proxy(dsn) as proxy, watching(shell, dsn=proxy.dsn) as terminal:
        terminal.wait_for("ann")
        proxy.fall_silent()
        terminal.wait_for("The database has not replied for")
        wait_for_a_drawing(terminal)
        assert names(terminal) == ["a"]  # the last snapshot stays
        # Keys still work. The fastest one counts, because the machine may be busy.
        times = []
        with measured() as lateness:
            for shown_or_not in (terminal.wait_for, terminal.wait_while) * 4:
                began = time.monotonic()
                terminal.press("?")
                shown_or_not("reverse the order")
                times.append(time.monotonic() - began)
            assert min(times) < 0.1 + lateness(), times
        terminal.wait_for("did not answer within 5 s")
        clients["bob"].lock("b", ttl=60).acquire()
        proxy.flow()
        terminal.wait_while("The database has not replied")
        terminal.wait_for("b  granted to bob")


@pytest.mark.second_stage
def test_screen_fits_any_window(shell: Shell, clients: dict[str, dblock.Client]) -> None:
    clients["ann"].lock("a" * 100, ttl=60).acquire()
    with watching(shell) as terminal:
        terminal.wait_for("HAND-OFFS")
        for columns, rows, part in ((50, 12, "STATE"), (20, 7, "LOCK"), (5, 3, "1 h…"), (2, 2, "…"), (1, 1, "…")):
            terminal.resize(columns, rows)
            terminal.wait_for(part)
        terminal.resize(130, 40)
        terminal.wait_for("HAND-OFFS")
        eventually(lambda: "q quit" in terminal.lines()[39])
        assert sum("q quit" in line for line in terminal.lines()) == 1
        terminal.press("q")
        assert terminal.ended() == 0


def _by_q(terminal: Terminal) -> None:
    terminal.press("q")


def _by_ctrl_c(terminal: Terminal) -> None:
    terminal.press("\x03")


def _by_term(terminal: Terminal) -> None:
    os.kill(terminal.pid, signal.SIGTERM)


@pytest.mark.second_stage
@pytest.mark.parametrize(("end", "code"), [(_by_q, 0), (_by_ctrl_c, 130), (_by_term, 143)])
def test_terminal_is_restored_at_the_end(shell: Shell, end: Callable[[Terminal], None], code: int) -> None:
    with watching(shell) as terminal:
        terminal.wait_for("q quit")
        assert terminal.settings_now() != terminal.settings
        assert ENTERS in terminal.raw
        assert LEAVES not in terminal.raw
        end(terminal)
        assert terminal.ended() == code
        assert terminal.settings_now() == terminal.settings
        assert terminal.raw.count(LEAVES) == 1
        assert b"\x1b[?25h" in terminal.raw  # the cursor is back
        after = terminal.raw.partition(LEAVES)[2]
    assert b"Traceback" not in after
    assert (b"dblock: interrupted" in after) == (code == 130)


@pytest.mark.second_stage
def test_ctrl_z_restores_the_terminal_until_continued(shell: Shell) -> None:
    with watching(shell) as terminal:
        terminal.wait_for("q quit")
        os.kill(terminal.pid, signal.SIGTSTP)
        eventually(lambda: os.waitid(os.P_PID, terminal.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT), "the stop")
        assert terminal.settings_now() == terminal.settings
        eventually(lambda: terminal.raw.count(LEAVES) == 1)
        os.kill(terminal.pid, signal.SIGCONT)
        eventually(lambda: terminal.raw.count(ENTERS) == 2)
        terminal.press("q")
        assert terminal.ended() == 0
        assert terminal.settings_now() == terminal.settings


@pytest.mark.second_stage
def test_hostile_names_move_no_cursor_and_are_no_markup(shell: Shell, dsn: str) -> None:
    with dblock.Client(dsn, holder=HOSTILE) as client:
        client.lock(HOSTILE, ttl=60, meta={"x": HOSTILE}).acquire()
        client.lock("[red]x[/red]", ttl=60).acquire()
        with watching(shell) as terminal:
            terminal.wait_for("[red]x[/red]")
            terminal.wait_for("a\\x1b[2J")
            terminal.press("j\r")
            terminal.wait_for("meta")
            terminal.press("q")
            assert terminal.ended() == 0
            for bad in (b"a\x1b", b"\rb", "\u202e".encode()):
                assert bad not in terminal.raw
        process = shell.start("watch")
        assert "a\\x1b[2J\\rb\\u202ec\\nd" in process.stdout.readline() + process.stdout.readline()


def lines_of(process: Any, number: int) -> list[Any]:
    return [json.loads(process.stdout.readline()) for _ in range(number)]


def test_stream_prints_a_line_for_each_change(
    shell: Shell, clients: dict[str, dblock.Client], owner: psycopg.Connection
) -> None:
    lease = clients["ann"].lock("a", ttl=60).acquire()
    wait(owner, "a", "carol")
    process = shell.start("watch", "--interval", "0.1")
    assert "watching postgresql://" in process.stdout.readline()
    state = process.stdout.readline()
    assert re.search(rf"a  held by ann under token {lease.token}, [0-9.]+ s left, 1 waiting", state)
    clients["bob"].lock("b", ttl=60).acquire()
    assert "b  granted to bob under token" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    done = ended(process)
    assert done.code == 130
    assert done.err == "dblock: interrupted\n"


@pytest.mark.second_stage
def test_json_stream_prints_an_object_for_each_change(shell: Shell, clients: dict[str, dblock.Client]) -> None:
    lease = clients["ann"].lock("a\n", ttl=60).acquire()
    process = shell.start("watch", "--interval", "0.1", "--json")
    watching, state = lines_of(process, 2)
    assert (watching["event"], watching["held"], watching["waiting"]) == ("watching", 1, 0)
    assert (state["event"], state["name"], state["holder"], state["token"]) == ("state", "a\n", "ann", lease.token)
    other = clients["bob"].lock("b", ttl=60).acquire()
    (granted,) = lines_of(process, 1)
    assert granted.pop("at")
    assert granted == {"event": "granted", "name": "b", "token": other.token, "holder": "bob"}
    lease.release()
    (freed,) = lines_of(process, 1)
    assert (freed["event"], freed["name"], freed["holder"]) == ("freed", "a\n", "ann")
    process.terminate()
    done = ended(process)
    assert (done.code, done.err) == (143, "")


@pytest.mark.second_stage
def test_json_at_a_terminal_is_a_stream(shell: Shell) -> None:
    with watching(shell, "--json") as terminal:
        assert ENTERS not in terminal.wait_for('"event": "watching"').encode()
        terminal.press("\x03")
        assert terminal.ended() == 130


@pytest.mark.second_stage
def test_stream_ends_when_its_reader_is_gone(shell: Shell) -> None:
    process = shell.start("watch")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(10) == 0
    assert process.stderr.read() == ""


@pytest.mark.second_stage
def test_cut_connection_is_reported_once_and_reopened(
    shell: Shell, clients: dict[str, dblock.Client], dsn: str
) -> None:
    with Proxy(dsn) as proxy:
        process = shell.start("watch", "--interval", "0.1", dsn=proxy.dsn)
        process.stdout.readline()
        proxy.cut()
        assert process.stderr.readline().startswith("dblock: The database could not be asked")
        assert process.stderr.readline() == "dblock: The database is back.\n"
        clients["ann"].lock("a", ttl=60).acquire()
        assert "granted to ann" in process.stdout.readline()
        process.terminate()
        assert ended(process).err == ""


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_unreachable_database_at_the_start_is_exit_code_69(shell: Shell, form: list[str]) -> None:
    done = shell.run_here("watch", *form, dsn="host=127.0.0.1 port=1 user=x password=hunter2")
    assert (done.code, done.out) == (69, "")
    assert "could not be asked" in done.err
    assert "hunter2" not in done.err


@pytest.mark.second_stage
def test_error_at_the_start_is_reported_without_a_screen(shell: Shell, bare_dsn: str) -> None:
    with watching(shell, dsn="host=127.0.0.1 port=1 user=x") as terminal:
        assert terminal.ended() == 69
        assert ENTERS not in terminal.raw
    with watching(shell, dsn=bare_dsn) as terminal:
        assert terminal.ended() == 78
        assert "dblock install" in terminal.text


@pytest.mark.parametrize("interval", ["0", "nan", "soon"])
def test_invalid_interval_is_refused(shell: Shell, interval: str) -> None:
    done = shell.run_here("watch", "--interval", interval)
    assert (done.code, done.out) == (2, "")
    assert "--interval" in done.err


@pytest.mark.second_stage
def test_privilege_see_is_enough_and_is_named_if_missing(shell: Shell, dsn: str, role: str) -> None:
    from psycopg import conninfo

    from dblock.admin import schema

    as_role = conninfo.make_conninfo(dsn, user=role, password="app")
    schema.grant(dsn, role)
    refused = shell.run_here("watch", dsn=as_role)
    assert refused.code == 77
    assert "--may see" in refused.err
    schema.grant(dsn, role, may=["see"])
    with watching(shell, dsn=as_role) as terminal:
        assert "refused" not in terminal.wait_for("hand-offs/s")  # this role may not see the fences
    assert shell.run("graph", dsn=as_role).code == 0
