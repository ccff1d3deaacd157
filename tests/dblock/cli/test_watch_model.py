"""What `dblock watch` makes of looks and of keys, without a database and without a terminal."""

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
from dblock.cli.watch.changes import Fresh, Happenings, Look, Opened, Refusal, doubtful
from dblock.cli.watch.keys import Keys, each_key_at_once, keys_in, press
from dblock.cli.watch.model import Seen
from dblock.cli.watch.screen import draw
from tests.support.records import NOON, free_lock, held_lock, history_event, waiter


def look(at: float, *locks: LockState, **others: Any) -> Look:
    return Look(at, NOON + timedelta(seconds=at), list(locks), **others)


def told(first: Look, *looks: Look) -> list[tuple[str, str]]:
    following = Happenings(first)
    return [(one.kind, one.name) for each in looks for one in following.follow(each)]


def test_what_two_looks_tell() -> None:
    assert told(look(0, held_lock("a")), look(1, held_lock("a", left=29))) == []
    assert told(look(0), look(1, held_lock("a"))) == [("granted", "a")]
    assert told(look(0, held_lock("a")), look(1)) == [("freed", "a")]
    assert told(look(0, held_lock("a")), look(1, held_lock("a", "bob", 2))) == [("handed_over", "a")]
    assert told(look(0, held_lock("a")), look(1, free_lock("a", waiting=1)), look(2, held_lock("a", "bob", 2))) == [
        ("freed", "a"),
        ("handed_over", "a"),
    ]


def test_a_hand_off_tells_from_whom_to_whom() -> None:
    (one,) = Happenings(look(0, held_lock("a"))).follow(look(1, held_lock("a", "bob", 2)))
    assert (one.before, one.holder, one.token) == ("ann", "bob", 2)


def test_locks_without_a_token_are_handed_over_too() -> None:
    later = held_lock("a", "bob", None, granted_at=NOON + timedelta(seconds=1))
    assert told(look(0, held_lock("a", token=None)), look(1, later)) == [("handed_over", "a")]
    assert told(look(0, held_lock("a", token=None)), look(1, held_lock("a", token=None, left=29))) == []


def test_how_a_lock_ended_is_the_databases_word_where_there_is_doubt() -> None:
    short = look(0, held_lock("a", left=0.6))
    assert doubtful(short, [], 1) == ["a"]
    assert doubtful(look(0, held_lock("a", left=5)), [], 1) == []
    assert told(short, look(1, gone={"a": free_lock("a", released=False)})) == [("ran_out", "a")]
    assert told(short, look(1, gone={"a": free_lock("a")})) == [("freed", "a")]
    assert told(short, look(1, gone={"a": free_lock("a", 2, released=False)})) == [("freed", "a")]  # another's end
    assert told(short, look(1)) == [("ran_out", "a")]


def test_an_end_is_told_once() -> None:
    first = look(0, held_lock("a", left=0.6))
    ended = look(1, gone={"a": free_lock("a", released=False)})
    again = look(2, held_lock("a", "bob", 2), history=[history_event(1, "expired")])
    assert told(first, ended, again, replace(again, at=3)) == [("ran_out", "a"), ("granted", "a")]
    # Noted first: what was never seen to end, and what was taken or died.
    assert told(first, look(1, held_lock("a", "bob", 2), history=[history_event(1, "expired")])) == [
        ("ran_out", "a"),
        ("handed_over", "a"),
    ]
    for event in ("died", "forced_now"):
        assert told(first, look(1, history=[history_event(1, event)])) == [(event, "a")]


def test_grants_in_the_history_are_not_told_twice() -> None:
    noted = [history_event(2, "released"), history_event(1, "granted")]
    assert told(look(0), look(1, held_lock("a"), history=noted)) == [("granted", "a")]


def test_notes_are_new_once_though_they_come_out_of_order() -> None:
    fresh = Fresh([200, 199])
    assert [fresh.is_new(number) for number in (202, 201, 202, 200, 100, 50)] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert Fresh([]).is_new(1)


def test_refusals_are_told_once_and_old_ones_never() -> None:
    def refusal(number: int) -> Refusal:
        return Refusal(number, NOON, "ledger", 5, 9, "ann", number != 3)

    assert told(
        look(0, refusals=[refusal(1)]),
        look(1, refusals=[refusal(2), refusal(1)]),
        look(2, refusals=[refusal(3), refusal(2), refusal(1)]),
    ) == [("refused", "ledger"), ("warned", "ledger")]
    assert told(look(0), look(1, refusals=[refusal(1)]), look(2, refusals=[refusal(2)])) == [("refused", "ledger")]


def test_what_may_be_cut_off_is_not_said_to_have_come_or_gone() -> None:
    assert told(
        look(0, held_lock("a"), held_lock("b"), more=True), look(1, held_lock("b", "bob", 2), held_lock("c"), more=True)
    ) == [("handed_over", "b")]


def seen_of(*locks: LockState, **others: Any) -> Seen:
    return Seen(look(0, *locks), database="postgresql://db/app", interval=1.0, **others)


def names(seen: Seen) -> list[str]:
    return [lock.name for lock in seen.rows()]


def pressed(seen: Seen, keys: str) -> bool:
    going_on = True
    for key in keys_in(keys):
        going_on = press(seen, key, 1.0)
    return going_on


def test_the_selection_stays_with_its_lock() -> None:
    seen = seen_of(held_lock("a", left=3), held_lock("b", left=2), held_lock("c", left=1))
    pressed(seen, "j")
    assert seen.rows()[seen.selected(seen.rows())].name == "b"
    pressed(seen, "ss")
    pressed(seen, "s/x\x7fb\r")
    assert seen.selected(seen.rows()) == 0
    pressed(seen, "\x1b")
    assert seen.rows()[seen.selected(seen.rows())].name == "b"
    seen.take(look(1, held_lock("a"), held_lock("c")))
    assert seen.rows()[seen.selected(seen.rows())].name == "c"  # its neighbour
    seen.take(look(2))
    assert seen.selected(seen.rows()) == -1
    pressed(seen, "j\rk")
    assert seen.opened is None


def test_orders() -> None:
    seen = seen_of(held_lock("a", left=2, waiting=1), held_lock("b", left=3), held_lock("c", left=1, waiting=2))
    seen.take(
        look(1, held_lock("a", left=2, waiting=1), held_lock("b", "bob", 2, left=3), held_lock("c", left=1, waiting=2))
    )
    found = []
    for _ in range(4):
        found.append("".join(names(seen)))
        pressed(seen, "s")
    assert found == ["abc", "cab", "cab", "bac"]
    pressed(seen, "r")
    assert names(seen) == ["c", "b", "a"]


def test_hand_offs_are_counted_by_the_second_and_forgotten() -> None:
    seen = seen_of(held_lock("a", token=1))
    for second in range(1, 6):
        seen.take(look(second, held_lock("a", token=second + 1)))
    assert seen.handed_over["a"] == 5
    assert seen.rate(5) == 1.0
    assert seen.rate(20) == 0.0


def test_it_is_late_when_no_answer_came_in_time_or_an_error_did() -> None:
    seen = seen_of()
    assert not seen.is_late(2.4)
    assert seen.is_late(2.6)
    seen.take(look(2.6))
    assert not seen.is_late(2.7)
    seen.fail("gone\n\taway")
    assert seen.is_late(2.7)
    assert seen.trouble == "gone away"
    seen.take(look(3))
    assert not seen.is_late(3)


def test_while_paused_nothing_moves_but_a_lock_can_be_opened() -> None:
    seen = seen_of(held_lock("a", left=30))
    pressed(seen, "p")
    seen.take(look(2, held_lock("b")))
    assert names(seen) == ["a"]
    assert seen.left(seen.rows()[0], 9.0) == 29.0
    assert not seen.is_late(9.0)
    pressed(seen, "\r")
    seen.take(look(3, opened=Opened("a", held_lock("a"), [waiter("a", 1, "bob")], [])))
    assert "bob" in "".join(line.plain for line in draw(seen, 80, 24, 9.0))
    pressed(seen, "p")
    seen.take(look(4, held_lock("b")))
    assert names(seen) == ["b"]


def test_keys_as_terminals_send_them() -> None:
    assert keys_in("a\x1b[A\x1bOB\r\x7f\x1b[5~\x1b[15~\x1b[1;5C\x1bq") == [
        "a", "up", "down", "enter", "backspace", "page up", "escape", "q",
    ]  # fmt: skip
    assert keys_in("\x1b") == ["escape"]
    assert keys_in("\x1b[") == []


def test_a_filter_is_typed_and_means_nothing_else() -> None:
    seen = seen_of(held_lock("q"), held_lock("x"))
    assert pressed(seen, "/q")
    assert (seen.filter, names(seen)) == ("q", ["q"])
    assert pressed(seen, "\x15[(\\")
    assert names(seen) == []
    pressed(seen, "\x1b")
    assert not seen.typing
    assert not pressed(seen, "q")


SCREENS: list[Callable[[Seen], object]] = [
    lambda seen: None,
    lambda seen: pressed(seen, "?"),
    lambda seen: pressed(seen, "/[red]\x1b[B"),
    lambda seen: pressed(seen, "\r"),
    lambda seen: seen.fail("x" * 300),
]


@pytest.mark.parametrize("change", SCREENS)
@pytest.mark.parametrize("width", [1, 2, 5, 20, 29, 47, 59, 71, 89, 200])
def test_every_line_fits_every_window(change: Callable[[Seen], object], width: int) -> None:
    locks = [held_lock(f"lock {number} 日本\x1b[2J{'x' * 200}", "w" * 99, 10**12 + number) for number in range(50)]
    seen = seen_of(*locks)
    seen.take(look(1, *locks[10:], history=[history_event(1, "died")]))
    change(seen)
    for height in (1, 2, 3, 5, 8, 13, 24, 60):
        lines = draw(seen, width, height, 2.0)
        assert len(lines) == height
        for line in lines:
            assert line.cell_len <= width, line.plain
            assert "\x1b" not in line.plain
            assert "\n" not in line.plain


def test_the_terminal_is_set_back_whatever_happens() -> None:
    master, terminal = pty.openpty()
    try:
        before = termios.tcgetattr(terminal)
        with pytest.raises(RuntimeError), each_key_at_once(terminal):
            assert termios.tcgetattr(terminal) != before
            os.write(master, "jé\x1b".encode())
            assert Keys(terminal).read() == ["j", "é", "escape"]
            raise RuntimeError
        assert termios.tcgetattr(terminal) == before
    finally:
        os.close(terminal)
        os.close(master)
