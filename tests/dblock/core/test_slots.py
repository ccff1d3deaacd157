"""The report of a run's end, driven step by step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from dblock._core.acquire import TRUST, LockFlows
from dblock._core.effects import Call, Sleep
from dblock._core.lease_state import LeaseState, Status
from dblock._core.replies import Grant
from dblock._core.slots import SlotFlows, check_definition
from dblock.errors import NotWritable, Unavailable
from dblock.recipes.schedules.schedule import Slots


class Reporting:
    """A run whose body has returned and whose end is being reported."""

    def __init__(self, ttl: float = 10) -> None:
        self.now = 100.0
        grant = Grant("once:s", 7, 0.0, self.now + ttl * TRUST, self.now)
        self.state = LeaseState(grant, ttl, now=lambda: self.now)
        self.definition = check_definition("s", every=60, ttl=ttl, planner=lambda *_: lambda *_: [])
        self.service = LockFlows("dblock", "holder", lambda: self.now)
        flows = SlotFlows(self.service, self.definition)
        self.steps: Any = flows.end(self.state, "succeeded")
        assert isinstance(next(self.steps), Call)


def test_lease_is_not_believed_after_a_report_without_a_reply() -> None:
    one = Reporting()
    assert isinstance(one.steps.throw(Unavailable("no reply")), Sleep)
    assert one.state.remaining() == 0, "the report may have released the lock, and another host may run the next slot"
    assert one.state.renewal_confirmed(one.now, one.now + 20, 0.0), "the keep-alive still renews it"
    assert one.state.remaining() == 0
    assert isinstance(one.steps.send(None), Call)
    with pytest.raises(StopIteration) as done:
        one.steps.send(("succeeded",))
    assert done.value.value == "succeeded"
    assert one.state.status is Status.RELEASED


def test_report_is_retried_until_the_trust_window_ends() -> None:
    one = Reporting()
    assert isinstance(one.steps.throw(Unavailable("no reply")), Sleep)
    one.now += 20
    assert isinstance(one.steps.send(None), Call)
    with pytest.raises(Unavailable):
        one.steps.throw(Unavailable("no reply"))
    assert one.state.remaining() == 0


@pytest.mark.parametrize("lost", ["first", "last", None])
def test_lease_whose_report_failed_is_believed_only_if_no_report_may_be_done(lost: str | None) -> None:
    one = Reporting()
    first, last = Unavailable("no reply"), NotWritable()
    first.may_be_done, last.may_be_done = lost == "first", lost == "last"
    assert isinstance(one.steps.throw(first), Sleep)
    assert isinstance(one.steps.send(None), Call)
    with pytest.raises(NotWritable) as raised:
        one.steps.throw(last)
    assert raised.value.may_be_done == bool(lost)
    assert (one.state.remaining() > 0, one.state.status) == ((False, Status.RELEASING) if lost else (True, Status.HELD))


def test_run_whose_report_may_be_done_is_released_in_the_background() -> None:
    """`dblock once` has no `with` of the lease around the report."""
    one, abandoned = Reporting(), list[LeaseState]()
    lost = NotWritable()
    lost.may_be_done = True

    def run(flow: Any) -> None:
        next(flow)
        flow.throw(lost)

    keepalive = SimpleNamespace(abandon=abandoned.append)
    slots = Slots(cast(Any, SimpleNamespace(run=run, keepalive=keepalive, flows=one.service)), one.definition)
    with pytest.raises(NotWritable):
        slots.end(cast(Any, SimpleNamespace(lease=SimpleNamespace(_state=one.state))), "succeeded")
    assert abandoned == [one.state]
