"""One lease, driven by hand: what it trusts while replies are slow, lost or out of order."""

from __future__ import annotations

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
    """A client that cannot make calls."""

    _schema = "dblock"

    def __init__(self) -> None:
        self._flows = LockFlows("dblock", "me")
        self._keepalive: Any = self
        self.abandoned: list[LeaseState] = []

    def _run(self, steps: Any) -> Any:
        raise AssertionError("driven by hand")

    def discard(self, state: LeaseState) -> None:
        pass

    def abandon(self, state: LeaseState) -> None:
        self.abandoned.append(state)


class Held:
    """A lease whose calls stop until the test replies to them."""

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
def _nothing_is_forgotten(kept_leases: list[Lease]) -> Iterator[None]:
    yield
    for lease in kept_leases:
        lease._state.let_go()


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
    answer(steps, RENEWED)
    assert held.lease.remaining() > 50


@pytest.mark.parametrize("long_first", [True, False])
def test_longer_of_two_concurrent_renewals_is_believed(long_first: bool) -> None:
    """The database never shortens a lease, in whichever order the renewals reach it (sql/test_functions.py)."""
    held = Held(10)
    long, short = held.renewing(60), held.renewing(1)
    for steps in [long, short] if long_first else [short, long]:
        answer(steps, RENEWED)
    assert held.lease.remaining() > 50


def test_a_child_of_the_holders_process_can_do_nothing_with_its_lease() -> None:
    held = Held()

    def body() -> bool:
        held.lease.__exit__(None, None, None)  # would call, and the call raises
        return held.lease.remaining() == 0

    assert run_in_fork(body) == 0
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
        renewing.send(RENEWED)
    assert held.lease.remaining() == 0


def test_a_release_that_failed_can_be_made_again() -> None:
    held = Held()
    failing = held.releasing()
    with pytest.raises(dblock.Unavailable):
        failing.throw(dblock.Unavailable("gone"))
    assert held.lease.remaining() == 0
    assert answer(held.releasing(), ("t",)) is True
    with pytest.raises(StopIteration) as done:
        next(held.lease._flows.release())
    assert done.value.value is False


def test_a_release_that_fails_does_not_hide_what_the_body_raised() -> None:
    def unreachable(steps: Any) -> Any:
        next(steps)
        steps.throw(dblock.Unavailable("gone"))

    def lease() -> Lease:
        held = Held()
        held.client._run = unreachable
        return held.lease

    with pytest.raises(KeyError), lease():
        raise KeyError
    with pytest.raises(dblock.Unavailable), lease():
        pass


def test_concurrent_releases_do_not_make_a_loss() -> None:
    held = Held()
    first = held.lease._flows.release()
    next(first)
    second = held.lease._flows.release()
    next(second)
    assert answer(first, ("t",)) is True
    assert answer(second, ("f",)) is False
    assert not held.lease.lost.is_set()


@pytest.mark.parametrize("told", [RENEWED, ("0", "{1}", "{busy}"), ("0", "{1}", "{forced}")], ids=str)
def test_a_release_that_a_renewal_came_before_is_made_again(told: tuple[str, ...]) -> None:
    """The release saw the old deadline. The database then says that the lease is held, so it must be released again."""
    held = Held()
    releasing = held.releasing()
    releasing.send(("f",))
    releasing.send(told)
    assert answer(releasing, ("t",)) is True
    assert not held.lease.lost.is_set()


@pytest.mark.parametrize(("stands", "released"), [(True, True), (False, False)])
def test_retried_release_that_finds_nothing_counts_as_done_unless_the_presence_is_in_doubt(
    stands: bool, released: bool
) -> None:
    held = Held()
    presence = Presence("there", 0.15, lambda: SocketState.OPEN, clock.now())
    presence.stands = lambda now: stands  # type: ignore[method-assign]
    held.state.tie(presence)
    steps = held.releasing()
    if released:
        assert answer(steps, (None,)) is True
        return
    steps.send((None,))  # so it asks why
    assert answer(steps, ("0", "{1}", "{released}")) is False
    assert held.state.loss is not None
    assert held.state.loss.reason == "unreachable"


def test_third_release_after_a_busy_row_is_not_reported_as_done_in_doubt() -> None:
    """A client that takes the lock also locks its row."""
    held = Held()
    presence = Presence("there", 0.15, lambda: SocketState.OPEN, clock.now())
    presence.stands = lambda now: False  # type: ignore[method-assign]
    held.state.tie(presence)
    steps = held.releasing()
    steps.send((None,))
    steps.send(("0", "{1}", "{busy}"))
    assert answer(steps, (None,)) is False
    assert held.state.loss is not None


@pytest.mark.parametrize(
    ("why", "reason"), [("expired", "expired"), ("superseded", "superseded"), ("released", "forced")]
)
def test_a_release_that_finds_nothing_learns_the_reason(why: str, reason: str) -> None:
    held = Held()
    releasing = held.releasing()
    releasing.send(("f",))
    assert answer(releasing, ("0", "{1}", f"{{{why}}}")) is False
    assert held.lease.lost.reason == reason
