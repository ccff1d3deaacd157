"""What a process believes of one grant, by a clock that only the test moves."""

from __future__ import annotations

import sys
import time
import warnings
from datetime import datetime, timezone

import pytest

from dblock._core import clock
from dblock._core.acquire import TRUST
from dblock._core.lease_state import LeaseState, Reason
from dblock._core.replies import Grant


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def now() -> Clock:
    return Clock()


@pytest.fixture
def state(now: Clock) -> LeaseState:
    return LeaseState(Grant("a", 7, 0.0, now.now + 10 * TRUST, now.now), 10, now)


def test_lease_is_lost_from_the_end_of_its_trust_window(state: LeaseState, now: Clock) -> None:
    now.now += 9.79
    assert state.lost() is None
    assert state.remaining() == pytest.approx(0.01)
    now.now += 0.02
    assert state.remaining() == 0
    loss = state.lost()
    assert loss is not None
    assert loss.reason is Reason.EXPIRED


def test_lost_lease_stays_lost(state: LeaseState, now: Clock) -> None:
    sent_at = now.now
    now.now += 20
    assert not state.confirm(sent_at, now.now + 100, 0), "the answer came when others could have been granted the lock"
    assert state.remaining() == 0
    state.lose(Reason.FORCED)
    assert state.loss is not None
    assert state.loss.reason is Reason.EXPIRED


def test_a_database_that_did_not_answer_is_the_reason(state: LeaseState, now: Clock) -> None:
    state.unreachable = True
    now.now += 20
    loss = state.lost()
    assert loss is not None
    assert loss.reason is Reason.UNREACHABLE


def test_expired_lease_is_not_unreachable_after_a_reply(state: LeaseState, now: Clock) -> None:
    state.unreachable = True
    assert state.confirm(now.now, now.now + 5 * TRUST, 0)
    now.now += 20
    loss = state.lost()
    assert loss is not None
    assert loss.reason is Reason.EXPIRED


def test_loss_tells_when_the_lease_was_last_known_to_be_held(state: LeaseState, now: Clock) -> None:
    now.now += 4
    state.confirm(now.now - 1, now.now + 9, 0)
    now.now += 30
    loss = state.lost()
    assert loss is not None
    ago = (datetime.now(timezone.utc) - loss.last_held).total_seconds()
    assert ago == pytest.approx(1, abs=0.5), "a second before the answer came, by the wall clock"
    assert abs(time.time() - loss.last_held.timestamp()) < 5


def test_released_lease_is_not_lost(state: LeaseState, now: Clock) -> None:
    state.finish()
    now.now += 20
    state.lose(Reason.SUPERSEDED)
    assert state.lost() is None
    assert state.remaining() == 0


@pytest.mark.parametrize("early", [True, False])
def test_endings_are_called_once_also_when_they_come_late(state: LeaseState, early: bool) -> None:
    called: list[int] = []
    if early:
        state.at_end(lambda: called.append(1))
    state.lose(Reason.FORCED)
    state.finish()
    if not early:
        state.at_end(lambda: called.append(1))
    assert called == [1]


def test_a_finalizer_in_the_middle_of_a_loss_does_not_deadlock(state: LeaseState, now: Clock) -> None:
    """A collection may run while the hold's own lock is held, and collect the lease, whose end asks the hold."""
    now.now += 20
    with state._lock:
        assert state.lost() is not None


def test_failing_callback_does_not_keep_the_next_from_running(state: LeaseState) -> None:
    told: list[int] = []
    state.at_end(lambda: 1 / 0)
    state.at_end(lambda: told.append(1))
    state.lose(Reason.FORCED)
    assert told == [1]


def test_a_wish_to_be_told_can_be_taken_back(state: LeaseState) -> None:
    told: list[int] = []
    state.at_end(lambda: told.append(1))()
    state.lose(Reason.FORCED)
    assert told == []
    assert state._endings == []


def test_lease_released_in_a_user_transaction_is_not_trusted(state: LeaseState, now: Clock) -> None:
    with state.leaving():
        pass
    assert state.remaining() == 0
    now.now += 20
    assert state.lost() is None, "it was released"
    assert state.over


def test_a_lease_that_was_forgotten_is_released_also_where_warnings_are_errors(state: LeaseState) -> None:
    class Lease:
        pass

    lease = Lease()
    abandoned: list[LeaseState] = []
    state.mind(lease, abandoned.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            del lease
        finally:
            sys.unraisablehook = hook
    assert abandoned == [state]


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no such clock")
def test_the_clock_goes_on_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {time.CLOCK_BOOTTIME: 4242.0}
    monkeypatch.setattr(time, "clock_gettime", clocks.__getitem__)
    assert clock.now() == 4242.0
