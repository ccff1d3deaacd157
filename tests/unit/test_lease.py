"""A lease, driven by hand: what it believes while answers are slow, lost or out of order."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

import dblock
from dblock.lease import Lease
from dblock.steps import TRUST, Grant, Service


class Held:
    """A lease whose calls stop halfway, until the test answers them."""

    def __init__(self, ttl: float = 60) -> None:
        grant = Grant("a", 7, 0.0, time.monotonic() + ttl * TRUST)
        self.lease = Lease(self._refuse, Service("dblock", "me"), grant, ttl)

    def _refuse(self, steps: Any) -> Any:
        raise AssertionError("driven by hand")

    def renewing(self, ttl: float) -> Any:
        steps = self.lease._renewing(ttl)
        next(steps)
        return steps

    def releasing(self) -> Any:
        steps = self.lease._releasing()
        next(steps)
        return steps


def answer(steps: Any, row: Any) -> Any:
    try:
        steps.send(row)
    except StopIteration as done:
        return done.value
    raise AssertionError("more steps than expected")


def test_a_longer_renewal_is_not_believed_before_its_answer_has_come() -> None:
    held = Held(1)
    steps = held.renewing(60)
    assert held.lease.remaining() <= 1
    answer(steps, ("0", "60"))
    assert held.lease.remaining() > 50


@pytest.mark.parametrize("long_first", [True, False])
def test_of_two_renewals_at_once_the_longer_is_believed(long_first: bool) -> None:
    """The database never brings a deadline nearer, in whichever order they reach it (tests/sql/test_functions.py)."""
    held = Held(10)
    long, short = held.renewing(60), held.renewing(1)
    for steps, ttl in [(long, "60"), (short, "1")] if long_first else [(short, "1"), (long, "60")]:
        answer(steps, ("0", ttl))
    assert held.lease.remaining() > 50


def test_a_child_of_the_holders_process_can_do_nothing_with_its_lease() -> None:
    held = Held()
    child = os.fork()
    if child == 0:
        try:
            held.lease.__exit__(None, None, None)  # would call, and the call raises
            os._exit(int(held.lease.remaining()))
        finally:
            os._exit(99)
    assert os.waitpid(child, 0)[1] == 0
    assert held.lease.remaining() > 50


def test_a_lease_is_over_as_soon_as_its_release_is_sent() -> None:
    held = Held()
    steps = held.releasing()
    assert held.lease.remaining() == 0
    assert answer(steps, ("t",)) is True


def test_a_renewal_answered_after_a_release_does_not_revive() -> None:
    held = Held()
    renewing, releasing = held.renewing(60), held.releasing()
    answer(releasing, ("t",))
    with pytest.raises(dblock.LeaseLost):
        renewing.send(("0", "60"))
    assert held.lease.remaining() == 0


def test_a_release_that_failed_can_be_made_again() -> None:
    held = Held()
    failing = held.releasing()
    with pytest.raises(dblock.Unavailable):
        failing.throw(dblock.Unavailable("gone"))
    assert held.lease.remaining() == 0
    assert answer(held.releasing(), ("t",)) is True
    with pytest.raises(StopIteration) as done:
        next(held.lease._releasing())
    assert done.value.value is False


def test_a_release_that_fails_does_not_hide_what_the_body_raised() -> None:
    def unreachable(steps: Any) -> Any:
        raise dblock.Unavailable("gone")

    def lease() -> Lease:
        return Lease(unreachable, Service("dblock", "me"), Grant("a", 7, 0.0, time.monotonic() + 60), 60)

    with pytest.raises(KeyError), lease():
        raise KeyError
    with pytest.raises(dblock.Unavailable), lease():
        pass
