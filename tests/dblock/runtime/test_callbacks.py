"""The checks of a watched lease, called by hand."""

from __future__ import annotations

import math

from dblock._core import clock
from dblock._core.lease_state import LeaseState, Reason
from dblock._core.replies import Grant
from dblock._runtime.callbacks import WatchedLease


def held_for(seconds: float) -> LeaseState:
    now = clock.now()
    return LeaseState(Grant("a", 7, 0.0, now + seconds, now), 60)


def test_on_danger_is_called_once_for_each_deadline() -> None:
    state = held_for(5)
    watched = WatchedLease(state)
    calls: list[float] = []
    watched.add_danger(10, calls.append)
    for _ in range(3):
        assert 0 < watched.check() <= 5
    assert len(calls) == 1
    state.renewal_confirmed(clock.now(), clock.now() + 8, 0)
    for _ in range(3):
        watched.check()
    assert len(calls) == 2


def test_next_check_comes_when_the_danger_begins_or_the_lease_ends() -> None:
    began = clock.now()
    watched = WatchedLease(held_for(30))
    found = watched.check()
    assert 30 - (clock.now() - began) <= found <= 30
    watched.add_danger(10, lambda left: None)
    found = watched.check()
    assert 20 - (clock.now() - began) <= found <= 20


def test_ended_lease_is_not_checked_again() -> None:
    for end in (LeaseState.let_go, lambda state: state.lose(Reason.FORCED)):
        state = held_for(30)
        end(state)
        assert WatchedLease(state).check() == math.inf
