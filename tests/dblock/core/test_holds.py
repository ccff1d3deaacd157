"""One grant that several leases share."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest

from dblock._core.holds import HeldState, Hold
from dblock._core.lease_state import LeaseState, Reason, Status
from dblock._core.renewal import due_at
from dblock._core.replies import Grant
from tests.support.stages import first

TTL = 6.0


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self._now = 100.0

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class Lease:
    """Stands for the lease that a user has in hand."""


def hold(now: Clock, ttl: float = TTL, keep_alive: bool = True) -> tuple[Hold, HeldState]:
    grant = LeaseState(
        Grant("a", 41, 1000.0, now() + ttl * 0.98, now()), ttl, keep_alive=keep_alive, now=now, owner=None
    )
    made = Hold(grant)
    return made, made.begin(ttl, keep_alive)


def joined(hold: Hold, ttl: float = TTL, keep_alive: bool = True) -> HeldState:
    state = hold.join(ttl, keep_alive)
    assert state is not None
    return state


@pytest.fixture
def now() -> Clock:
    return Clock()


def test_only_the_last_lease_must_release_the_grant(now: Clock) -> None:
    shared, outer = hold(now)
    inner = joined(shared)
    assert outer.leave() is True
    assert outer.remaining() == 0
    assert inner.remaining() > 0
    assert inner.leave() is None


def test_lease_that_leaves_twice_counts_once(now: Clock) -> None:
    shared, outer = hold(now)
    inner, third = joined(shared), joined(shared)
    assert inner.leave() is True
    assert inner.leave() is False
    assert outer.leave() is True, "the second release of one lease was taken for that of another"
    assert third.remaining() > 0


def test_no_lease_joins_once_the_last_one_releases(now: Clock) -> None:
    """Between this step and the release, the grant still looks as if it were held."""
    shared, outer = hold(now)
    assert outer.leave() is None
    assert shared.grant.remaining() > 0
    assert shared.join(TTL, True) is None


@pytest.mark.parametrize("how", ["clock", "lost", "released", "left"])
def test_no_lease_joins_a_grant_that_is_not_held(how: str, now: Clock) -> None:
    shared, _ = hold(now)
    if how == "clock":
        now.advance(TTL)
    elif how == "lost":
        shared.grant.lose(Reason.SUPERSEDED)
    elif how == "released":
        shared.grant.let_go()
    else:
        with shared.grant.leaving():
            pass
    assert shared.join(TTL, True) is None


def test_no_lease_joins_in_the_child_of_a_fork(now: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the parent may have had the lock of the hold at the fork, so the child must not wait for it."""
    shared, outer = hold(now)
    monkeypatch.setattr("os.getpid", lambda: -1)

    class HeldAtTheFork:
        def __enter__(self) -> None:
            pytest.fail("the child waits for a thread of its parent")

        def __exit__(self, *error: object) -> None: ...

    shared.lock = HeldAtTheFork()  # type: ignore[assignment]
    assert shared.join(TTL, True) is None
    assert outer.leave() is None


def test_longest_ttl_counts_while_its_lease_is_held(now: Clock) -> None:
    shared, _ = hold(now)
    longer, shorter = joined(shared, 60), joined(shared, 1)
    assert shared.grant.ttl == 60
    longer.leave()
    assert shared.grant.ttl == TTL
    shorter.change_ttl(2)
    assert shared.grant.ttl == TTL
    shorter.change_ttl(30)
    assert shared.grant.ttl == 30


def test_longer_ttl_does_not_put_the_renewal_off(now: Clock) -> None:
    """A third of the longer ttl is past the window that the grant has now."""
    shared, _ = hold(now)
    before = due_at(shared.grant)
    joined(shared, 600)
    assert due_at(shared.grant) == pytest.approx(before)
    assert due_at(shared.grant) < shared.grant.trusted_until
    assert shared.grant.renewal_confirmed(now(), now() + 600 * 0.98, 2000.0)
    assert due_at(shared.grant) == pytest.approx(now() + 200)


def test_grant_is_kept_alive_while_one_of_its_leases_asks_for_it(now: Clock) -> None:
    shared, outer = hold(now, keep_alive=False)
    assert not outer.keep_alive
    inner = joined(shared, keep_alive=True)
    assert shared.grant.keep_alive
    inner.leave()
    assert not shared.grant.keep_alive


def test_loss_is_that_of_every_lease_but_the_released_ones(now: Clock) -> None:
    shared, outer = hold(now)
    inner, early = joined(shared), joined(shared)
    called: list[str] = []
    for name, state in (("outer", outer), ("inner", inner), ("early", early)):
        state.at_end(lambda name=name, state=state: called.append(f"{name} {state.loss and state.loss.reason}"))  # type: ignore[misc]
    early.leave()
    shared.grant.lose(Reason.FORCED)
    assert called == ["early None", "outer forced", "inner forced"]
    assert early.lost() is None
    assert early.error().reason == "over"
    assert inner.leave() is False
    assert inner.error().reason == "forced", "a lost lease that is released still knows how it was lost"
    assert not inner.over
    assert early.over


def test_callback_that_is_added_after_the_end_is_called_at_once(now: Clock) -> None:
    shared, _ = hold(now)
    inner = joined(shared)
    called: list[int] = []
    cancel = inner.at_end(lambda: called.append(1))
    cancel()
    inner.leave()
    inner.at_end(lambda: called.append(2))
    assert called == [2]


def test_release_in_a_transaction_ends_one_of_several_leases(now: Clock) -> None:
    shared, outer = hold(now)
    inner = joined(shared)
    with inner.leaving() as last:
        assert not last
    assert inner.over
    assert outer.remaining() > 0
    with outer.leaving() as last:
        assert last
    assert shared.grant.status is Status.LEAVING


def test_release_in_a_transaction_that_fails_changes_nothing(now: Clock) -> None:
    shared, outer = hold(now)
    inner = joined(shared)
    for state in (inner, outer):
        with pytest.raises(ZeroDivisionError), state.leaving():
            _ = 1 / 0
        assert state.remaining() > 0
    assert inner.leave() is True
    assert outer.leave() is None


def test_two_leases_that_leave_at_once_do_not_leave_the_grant_to_each_other(now: Clock) -> None:
    shared, outer = hold(now)
    inner = joined(shared)
    with inner.leaving() as inner_is_last, outer.leaving() as outer_is_last:
        assert (inner_is_last, outer_is_last) == (False, True)


@pytest.mark.parametrize("order", ["inner first", "outer first"])
def test_forgotten_lease_leaves_and_only_the_last_is_abandoned(order: str, now: Clock) -> None:
    shared, outer = hold(now)
    inner = joined(shared)
    abandoned: list[Any] = []
    in_hand = [Lease(), Lease()]
    for state, lease in zip((outer, inner), in_hand, strict=True):
        state.release_if_forgotten(lease, abandoned.append)
    del lease
    for _ in range(2):
        assert abandoned == []
        with pytest.warns(ResourceWarning, match="never released"):
            in_hand.pop(-1 if order == "inner first" else 0)
    assert abandoned == [shared.grant]


def test_released_lease_is_not_forgotten(now: Clock, recwarn: pytest.WarningsRecorder) -> None:
    shared, outer = hold(now)
    inner = joined(shared)
    lease = Lease()
    inner.release_if_forgotten(lease, lambda state: pytest.fail("abandoned"))
    inner.leave()
    del lease
    gc.collect()
    assert not recwarn.list
    assert outer.remaining() > 0


@pytest.mark.parametrize("seed", first(5, range(200)))
def test_hold_does_what_a_counter_does(seed: int) -> None:
    """A plain model: the leases that are not released, their ttls, and whether the grant is lost."""
    chance = random.Random(seed)
    now = Clock()
    shared, begun = hold(now)
    states = [begun]
    ttls = {begun: TTL}
    lost = closed = False
    for _ in range(60):
        step = chance.choice(["join", "join", "leave", "leave", "leave in", "lose", "renew", "ttl"])
        state = chance.choice(states)
        if step == "join":
            ttl = chance.choice([1.0, TTL, 30.0, 60.0])
            new = shared.join(ttl, True)
            assert (new is None) == (lost or closed)
            if new is not None:
                states.append(new)
                ttls[new] = ttl
        elif step == "leave":
            left = state.leave()
            if state not in ttls:
                assert left is False
            elif len(ttls) > 1:
                assert left is not lost
                del ttls[state]
            else:
                assert left is None
                closed = True
                state.let_go()
        elif step == "leave in" and state in ttls and not lost and not closed:
            with state.leaving() as last:
                assert last is (len(ttls) == 1)
            if last:
                state.leave_refused()  # rolled back
            else:
                del ttls[state]
        elif step == "lose" and chance.random() < 0.1 and not closed:
            shared.grant.lose(Reason.EXPIRED)
            lost = True
        elif step == "renew" and not lost and not closed:
            now.advance(0.1)
            assert shared.grant.renewal_confirmed(now(), now() + shared.grant.ttl * 0.98, 2000.0)
        elif step == "ttl" and state in ttls and not lost and not closed:
            ttl = chance.choice([2.0, 45.0])
            if ttl != shared.grant.ttl:
                ttls[state] = ttl
            state.change_ttl(ttl)
        for one in states:
            assert (one.remaining() > 0) == (one in ttls and not lost and not closed)
        assert shared.grant.ttl == max(ttls.values())
