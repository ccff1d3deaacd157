"""A lease, driven by hand: its trust window while replies are slow, lost or out of order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

import dblock
from dblock._core import clock
from dblock._core.acquire import TRUST, LockFlows
from dblock._core.lease_state import LeaseState
from dblock._core.presence import Presence, SocketState
from dblock._core.replies import Grant
from dblock.lease import Lease
from tests.support.forks import run_in_fork

RENEWED = ("0", None, None)


class _NoClient:
    """Replaces the client of a lease whose flows the test drives by hand."""

    schema = "dblock"
    new_event = threading.Event

    def __init__(self) -> None:
        self.flows = LockFlows("dblock", "me")
        self.keepalive: Any = self
        self.abandoned: list[LeaseState] = []

    def run(self, steps: Any) -> Any:
        raise AssertionError("driven by hand")

    def discard(self, state: LeaseState) -> None:
        pass

    def abandon(self, state: LeaseState) -> None:
        self.abandoned.append(state)


class ManualLease:
    """Holds a lease whose calls stop until the test replies to them."""

    def __init__(self, ttl: float = 60) -> None:
        self.client: Any = _NoClient()
        now = clock.now()
        self.state = LeaseState(Grant("a", 7, 0.0, now + ttl * TRUST, now), ttl)
        self.lease = Lease(cast(Any, self.client), self.state)

    def renewing(self, ttl: float) -> Any:
        steps = self.lease._flows.renew(ttl)
        next(steps)
        return steps

    def releasing(self) -> Any:
        steps = self.lease._flows.release()
        next(steps)
        return steps


@pytest.fixture(autouse=True)
def _end_all_leases(kept_leases: list[Lease]) -> Iterator[None]:
    yield
    for lease in kept_leases:
        lease._state.let_go()


def reply(steps: Any, row: Any) -> Any:
    try:
        steps.send(row)
    except StopIteration as done:
        return done.value
    raise AssertionError("more steps than expected")


def test_longer_renewal_is_not_trusted_before_its_reply() -> None:
    held = ManualLease(20)
    steps = held.renewing(60)
    assert held.lease.remaining() <= 20
    reply(steps, RENEWED)
    assert held.lease.remaining() > 50


@pytest.mark.parametrize("long_first", [True, False])
def test_longer_of_two_concurrent_renewals_is_trusted(long_first: bool) -> None:
    """The database never shortens a lease, in whichever order the renewals reach it (sql/test_functions.py)."""
    held = ManualLease(10)
    long, short = held.renewing(60), held.renewing(1)
    for steps in [long, short] if long_first else [short, long]:
        reply(steps, RENEWED)
    assert held.lease.remaining() > 50


@pytest.mark.second_stage
def test_forked_child_cannot_use_the_parents_lease() -> None:
    held = ManualLease()

    def body() -> bool:
        held.lease.__exit__(None, None, None)  # would call, and the call raises
        return held.lease.remaining() == 0

    assert run_in_fork(body) == 0
    assert held.lease.remaining() > 50


def test_lease_is_over_as_soon_as_its_release_is_sent() -> None:
    held = ManualLease()
    steps = held.releasing()
    assert held.lease.remaining() == 0
    assert reply(steps, ("t",)) is True


def test_renewal_confirmed_after_a_release_does_not_revive_the_lease() -> None:
    held = ManualLease()
    renewing, releasing = held.renewing(60), held.releasing()
    reply(releasing, ("t",))
    with pytest.raises(dblock.LeaseLost):
        renewing.send(RENEWED)
    assert held.lease.remaining() == 0


def test_failed_release_can_be_retried() -> None:
    held = ManualLease()
    failing = held.releasing()
    with pytest.raises(dblock.Unavailable):
        failing.throw(dblock.Unavailable("gone"))
    assert held.lease.remaining() == 0
    assert reply(held.releasing(), ("t",)) is True
    with pytest.raises(StopIteration) as done:
        next(held.lease._flows.release())
    assert done.value.value is False


def test_failed_release_does_not_hide_the_error_of_the_body() -> None:
    def unreachable(steps: Any) -> Any:
        next(steps)
        steps.throw(dblock.Unavailable("gone"))

    def lease() -> Lease:
        held = ManualLease()
        held.client.run_even_if_closed = unreachable
        return held.lease

    with pytest.raises(KeyError), lease():
        raise KeyError
    with pytest.raises(dblock.Unavailable), lease():
        pass


def test_concurrent_releases_do_not_make_a_loss() -> None:
    held = ManualLease()
    first = held.lease._flows.release()
    next(first)
    second = held.lease._flows.release()
    next(second)
    assert reply(first, ("t",)) is True
    assert reply(second, ("f",)) is False
    assert not held.lease.lost.is_set()


@pytest.mark.parametrize("row", [RENEWED, ("0", "{1}", "{busy}"), ("0", "{1}", "{forced}")], ids=str)
def test_release_that_a_renewal_overtook_is_retried(row: tuple[str, ...]) -> None:
    """The release saw the old deadline. Asked for the reason, the database reports that the lease is still held."""
    held = ManualLease()
    releasing = held.releasing()
    releasing.send(("f",))
    releasing.send(row)
    assert reply(releasing, ("t",)) is True
    assert not held.lease.lost.is_set()


@pytest.mark.parametrize(("stands", "released"), [(True, True), (False, False)])
def test_retried_release_that_finds_nothing_succeeds_only_while_the_presence_stands(
    stands: bool, released: bool
) -> None:
    held = ManualLease()
    presence = Presence("there", 0.15, lambda: SocketState.OPEN, clock.now())
    presence.stands = lambda now: stands  # type: ignore[method-assign]
    held.state.tie(presence)
    steps = held.releasing()
    if released:
        assert reply(steps, (None,)) is True
        return
    steps.send((None,))  # so the flow asks for the reason
    assert reply(steps, ("0", "{1}", "{released}")) is False
    assert held.state.loss is not None
    assert held.state.loss.reason == "unreachable"


def test_third_release_after_a_busy_row_is_not_reported_as_done_in_doubt() -> None:
    """The row may be busy because another session is taking the lock."""
    held = ManualLease()
    presence = Presence("there", 0.15, lambda: SocketState.OPEN, clock.now())
    presence.stands = lambda now: False  # type: ignore[method-assign]
    held.state.tie(presence)
    steps = held.releasing()
    steps.send((None,))
    steps.send(("0", "{1}", "{busy}"))
    assert reply(steps, (None,)) is False
    assert held.state.loss is not None


@pytest.mark.parametrize(
    ("why", "reason"), [("expired", "expired"), ("superseded", "superseded"), ("released", "forced")]
)
def test_release_that_finds_nothing_reports_the_reason_of_the_loss(why: str, reason: str) -> None:
    held = ManualLease()
    releasing = held.releasing()
    releasing.send(("f",))
    assert reply(releasing, ("0", "{1}", f"{{{why}}}")) is False
    assert held.lease.lost.reason == reason


@pytest.mark.parametrize(
    ("row", "reason"),
    [(None, "unreachable"), (("0", "{1}", "{superseded}"), "superseded"), (("0", "{1}", "{busy}"), None)],
    ids=["no reply", "superseded", "busy"],
)
def test_lease_that_a_statement_did_not_find_held_is_believed_only_if_the_database_says_so(
    row: tuple[str, ...] | None, reason: str | None
) -> None:
    held = ManualLease()
    steps = held.lease._flows.learn_why()
    next(steps)
    with pytest.raises(StopIteration):
        steps.throw(dblock.Unavailable("gone")) if row is None else steps.send(row)
    assert held.lease.lost.reason == reason
    assert (held.lease.remaining() > 0) == (reason is None)
