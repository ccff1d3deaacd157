"""What a process believes of one grant, by a clock that only the test moves."""

from __future__ import annotations

import sys
import time
import warnings
from datetime import datetime, timezone

import pytest

from dblock._core import clock
from dblock._core.acquire import TRUST
from dblock._core.lease_state import Hold, Reason
from dblock._core.replies import Grant


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def now() -> Clock:
    return Clock()


@pytest.fixture
def hold(now: Clock) -> Hold:
    return Hold(Grant("a", 7, 0.0, now.now + 10 * TRUST, now.now), 10, now)


def test_it_is_lost_from_the_moment_its_trust_window_ends(hold: Hold, now: Clock) -> None:
    now.now += 9.79
    assert hold.lost() is None
    assert hold.remaining() == pytest.approx(0.01)
    now.now += 0.02
    assert hold.remaining() == 0
    loss = hold.lost()
    assert loss is not None
    assert loss.reason is Reason.EXPIRED


def test_what_was_lost_stays_lost(hold: Hold, now: Clock) -> None:
    sent_at = now.now
    now.now += 20
    assert not hold.confirm(sent_at, now.now + 100, 0), "the answer came when others could have been granted the lock"
    assert hold.remaining() == 0
    hold.lose(Reason.FORCED)
    assert hold.loss is not None
    assert hold.loss.reason is Reason.EXPIRED


def test_a_database_that_did_not_answer_is_the_reason(hold: Hold, now: Clock) -> None:
    hold.unreachable = True
    now.now += 20
    loss = hold.lost()
    assert loss is not None
    assert loss.reason is Reason.UNREACHABLE


def test_one_that_answered_at_last_is_not(hold: Hold, now: Clock) -> None:
    hold.unreachable = True
    assert hold.confirm(now.now, now.now + 5 * TRUST, 0)
    now.now += 20
    loss = hold.lost()
    assert loss is not None
    assert loss.reason is Reason.EXPIRED


def test_it_tells_when_it_was_last_known_to_be_held(hold: Hold, now: Clock) -> None:
    now.now += 4
    hold.confirm(now.now - 1, now.now + 9, 0)
    now.now += 30
    loss = hold.lost()
    assert loss is not None
    ago = (datetime.now(timezone.utc) - loss.last_held).total_seconds()
    assert ago == pytest.approx(1, abs=0.5), "a second before the answer came, by the wall clock"
    assert abs(time.time() - loss.last_held.timestamp()) < 5


def test_what_was_given_back_is_not_lost(hold: Hold, now: Clock) -> None:
    hold.finish()
    now.now += 20
    hold.lose(Reason.SUPERSEDED)
    assert hold.lost() is None
    assert hold.remaining() == 0


@pytest.mark.parametrize("early", [True, False])
def test_endings_are_called_once_also_when_they_come_late(hold: Hold, early: bool) -> None:
    called: list[int] = []
    if early:
        hold.at_end(lambda: called.append(1))
    hold.lose(Reason.FORCED)
    hold.finish()
    if not early:
        hold.at_end(lambda: called.append(1))
    assert called == [1]


def test_a_finalizer_in_the_middle_of_a_loss_does_not_deadlock(hold: Hold, now: Clock) -> None:
    """A collection may run while the hold's own lock is held, and collect the lease, whose end asks the hold."""
    now.now += 20
    with hold._lock:
        assert hold.lost() is not None


def test_one_who_cannot_be_told_does_not_keep_it_from_the_next(hold: Hold) -> None:
    told: list[int] = []
    hold.at_end(lambda: 1 / 0)
    hold.at_end(lambda: told.append(1))
    hold.lose(Reason.FORCED)
    assert told == [1]


def test_a_wish_to_be_told_can_be_taken_back(hold: Hold) -> None:
    told: list[int] = []
    hold.at_end(lambda: told.append(1))()
    hold.lose(Reason.FORCED)
    assert told == []
    assert hold._endings == []


def test_after_a_release_in_the_users_transaction_it_is_not_believed(hold: Hold, now: Clock) -> None:
    with hold.leaving():
        pass
    assert hold.remaining() == 0
    now.now += 20
    assert hold.lost() is None, "it was released"
    assert hold.over


def test_a_lease_that_was_forgotten_is_released_also_where_warnings_are_errors(hold: Hold) -> None:
    class Lease:
        pass

    lease = Lease()
    abandoned: list[Hold] = []
    hold.mind(lease, abandoned.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            del lease
        finally:
            sys.unraisablehook = hook
    assert abandoned == [hold]


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no such clock")
def test_the_clock_goes_on_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {time.CLOCK_BOOTTIME: 4242.0}
    monkeypatch.setattr(time, "clock_gettime", clocks.__getitem__)
    assert clock.now() == 4242.0
