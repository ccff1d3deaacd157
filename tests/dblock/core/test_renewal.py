"""The renewal schedule of the keep-alive, driven by hand: no database, no thread, and a clock that the test moves."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

import dblock
from dblock._core.acquire import TRUST, LockFlows
from dblock._core.lease_state import LeaseState, Reason
from dblock._core.presence import Presence, SocketState
from dblock._core.renewal import RenewalSchedule
from dblock._core.replies import Grant, items
from dblock._core.timings import Timings


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Driver:
    """Drives a renewal schedule by hand, with a clock of its own."""

    def __init__(self) -> None:
        self.now = Clock()
        self.flows = LockFlows("dblock", "me", self.now, timings=Timings())
        self.schedule = RenewalSchedule(self.flows, self.now)

    def state(self, name: str, ttl: float = 30, presence: Presence | None = None, **options: Any) -> LeaseState:
        now = self.now.now
        state = LeaseState(Grant(name, 7, 0.0, now + ttl * TRUST, now, presence), ttl, now=self.now, **options)
        self.schedule.add(state)
        return state

    def presence(self, name: str = "there") -> Presence:
        """Return a new presence, which is the client's from now on."""
        presence = self.flows.presence = Presence(name, 5, lambda: SocketState.OPEN, self.now.now)
        self.schedule.tie()
        return presence

    def begin_renewal(self) -> tuple[Any, list[str]]:
        """Begin a renewal, and return its steps and the names of the locks that it renews."""
        steps = self.schedule.renew_due()
        try:
            call: Any = next(steps)
        except StopIteration:
            return None, []
        return steps, [name.strip('"') for name in items(call.args[0])]

    def renew_due(self, missed: str | None = None, reasons: str | None = None) -> list[str]:
        """Renew the due leases once, and return the names of their locks."""
        steps, names = self.begin_renewal()
        if steps is not None:
            with pytest.raises(StopIteration):
                steps.send(("0", missed, reasons))
        return names


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_lease_is_renewed_three_times_per_ttl(driver: Driver) -> None:
    assert driver.schedule.due_at() == math.inf
    driver.state("a", 30)
    assert driver.schedule.due_at() == 1010
    assert driver.renew_due() == []
    driver.now.now = 1010
    assert driver.renew_due() == ["a"]
    assert driver.schedule.due_at() == 1020


def test_leases_of_different_age_come_to_be_renewed_together(driver: Driver) -> None:
    """A renewal includes leases that are due within half an interval, so the second renewal takes one statement."""
    for number in range(10):
        driver.state(str(number), 30)
        driver.now.now += 1
    assert driver.renew_due() == ["0", "1", "2", "3", "4", "5"]
    driver.now.now = driver.schedule.due_at()
    assert driver.renew_due() == ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
    driver.now.now = driver.schedule.due_at()
    assert len(driver.renew_due()) == 10


def test_trust_window_of_a_renewal_counts_from_before_its_request(driver: Driver) -> None:
    state = driver.state("a", 30)
    driver.now.now = 1010
    steps, _ = driver.begin_renewal()
    driver.now.now = 1012
    with pytest.raises(StopIteration):
        steps.send(("500.0", None, None))
    assert state.trusted_until == 1010 + 30 * TRUST
    assert state.expires_at == 530.0


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ("expired", Reason.EXPIRED),
        ("superseded", Reason.SUPERSEDED),
        ("released", Reason.FORCED),
        ("forced", Reason.FORCED),
    ],
)
def test_lease_refused_by_the_database_is_lost_and_not_renewed_again(driver: Driver, why: str, reason: Reason) -> None:
    kept, gone = driver.state("kept"), driver.state("gone")
    driver.now.now = 1010
    driver.renew_due("{2}", f"{{{why}}}")
    assert kept.lost() is None
    loss = gone.lost()
    assert loss is not None
    assert loss.reason is reason
    driver.now.now = 1020
    assert driver.renew_due() == ["kept"]


def test_released_lease_is_neither_renewed_nor_lost(driver: Driver) -> None:
    state = driver.state("a")
    driver.now.now = 1010
    steps, _ = driver.begin_renewal()
    state.let_go()
    with pytest.raises(StopIteration):
        steps.send(("0", "{1}", "{released}"))
    assert state.lost() is None
    driver.now.now = 1020
    assert driver.renew_due() == []


def test_committed_release_in_a_user_transaction_is_no_loss(driver: Driver) -> None:
    state = driver.state("a")
    with state.leaving():
        pass
    driver.now.now = 1010
    driver.renew_due("{1}", "{released}")
    assert state.over
    assert state.settled
    assert state.lost() is None


def test_release_in_a_rolled_back_transaction_leaves_the_lease_alive(driver: Driver) -> None:
    state = driver.state("a")
    with state.leaving():
        pass
    driver.now.now = 1010
    assert driver.renew_due("{1}", "{busy}") == ["a"]
    driver.now.now = 1012
    assert driver.renew_due() == ["a"]
    assert state.remaining() == pytest.approx(30 * TRUST)
    driver.now.now = 1022
    driver.renew_due("{1}", "{superseded}")
    assert state.lost() is not None, "a loss after the rollback counts as a loss"


def test_renewal_sent_before_the_release_does_not_show_a_rollback(driver: Driver) -> None:
    state = driver.state("a")
    driver.now.now = 1010
    steps, _ = driver.begin_renewal()
    driver.now.now = 1011
    with state.leaving():
        pass
    with pytest.raises(StopIteration):
        steps.send(("0", None, None))
    driver.now.now = 1020
    driver.renew_due("{1}", "{released}")
    assert state.over
    assert state.lost() is None


def test_loss_after_a_release_that_could_not_be_sent_is_a_loss(driver: Driver) -> None:
    state = driver.state("a")
    with pytest.raises(KeyError), state.leaving():
        raise KeyError
    driver.now.now = 1010
    driver.renew_due("{1}", "{superseded}")
    assert state.lost() is not None


def test_abandoned_lease_is_released_and_retried(driver: Driver) -> None:
    state = driver.state("a")
    steps = driver.schedule.release([state])
    next(steps)
    with pytest.raises(StopIteration):
        steps.throw(dblock.Unavailable("gone"))
    assert driver.schedule.releasable([state]) == [state]
    steps = driver.schedule.release([state])
    next(steps)
    with pytest.raises(StopIteration):
        steps.send((None,))
    assert driver.schedule.releasable([state]) == []


def test_failed_renewal_is_retried_within_the_trust_window(driver: Driver) -> None:
    state = driver.state("a", 30)
    driver.now.now = 1010
    steps, _ = driver.begin_renewal()
    with pytest.raises(StopIteration):
        steps.throw(dblock.Unavailable("gone"))
    assert 1010 < driver.schedule.due_at() <= 1011
    driver.now.now = 1011
    assert driver.renew_due() == ["a"]
    assert state.remaining() > 29


def test_lease_whose_renewals_fail_for_too_long_is_unreachable(driver: Driver) -> None:
    state = driver.state("a", 30)
    for _ in range(100):
        driver.now.now += 1
        steps, _ = driver.begin_renewal()
        if steps is not None:
            with pytest.raises(StopIteration):
                steps.throw(dblock.Unavailable("gone"))
    loss = state.lost()
    assert loss is not None
    assert loss.reason is Reason.UNREACHABLE
    assert driver.schedule.due_at() == math.inf


def test_reply_may_take_half_of_the_remaining_time(driver: Driver) -> None:
    driver.state("a", 30)
    driver.now.now = 1010
    steps = driver.schedule.renew_due()
    call: Any = next(steps)
    assert call.within == pytest.approx((30 * TRUST - 10) / 2)
    assert 2 * call.giving_up <= call.within / 4


def renew_with_slow_reply(driver: Driver, seconds: float) -> None:
    """Renew the due leases with a reply that takes this many seconds."""
    steps, _ = driver.begin_renewal()
    driver.now.now += seconds
    with pytest.raises(StopIteration):
        steps.send(("0", None, None))


@pytest.mark.parametrize(("took", "within"), [(1, 9.7), (4.8, 9.7), (6, 12), (9.8, 19.4)])
def test_renewal_may_take_twice_as_long_as_the_last_reply(driver: Driver, took: float, within: float) -> None:
    driver.state("a", 30)
    driver.now.now = 1010
    renew_with_slow_reply(driver, took)
    driver.now.now = 1020
    call: Any = next(driver.schedule.renew_due())
    assert call.within == pytest.approx(within)


def test_lease_too_late_for_a_reply_does_not_shorten_the_others_timeout(driver: Driver) -> None:
    driver.state("long", 30)
    driver.now.now = 1012
    renew_with_slow_reply(driver, 4)
    driver.state("short", 5)
    driver.now.now = 1020
    call: Any = next(driver.schedule.renew_due())
    assert call.args[0] == '{"long","short"}'
    assert call.within == pytest.approx((30 * TRUST - 8) / 2)


def test_slow_reply_of_long_ago_does_not_count(driver: Driver) -> None:
    """The slow reply came before the short lease was acquired. A second try is worth more to the short lease now."""
    driver.state("long", 60)
    driver.now.now = 1020
    renew_with_slow_reply(driver, 3)
    driver.now.now = 1032
    driver.state("short", 3)
    driver.now.now = 1033
    call: Any = next(driver.schedule.renew_due())
    assert call.args[0] == '{"long","short"}'
    assert call.within == pytest.approx((3 * TRUST - 1) / 2)


def test_give_back_leaves_time_to_renew_held_leases(driver: Driver) -> None:
    """A release may take until the next renewal is due, or after slow replies twice as long as the last reply.

    If too little time is left for it, the release is not sent at all.
    """
    abandoned = driver.state("abandoned")
    driver.state("held", 3)
    driver.now.now = 1000.2
    call: Any = next(driver.schedule.release([abandoned]))
    assert call.within == pytest.approx(0.8)
    assert call.giving_up == pytest.approx(0.1)
    driver.now.now = 1001
    renew_with_slow_reply(driver, 0.5)
    call = next(driver.schedule.release([abandoned]))
    assert call.within == pytest.approx(1.0)
    driver.now.now = 1002.5
    with pytest.raises(StopIteration):
        next(driver.schedule.release([abandoned]))
    assert driver.schedule.releasable([abandoned]) == [abandoned]


def test_give_back_has_time_to_cancel_when_nothing_is_due_soon(driver: Driver) -> None:
    """A try that is not cancelled may stay on the server for as long as another session locks the table."""
    abandoned = driver.state("abandoned")
    call: Any = next(driver.schedule.release([abandoned]))
    assert (call.within, call.giving_up) == (2, 2)
    driver.state("held", 30)
    call = next(driver.schedule.release([abandoned]))
    assert (call.within, call.giving_up) == (2, 2)


def test_due_leases_are_renewed_before_abandoned_ones_are_given_back(driver: Driver) -> None:
    """When replies are slow, a release must not cost the renewal its connection."""
    driver.state("held")
    abandoned = driver.state("abandoned")
    driver.schedule.discard(abandoned)
    driver.now.now = 1010
    steps = driver.schedule.tick([abandoned])
    first: Any = next(steps)
    assert first.args[:1] == ('{"held"}',)
    second: Any = steps.send(("0", None, None))
    assert second.args == ('{"abandoned"}', '{"7"}')
    with pytest.raises(StopIteration) as done:
        steps.send((None,))
    assert done.value.value == []


def test_last_round_gives_leases_back_before_anything_else(driver: Driver) -> None:
    """Expired leases are not released, and leases are not tied to a presence first."""
    driver.state("expired", 3)
    driver.now.now = 1005
    driver.state("held")
    driver.schedule.tie()
    abandoned = driver.state("abandoned")
    driver.schedule.discard(abandoned)
    call: Any = next(driver.schedule.let_go([abandoned]))
    assert call.args[0] == '{"held","abandoned"}'
    assert call.within == 2
    assert driver.schedule.due_at() == math.inf


def test_leases_are_tied_to_a_new_presence_at_once(driver: Driver) -> None:
    before, unkept = driver.state("before"), driver.state("unkept", keep_alive=False)
    presence = driver.presence()
    assert driver.schedule.due_at() == -math.inf
    assert driver.renew_due() == ["before"]
    assert (before.presence, unkept.presence) == (presence, None)
    assert driver.schedule.due_at() == 1010


def test_lease_that_was_requested_before_the_presence_is_tied_to_it_at_once(driver: Driver) -> None:
    """The reply comes after the other leases have been tied."""
    presence = driver.presence()
    driver.renew_due()
    driver.state("tied", presence=presence)
    assert driver.schedule.due_at() == 1010
    late = driver.state("late", 600)
    assert driver.schedule.due_at() == -math.inf
    assert driver.renew_due() == ["late"]
    assert late.presence is presence
    assert driver.schedule.due_at() == 1010


@pytest.mark.parametrize("missed", [True, False], ids=["the row is locked", "no reply"])
def test_lease_that_could_not_be_tied_is_tied_soon(driver: Driver, missed: bool) -> None:
    driver.presence()
    driver.state("a", 600)
    if missed:
        assert driver.renew_due("{1}", "{busy}") == ["a"]
    else:
        steps, _ = driver.begin_renewal()
        with pytest.raises(StopIteration):
            steps.throw(dblock.Unavailable("no reply"))
    assert driver.schedule.due_at() == 1001
    assert driver.renew_due() == []
    driver.now.now = 1001
    assert driver.renew_due() == ["a"]
    assert driver.schedule.due_at() == 1201


def test_lease_is_not_renewed_early_while_the_presence_is_in_doubt(driver: Driver) -> None:
    presence = driver.presence()
    driver.renew_due()
    driver.state("tied", presence=presence)
    presence.stands = lambda now: False  # type: ignore[method-assign]
    untied = driver.state("untied")
    assert driver.renew_due() == []
    assert untied.presence is None
    assert driver.schedule.due_at() == 1001
    driver.now.now = 1001
    assert driver.renew_due() == []
    del presence.stands
    driver.now.now = 1002
    assert driver.renew_due() == ["untied"]
    assert untied.presence is presence
    assert driver.schedule.due_at() == 1010


def test_lease_is_tied_to_a_new_presence_once_the_last_one_has_ended(driver: Driver) -> None:
    last = driver.presence()
    state = driver.state("a", 600, last)
    new = driver.presence("new")
    assert driver.renew_due() == []
    assert state.presence is last
    last.end()
    driver.now.now = driver.schedule.due_at()
    assert driver.now.now == 1001
    assert driver.renew_due() == ["a"]
    assert state.presence is new


def test_nothing_is_due_early_without_a_presence(driver: Driver) -> None:
    driver.state("a")
    driver.presence().end()
    driver.flows.presence = None
    assert driver.renew_due() == []
    assert driver.schedule.due_at() == 1010


def test_give_back_of_a_late_renewal_leaves_time_to_renew_held_leases(driver: Driver) -> None:
    held, late = driver.state("held", 12), driver.state("late", 6)
    driver.now.now = 1004
    steps, names = driver.begin_renewal()
    assert names == ["held", "late"]
    driver.now.now = 1006
    call: Any = steps.send(("0", None, None))
    assert b"release_all" in call.sql
    assert call.args == ('{"late"}', '{"7"}')
    assert call.within == 2
    assert late.lost() is not None
    held.sent_at -= 1
    driver.state("late", 3)
    driver.now.now = 1008
    steps, names = driver.begin_renewal()
    assert names == ["held", "late"]
    driver.now.now = 1011
    with pytest.raises(StopIteration):
        steps.send(("0", None, None))


def test_renewal_confirmed_after_the_loss_is_given_back(driver: Driver) -> None:
    """The holder knows of the loss, and waiters should not have to wait for a whole ttl."""
    state = driver.state("a", 30)
    driver.now.now = 1010
    steps, _ = driver.begin_renewal()
    driver.now.now = 1029.5
    call = steps.send(("0", None, None))
    assert b"release" in call.sql
    assert call.args == ('{"a"}', '{"7"}')
    assert state.lost() is not None
    with pytest.raises(StopIteration):
        steps.throw(dblock.Unavailable("gone"))  # then the lease expires by itself


def test_lease_without_keep_alive_is_never_due(driver: Driver) -> None:
    driver.state("a", keep_alive=False)
    assert driver.schedule.due_at() == math.inf
    driver.now.now = 1020
    assert driver.renew_due() == []
    assert [state.name for state in driver.schedule.held()] == ["a"]


def test_shorter_ttl_does_not_make_renewals_spin(driver: Driver) -> None:
    """The deadline does not move, but the renewal still counts."""
    state = driver.state("a", 3000)
    state.renewal_confirmed(1001, 1001 + 1, 0)
    state.change_ttl(1)
    driver.now.now = 1001.4
    assert driver.renew_due() == ["a"]
    assert driver.schedule.due_at() > 1001.7


def test_lease_with_little_time_left_does_not_cost_the_others_theirs(driver: Driver) -> None:
    """The database takes longer than the short lease can wait. The long lease is then renewed alone, and can wait."""
    driver.state("long", 30)
    driver.now.now = 1010
    driver.state("short", 0.4)
    driver.now.now = 1010.2
    steps, names = driver.begin_renewal()
    assert names == ["long", "short"]
    driver.now.now = 1010.3
    with pytest.raises(StopIteration):
        steps.throw(dblock.Unavailable("too slow"))
    driver.now.now = 1011.3
    steps = driver.schedule.renew_due()
    call: Any = next(steps)
    assert call.args[0] == '{"long"}'
    assert call.within > 5


def test_lease_left_out_of_a_renewal_is_unreachable_too(driver: Driver) -> None:
    """The lease is lost because the database is slow."""
    driver.state("long", 30)
    driver.now.now = 1010
    steps, _ = driver.begin_renewal()
    driver.now.now = 1015
    with pytest.raises(StopIteration):
        steps.throw(dblock.Unavailable("too slow"))
    short = driver.state("short", 3)
    short.reply_received()
    driver.now.now = 1016.1
    assert driver.begin_renewal()[1] == ["long"]
    driver.now.now = 1018
    loss = short.lost()
    assert loss is not None
    assert loss.reason is Reason.UNREACHABLE


def test_release_blocked_by_another_transaction_is_retried(driver: Driver) -> None:
    free, busy = driver.state("free"), driver.state("busy")
    steps = driver.schedule.release([free, busy])
    next(steps)
    with pytest.raises(StopIteration):
        steps.send(("{2}",))
    assert driver.schedule.releasable([free, busy]) == [busy]


def test_outage_is_logged_once_and_its_end_once(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dblock")
    states = [driver.state("a", 300)]
    dropped = [driver.state("b", 300, keep_alive=False)]
    driver.now.now = 1100
    for _ in range(50):
        steps, names = driver.begin_renewal()
        assert names == ["a"]
        with pytest.raises(StopIteration):
            steps.throw(dblock.Unavailable("gone"))
        steps = driver.schedule.release(dropped)
        next(steps)
        with pytest.raises(StopIteration):
            steps.throw(dblock.Unavailable("gone"))
        driver.now.now += 1.1
    assert len(caplog.messages) == 2, caplog.messages
    assert driver.renew_due() == ["a"]
    steps = driver.schedule.release(dropped)
    next(steps)
    with pytest.raises(StopIteration):
        steps.send((None,))
    assert len(caplog.messages) == 4, caplog.messages
    assert "again" in caplog.messages[2]
    assert states[0].remaining()


def test_latest_lease_of_a_lock_is_found_until_it_is_discarded(driver: Driver) -> None:
    older, newer, other = driver.state("a"), driver.state("a"), driver.state("b")
    assert driver.schedule.latest("a") is newer
    driver.schedule.discard(older)
    assert driver.schedule.latest("a") is newer, "the end of an older lease hides no newer one"
    driver.schedule.discard(newer)
    assert driver.schedule.latest("a") is None
    assert driver.schedule.latest("b") is other
    driver.schedule.forget()
    assert driver.schedule.latest("b") is None
