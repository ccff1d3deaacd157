"""One grant as its process knows it, on a clock that only the test moves."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import datetime, timezone

import pytest

from dblock._core import clock
from dblock._core.acquire import TRUST
from dblock._core.lease_state import LeaseState, Reason, Status
from dblock._core.presence import Presence, SocketState
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
    return LeaseState(Grant("a", 7, 0.0, now.now + 10 * TRUST, now.now), 10, now=now)


def _leave(state: LeaseState) -> None:
    with state.leaving():
        pass


def _release(state: LeaseState) -> None:
    state.let_go()
    state.release_confirmed()


REACHED_BY: dict[Status, Callable[[LeaseState], object]] = {
    Status.HELD: lambda state: None,
    Status.LEAVING: _leave,
    Status.RELEASING: LeaseState.let_go,
    Status.RELEASED: _release,
    Status.LOST: lambda state: state.lose(Reason.UNREACHABLE),
}


def _renewal_confirmed(state: LeaseState, now: Clock) -> None:
    state.renewal_confirmed(now.now, now.now + 10, 0)


def _earlier_renewal_confirmed(state: LeaseState, now: Clock) -> None:
    state.renewal_confirmed(now.now - 2, now.now + 8, 0)


def _leaving(state: LeaseState, now: Clock) -> None:
    with state.leaving():
        pass


def _leaving_failed(state: LeaseState, now: Clock) -> None:
    with pytest.raises(KeyError), state.leaving():
        raise KeyError


def _trust_window_ends(state: LeaseState, now: Clock) -> None:
    now.now += 20
    state.lost_by_clock()


def _presence_in_doubt(state: LeaseState, now: Clock) -> None:
    presence = Presence("there", 0.15, lambda: SocketState.OPEN, now.now)
    presence.stands = lambda now: False  # type: ignore[method-assign]
    state.tie(presence)
    state.lost()


H, LV, RG, RD, LO = Status.HELD, Status.LEAVING, Status.RELEASING, Status.RELEASED, Status.LOST
TRANSITIONS: dict[str, tuple[Callable[[LeaseState, Clock], object], list[Status]]] = {
    "a renewal is confirmed": (_renewal_confirmed, [H, H, RG, RD, LO]),
    "a renewal sent before the release is confirmed": (_earlier_renewal_confirmed, [H, LV, RG, RD, LO]),
    "a renewal is due": (lambda state, now: state.reply_awaited(), [H, LV, RG, RD, LO]),
    "the database replies": (lambda state, now: state.reply_received(), [H, LV, RG, RD, LO]),
    "a renewal is postponed": (lambda state, now: state.retry_renewal(now.now + 1), [H, LV, RG, RD, LO]),
    "a renewal is refused: expired": (lambda state, now: state.renewal_refused("expired"), [LO, LO, RG, RD, LO]),
    "a renewal is refused: forced": (lambda state, now: state.renewal_refused("forced"), [LO, LO, RG, RD, LO]),
    "a renewal is refused: released": (lambda state, now: state.renewal_refused("released"), [LO, RD, RG, RD, LO]),
    "a renewal is refused: superseded": (lambda state, now: state.renewal_refused("superseded"), [LO, RD, RG, RD, LO]),
    "the ttl changes": (lambda state, now: state.change_ttl(5), [H, LV, RG, RD, LO]),
    "the clock is replaced": (lambda state, now: state.use_clock(lambda: now.now), [H, LV, RG, RD, LO]),
    "the lease is tied": (
        lambda state, now: state.tie(Presence("there", 1, lambda: SocketState.OPEN, now.now)),
        [H, LV, RG, RD, LO],
    ),
    "a release is sent in a transaction": (_leaving, [LV, LV, RG, RD, LO]),
    "a release cannot be sent in a transaction": (_leaving_failed, [H, LV, RG, RD, LO]),
    "a release in a transaction is refused": (lambda state, now: state.leave_refused(), [H, H, RG, RD, LO]),
    "the holder lets go": (lambda state, now: state.let_go(), [RG, RG, RG, RD, LO]),
    "the release is confirmed": (lambda state, now: state.release_confirmed(), [H, LV, RD, RD, LO]),
    "the release is refused": (lambda state, now: state.release_refused(Reason.EXPIRED), [H, LV, LO, RD, LO]),
    "the lease is lost": (lambda state, now: state.lose(Reason.SUPERSEDED), [LO, LO, RG, RD, LO]),
    "the trust window ends": (_trust_window_ends, [LO, RG, RG, RD, LO]),
    "the presence is in doubt": (_presence_in_doubt, [LO, LO, RG, RD, LO]),
}
"""Each event, and the status that follows on each status, in the order in which Status names them."""


@pytest.mark.parametrize("before", Status, ids=str)
@pytest.mark.parametrize("event", TRANSITIONS)
def test_each_event_moves_each_status_as_the_table_says(
    state: LeaseState, now: Clock, event: str, before: Status
) -> None:
    happen, outcomes = TRANSITIONS[event]
    after = outcomes[list(Status).index(before)]
    endings: list[Status] = []
    state.at_end(lambda: endings.append(state.status))
    now.now += 1
    REACHED_BY[before](state)
    assert state.status is before
    first_loss = state.loss
    now.now += 1
    happen(state, now)
    assert state.status is after
    assert state.over is (after in (RG, RD))
    assert state.ended is (after not in (H, LV))
    assert (state.loss is not None) is (after is LO)
    assert (state.remaining() > 0) is (after is H)
    assert len(endings) == state.ended, "a lease ends once and calls back at that moment"
    if before is LO:
        assert state.loss is first_loss


def test_table_has_every_event() -> None:
    not_events = {"remaining", "error", "at_end", "release_if_forgotten"}
    methods = {name for name, member in vars(LeaseState).items() if callable(member) and not name.startswith("_")}
    called = {name for happen, _ in TRANSITIONS.values() for name in happen.__code__.co_names}
    assert methods - not_events <= called


def test_loss_and_release_that_race_have_one_winner() -> None:
    for _ in range(300):
        moment = clock.now()
        state = LeaseState(Grant("a", 7, 0.0, moment + 60, moment), 60)
        endings: list[Status] = []
        state.at_end(lambda state=state, endings=endings: endings.append(state.status))  # type: ignore[misc]
        gate = threading.Barrier(2)

        def lose(state: LeaseState = state, gate: threading.Barrier = gate) -> None:
            gate.wait()
            state.lose(Reason.FORCED)

        loser = threading.Thread(target=lose)
        loser.start()
        gate.wait()
        state.let_go()
        state.release_confirmed()
        loser.join()
        assert endings in ([Status.LOST], [Status.RELEASING])
        assert (state.status, state.loss is None) in ((Status.LOST, False), (Status.RELEASED, True))
        assert (state.status is Status.LOST) is (endings == [Status.LOST])
        assert state.settled


class _Rolled(LeaseState):
    """A lease whose release in the user's transaction is rolled back between any two looks at its status."""

    looks = 0

    @property
    def _status(self) -> Status:
        self.looks += 1
        return Status.LEAVING if self.looks % 2 else Status.HELD

    @_status.setter
    def _status(self, status: Status) -> None:
        """Keep to the alternation."""


def test_lease_that_is_held_again_at_this_moment_has_not_ended(now: Clock) -> None:
    """The listener would end a presence that such a lease depends on, without asking whether the lock was taken."""
    state = _Rolled(Grant("a", 7, 0.0, now.now + 10 * TRUST, now.now), 10, now=now)
    assert [state.ended for _ in range(4)] == [False] * 4


def test_properties_cannot_be_assigned_from_outside(state: LeaseState) -> None:
    for name, member in vars(LeaseState).items():
        if isinstance(member, property):
            with pytest.raises(AttributeError):
                setattr(state, name, getattr(state, name))


def test_lease_is_lost_from_the_end_of_its_trust_window(state: LeaseState, now: Clock) -> None:
    now.now += 9.79
    assert state.lost() is None
    assert state.remaining() == pytest.approx(0.01)
    now.now += 0.02
    assert state.remaining() == 0
    loss = state.lost()
    assert loss is not None
    assert loss.reason is Reason.EXPIRED


def test_late_renewal_cannot_revive_a_lost_lease(state: LeaseState, now: Clock) -> None:
    """The reply came when the lock could have been granted to another holder."""
    sent_at = now.now
    now.now += 20
    assert not state.renewal_confirmed(sent_at, now.now + 100, 0)
    assert state.remaining() == 0
    state.lose(Reason.FORCED)
    assert state.loss is not None
    assert state.loss.reason is Reason.EXPIRED


def test_lease_without_a_reply_is_lost_as_unreachable(state: LeaseState, now: Clock) -> None:
    state.reply_awaited()
    now.now += 20
    loss = state.lost()
    assert loss is not None
    assert loss.reason is Reason.UNREACHABLE


def test_expired_lease_is_not_unreachable_after_a_reply(state: LeaseState, now: Clock) -> None:
    state.reply_awaited()
    assert state.renewal_confirmed(now.now, now.now + 5 * TRUST, 0)
    now.now += 20
    loss = state.lost()
    assert loss is not None
    assert loss.reason is Reason.EXPIRED


@pytest.mark.second_stage
def test_loss_tells_when_the_lease_was_last_known_to_be_held(state: LeaseState, now: Clock) -> None:
    now.now += 4
    state.renewal_confirmed(now.now - 1, now.now + 9, 0)
    now.now += 30
    loss = state.lost()
    assert loss is not None
    ago = (datetime.now(timezone.utc) - loss.last_held).total_seconds()
    assert ago == pytest.approx(1, abs=0.5), "a second before the reply came, by the wall clock"
    assert abs(time.time() - loss.last_held.timestamp()) < 5


def test_released_lease_is_not_lost(state: LeaseState, now: Clock) -> None:
    state.let_go()
    now.now += 20
    state.lose(Reason.SUPERSEDED)
    assert state.lost() is None
    assert state.remaining() == 0


@pytest.mark.parametrize("reason", Reason)
@pytest.mark.parametrize("freed", [False, True])
def test_grant_may_outlive_a_loss_in_doubt_or_on_demand(state: LeaseState, reason: Reason, freed: bool) -> None:
    state.lose(reason)
    if freed:
        state.release_confirmed()
    assert state.settled is freed
    assert state.may_be_granted is (reason in (Reason.UNREACHABLE, Reason.FORCED) and not freed)


def test_release_that_finds_the_lease_lost_leaves_nothing_to_free(state: LeaseState) -> None:
    state.let_go()
    state.release_refused(Reason.FORCED)
    assert state.loss is not None
    assert state.loss.reason is Reason.FORCED
    assert state.settled
    assert not state.may_be_granted


@pytest.mark.parametrize("early", [True, False])
def test_endings_are_called_once_also_when_they_come_late(state: LeaseState, early: bool) -> None:
    called: list[int] = []
    if early:
        state.at_end(lambda: called.append(1))
    state.lose(Reason.FORCED)
    state.let_go()
    if not early:
        state.at_end(lambda: called.append(1))
    assert called == [1]


def test_finalizer_in_the_middle_of_a_loss_does_not_deadlock(state: LeaseState, now: Clock) -> None:
    """A collection may run while the state's own lock is held, and collect the lease, whose end reads the state."""
    now.now += 20
    with state._lock:
        assert state.lost() is not None


def test_failing_callback_does_not_keep_the_next_from_running(state: LeaseState) -> None:
    called: list[int] = []
    state.at_end(lambda: 1 / 0)
    state.at_end(lambda: called.append(1))
    state.lose(Reason.FORCED)
    assert called == [1]


def test_callback_at_the_end_can_be_cancelled(state: LeaseState) -> None:
    called: list[int] = []
    state.at_end(lambda: called.append(1))()
    state.lose(Reason.FORCED)
    assert called == []
    assert state._endings == []


def test_lease_released_in_a_user_transaction_is_not_trusted(state: LeaseState, now: Clock) -> None:
    with state.leaving():
        assert state.being_left
    assert not state.being_left
    assert state.remaining() == 0
    now.now += 20
    assert state.lost() is None, "it was released"
    assert state.over


def test_forgotten_lease_is_released_also_where_warnings_are_errors(state: LeaseState) -> None:
    class Lease:
        pass

    lease = Lease()
    abandoned: list[LeaseState] = []
    state.release_if_forgotten(lease, abandoned.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            del lease
        finally:
            sys.unraisablehook = hook
    assert abandoned == [state]


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no such clock")
def test_clock_runs_on_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {time.CLOCK_BOOTTIME: 4242.0}
    monkeypatch.setattr(time, "clock_gettime", clocks.__getitem__)
    assert clock.now() == 4242.0
