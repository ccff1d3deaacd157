"""How `dblock watch` processes snapshots and keys, without a database and without a terminal."""

from __future__ import annotations

import os
import pty
import termios
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from dblock.admin.inspect import LockState
from dblock.cli.watch.changes import ChangeTracker, LockDetail, NewNumbers, Refusal, Snapshot, possibly_expired
from dblock.cli.watch.keys import KeyReader, cbreak_mode, handle_key, keys_in
from dblock.cli.watch.model import ScreenState
from dblock.cli.watch.screen import draw
from tests.support.records import NOON, free_lock, held_lock, history_event, waiter
from tests.support.stages import first


def snapshot(at: float, *locks: LockState, **others: Any) -> Snapshot:
    return Snapshot(at, NOON + timedelta(seconds=at), list(locks), **others)


def changes(first: Snapshot, *later: Snapshot) -> list[tuple[str, str]]:
    tracker = ChangeTracker(first)
    return [(one.kind, one.name) for each in later for one in tracker.update(each)]


def test_tracker_reports_changes_between_snapshots() -> None:
    assert changes(snapshot(0, held_lock("a")), snapshot(1, held_lock("a", left=29))) == []
    assert changes(snapshot(0), snapshot(1, held_lock("a"))) == [("granted", "a")]
    assert changes(snapshot(0, held_lock("a")), snapshot(1)) == [("freed", "a")]
    assert changes(snapshot(0, held_lock("a")), snapshot(1, held_lock("a", "bob", 2))) == [("handed_over", "a")]
    assert changes(
        snapshot(0, held_lock("a")), snapshot(1, free_lock("a", waiting=1)), snapshot(2, held_lock("a", "bob", 2))
    ) == [
        ("freed", "a"),
        ("handed_over", "a"),
    ]


def test_grant_of_a_shared_lock_is_a_change_of_its_share_alone() -> None:
    """The lock itself shows the last token of any share, so its own changes would report each grant twice."""
    head = replace(free_lock("s", 1), kind="semaphore", permits=2, held=0)
    share = replace(held_lock("s#0", token=2), kind="permit", head="s")
    first, second = snapshot(0, head), snapshot(1, replace(head, number=2, held=1), share)
    assert changes(first, second, snapshot(2, replace(head, number=2))) == [("granted", "s#0"), ("freed", "s#0")]
    lines = [str(line) for line in draw(ScreenState(second, database="db", interval=1), 120, 20, 1)]
    assert [line for line in lines if "1 of 2 permits" in line]
    assert [line for line in lines if "1 held" in line]


def test_hand_off_names_both_holders() -> None:
    (one,) = ChangeTracker(snapshot(0, held_lock("a"))).update(snapshot(1, held_lock("a", "bob", 2)))
    assert (one.before, one.holder, one.token) == ("ann", "bob", 2)


def test_lock_without_a_token_is_handed_over() -> None:
    later = held_lock("a", "bob", None, granted_at=NOON + timedelta(seconds=1))
    assert changes(snapshot(0, held_lock("a", token=None)), snapshot(1, later)) == [("handed_over", "a")]
    assert changes(snapshot(0, held_lock("a", token=None)), snapshot(1, held_lock("a", token=None, left=29))) == []


def test_database_decides_whether_a_lock_expired() -> None:
    short = snapshot(0, held_lock("a", left=0.6))
    assert possibly_expired(short, [], 1) == ["a"]
    assert possibly_expired(snapshot(0, held_lock("a", left=5)), [], 1) == []
    assert changes(short, snapshot(1, gone={"a": free_lock("a", released=False)})) == [("expired", "a")]
    assert changes(short, snapshot(1, gone={"a": free_lock("a")})) == [("freed", "a")]
    assert changes(short, snapshot(1, gone={"a": free_lock("a", 2, released=False)})) == [
        ("freed", "a")
    ]  # the end of another grant
    assert changes(short, snapshot(1)) == [("expired", "a")]


def test_end_of_a_grant_is_reported_once() -> None:
    first = snapshot(0, held_lock("a", left=0.6))
    ended = snapshot(1, gone={"a": free_lock("a", released=False)})
    again = snapshot(2, held_lock("a", "bob", 2), history=[history_event(1, "expired")])
    assert changes(first, ended, again, replace(again, at=3)) == [("expired", "a"), ("granted", "a")]
    # Recorded before any snapshot showed it.
    assert changes(first, snapshot(1, held_lock("a", "bob", 2), history=[history_event(1, "expired")])) == [
        ("expired", "a"),
        ("handed_over", "a"),
    ]
    for event in ("died", "forced_now"):
        assert changes(first, snapshot(1, history=[history_event(1, event)])) == [(event, "a")]


def test_grants_in_the_history_are_not_reported_twice() -> None:
    recorded = [history_event(2, "released"), history_event(1, "granted")]
    assert changes(snapshot(0), snapshot(1, held_lock("a"), history=recorded)) == [("granted", "a")]


def test_records_out_of_order_are_new_once() -> None:
    numbers = NewNumbers([200, 199])
    assert [numbers.is_new(number) for number in (202, 201, 202, 200, 100, 50)] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert NewNumbers([]).is_new(1)


def test_refusals_are_reported_once_and_old_ones_never() -> None:
    def refusal(number: int) -> Refusal:
        return Refusal(number, NOON, "ledger", 5, 9, "ann", number != 3)

    assert changes(
        snapshot(0, refusals=[refusal(1)]),
        snapshot(1, refusals=[refusal(2), refusal(1)]),
        snapshot(2, refusals=[refusal(3), refusal(2), refusal(1)]),
    ) == [("refused", "ledger"), ("warned", "ledger")]
    assert changes(snapshot(0), snapshot(1, refusals=[refusal(1)]), snapshot(2, refusals=[refusal(2)])) == [
        ("refused", "ledger")
    ]


def test_incomplete_snapshots_report_no_grants_and_no_ends() -> None:
    assert changes(
        snapshot(0, held_lock("a"), held_lock("b"), more=True),
        snapshot(1, held_lock("b", "bob", 2), held_lock("c"), more=True),
    ) == [("handed_over", "b")]


def screen_of(*locks: LockState, **others: Any) -> ScreenState:
    return ScreenState(snapshot(0, *locks), database="postgresql://db/app", interval=1.0, **others)


def names(screen: ScreenState) -> list[str]:
    return [lock.name for lock in screen.rows()]


def pressed(screen: ScreenState, keys: str) -> bool:
    continues = True
    for key in keys_in(keys):
        continues = handle_key(screen, key, 1.0)
    return continues


def test_selection_stays_with_its_lock() -> None:
    screen = screen_of(held_lock("a", left=3), held_lock("b", left=2), held_lock("c", left=1))
    pressed(screen, "j")
    assert screen.rows()[screen.selected(screen.rows())].name == "b"
    pressed(screen, "ss")
    pressed(screen, "s/x\x7fb\r")
    assert screen.selected(screen.rows()) == 0
    pressed(screen, "\x1b")
    assert screen.rows()[screen.selected(screen.rows())].name == "b"
    screen.update(snapshot(1, held_lock("a"), held_lock("c")))
    assert screen.rows()[screen.selected(screen.rows())].name == "c"  # the neighbour
    screen.update(snapshot(2))
    assert screen.selected(screen.rows()) == -1
    pressed(screen, "j\rk")
    assert screen.opened is None


def test_locks_are_sorted_by_every_order() -> None:
    screen = screen_of(held_lock("a", left=2, waiting=1), held_lock("b", left=3), held_lock("c", left=1, waiting=2))
    screen.update(
        snapshot(
            1, held_lock("a", left=2, waiting=1), held_lock("b", "bob", 2, left=3), held_lock("c", left=1, waiting=2)
        )
    )
    found = []
    for _ in range(4):
        found.append("".join(names(screen)))
        pressed(screen, "s")
    assert found == ["abc", "cab", "cab", "bac"]
    pressed(screen, "r")
    assert names(screen) == ["c", "b", "a"]


def test_rate_counts_recent_hand_offs() -> None:
    screen = screen_of(held_lock("a", token=1))
    for second in range(1, 6):
        screen.update(snapshot(second, held_lock("a", token=second + 1)))
    assert screen.handed_over["a"] == 5
    assert screen.rate(5) == 1.0
    assert screen.rate(20) == 0.0


def test_screen_is_late_without_a_reply_or_after_an_error() -> None:
    screen = screen_of()
    assert not screen.is_late(2.4)
    assert screen.is_late(2.6)
    screen.update(snapshot(2.6))
    assert not screen.is_late(2.7)
    screen.record_failure("gone\n\taway")
    assert screen.is_late(2.7)
    assert screen.error == "gone away"
    screen.update(snapshot(3))
    assert not screen.is_late(3)


def test_paused_screen_stands_still_but_opens_a_lock() -> None:
    screen = screen_of(held_lock("a", left=30))
    pressed(screen, "p")
    screen.update(snapshot(2, held_lock("b")))
    assert names(screen) == ["a"]
    assert screen.left(screen.rows()[0], 9.0) == 29.0
    assert not screen.is_late(9.0)
    pressed(screen, "\r")
    screen.update(snapshot(3, opened=LockDetail("a", held_lock("a"), [waiter("a", 1, "bob")], [])))
    assert "bob" in "".join(line.plain for line in draw(screen, 80, 24, 9.0))
    pressed(screen, "p")
    screen.update(snapshot(4, held_lock("b")))
    assert names(screen) == ["b"]


def test_key_sequences_are_decoded() -> None:
    assert keys_in("a\x1b[A\x1bOB\r\x7f\x1b[5~\x1b[15~\x1b[1;5C\x1bq") == [
        "a", "up", "down", "enter", "backspace", "page up", "escape", "q",
    ]  # fmt: skip
    assert keys_in("\x1b") == ["escape"]
    assert keys_in("\x1b[") == []


def test_typed_filter_triggers_no_other_keys() -> None:
    screen = screen_of(held_lock("q"), held_lock("x"))
    assert pressed(screen, "/q")
    assert (screen.filter, names(screen)) == ("q", ["q"])
    assert pressed(screen, "\x15[(\\")
    assert names(screen) == []
    pressed(screen, "\x1b")
    assert not screen.typing
    assert not pressed(screen, "q")


SCREENS: list[Callable[[ScreenState], object]] = [
    lambda screen: None,
    lambda screen: pressed(screen, "?"),
    lambda screen: pressed(screen, "/[red]\x1b[B"),
    lambda screen: pressed(screen, "\r"),
    lambda screen: screen.record_failure("x" * 300),
]


@pytest.mark.parametrize("change", SCREENS)
@pytest.mark.parametrize("width", first(4, [1, 29, 89, 200, 2, 5, 20, 47, 59, 71]))
def test_every_line_fits_every_window(change: Callable[[ScreenState], object], width: int) -> None:
    locks = [held_lock(f"lock {number} 日本\x1b[2J{'x' * 200}", "w" * 99, 10**12 + number) for number in range(50)]
    screen = screen_of(*locks)
    screen.update(snapshot(1, *locks[10:], history=[history_event(1, "died")]))
    change(screen)
    for height in (1, 2, 3, 5, 8, 13, 24, 60):
        lines = draw(screen, width, height, 2.0)
        assert len(lines) == height
        for line in lines:
            assert line.cell_len <= width, line.plain
            assert "\x1b" not in line.plain
            assert "\n" not in line.plain


def test_terminal_modes_are_restored_after_an_error() -> None:
    master, terminal = pty.openpty()
    try:
        before = termios.tcgetattr(terminal)
        with pytest.raises(RuntimeError), cbreak_mode(terminal):
            assert termios.tcgetattr(terminal) != before
            os.write(master, "jé\x1b".encode())
            assert KeyReader(terminal).read() == ["j", "é", "escape"]
            raise RuntimeError
        assert termios.tcgetattr(terminal) == before
    finally:
        os.close(terminal)
        os.close(master)
