"""When a waiter looks for a deadlock, driven by hand: no database, a clock that the test moves."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import pytest

from dblock._core.acquire import LockFlows
from dblock._core.deadlocks import LOOKS_PER_SECOND
from dblock._core.effects import Call, JoinQueue, Wait
from dblock._core.options import lock_options
from dblock._core.timings import default
from dblock._core.waiters import LocalWaiters
from dblock._runtime.wakeups import ThreadWaiter
from dblock.errors import CycleWait, DeadlockDetected, Unavailable

HELD = ("f", None, "1000.5", "60", "f")
QUEUED = ("f", None, "1000.5", "60", "3", "t", "f", "f")
NOTHING = ("f", None)
CYCLE: list[dict[str, Any]] = [
    {"waiter": "me", "lock": "a", "holder": "you", "token": 8, "session": None, "blocker": None},
    {"waiter": "you", "lock": None, "holder": "me", "token": None, "session": 41, "blocker": 42},
]


class Drive:
    """One wait for a lock, with a clock of its own."""

    def __init__(self, holds: list[int] | None, timeout: float | None = None) -> None:
        self.now = 100.0
        self.flows = LockFlows("dblock", "me", lambda: self.now, lambda low, high: high)
        self.waiters = LocalWaiters(self.flows, now=lambda: self.now)
        self.attempt = "ab" * 16
        self.waiter = ThreadWaiter(self.waiters, "a", self.attempt)
        self.waiters.add(self.waiter)
        steps = self.flows.acquire(
            lock_options("a", 30, None, None), timeout, self.attempt, holds=None if holds is None else lambda: holds
        )
        self.steps = steps
        next(steps)
        assert isinstance(steps.send(HELD), JoinQueue)
        assert b".acquire(" in steps.send(self.waiter).sql
        self.effect = steps.send(QUEUED)

    def send(self, reply: Any = None) -> Any:
        self.effect = self.steps.send(reply)
        return self.effect

    def pass_time(self) -> Any:
        """Let the wait that is under way pass, and return the next effect."""
        assert isinstance(self.effect, Wait)
        self.now += self.effect.seconds
        return self.send()


def is_look(effect: Any) -> bool:
    return isinstance(effect, Call) and b"look_for_deadlock" in effect.sql


def test_waiter_looks_after_half_a_second_and_again() -> None:
    drive = Drive([5, 7])
    for _ in range(3):
        assert drive.effect.seconds == pytest.approx(default.deadlock_look_interval)
        look = drive.pass_time()
        assert is_look(look)
        assert look.args == ("a", drive.attempt, '{"5","7"}', "{}")
        drive.send(NOTHING)


def test_waiter_that_holds_nothing_asks_nothing() -> None:
    drive = Drive([])
    assert drive.pass_time() == Wait(drive.waiter, math.inf)


def test_wait_without_a_list_of_leases_is_as_before() -> None:
    assert Drive(None).effect.seconds == math.inf


def test_look_does_not_outlast_the_timeout() -> None:
    drive = Drive([5], timeout=0.7)
    assert is_look(drive.pass_time())
    assert drive.send(NOTHING).seconds == pytest.approx(0.2)
    assert b"abandon" in drive.pass_time().sql


def test_victim_raises_and_names_the_whole_cycle() -> None:
    drive = Drive([5])
    drive.pass_time()
    with pytest.raises(DeadlockDetected) as caught:
        drive.send(("t", json.dumps(CYCLE)))
    error = caught.value
    assert error.name == "a"
    assert error.cycle == [CycleWait(**one) for one in CYCLE]
    assert str(error).splitlines()[1:3] == [
        "  me waits for lock 'a', which you holds under token 8",
        "  you waits in session 41 for session 42, in which me works",
    ]
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert drive.flows.ended_looks == [], "the database has deleted its note"


def test_other_member_of_a_cycle_waits_on() -> None:
    drive = Drive([5])
    drive.pass_time()
    assert isinstance(drive.send(("f", json.dumps(CYCLE))), Wait)


def test_look_that_fails_ends_no_wait() -> None:
    drive = Drive([5])
    drive.pass_time()
    effect = drive.steps.throw(Unavailable("gone"))
    assert effect.seconds == pytest.approx(default.deadlock_look_interval)


def test_wake_up_during_a_look_is_not_lost() -> None:
    drive = Drive([5])
    drive.pass_time()
    drive.waiters.notified(drive.attempt)
    drive.send(NOTHING)
    drive.waiter.wait(0)  # returns at once, because it was woken
    assert b"try_acquire" in drive.send().sql


def test_notified_victim_looks_at_once() -> None:
    drive = Drive([5])
    drive.waiters.notified(f"deadlock {drive.attempt[:8]}-{drive.attempt[8:]}")
    assert is_look(drive.send())
    drive.send(NOTHING)
    assert b"try_acquire" in drive.send().sql, "the notification is used up"


def test_ordinary_wake_up_does_not_look() -> None:
    drive = Drive([5])
    drive.waiters.notified(drive.attempt)
    assert b"try_acquire" in drive.send().sql


def test_next_look_of_the_client_deletes_the_note_of_an_ended_wait() -> None:
    drive = Drive([5])
    drive.pass_time()
    drive.send(NOTHING)
    drive.steps.close()
    assert drive.flows.ended_looks == [drive.attempt]
    never_looked = Drive([5])
    never_looked.steps.close()
    assert never_looked.flows.ended_looks == []


def test_waiters_of_a_crowded_client_look_less_often() -> None:
    drive = Drive([5])
    for number in range(LOOKS_PER_SECOND * 3):
        drive.waiters.add(ThreadWaiter(drive.waiters, "a", f"{number:032x}"))
    assert drive.effect.seconds == pytest.approx(default.deadlock_look_interval), "the first look comes in time"
    drive.pass_time()
    assert drive.send(NOTHING).seconds == pytest.approx(3, rel=0.01)
