"""The renewal schedule, driven by hand: no database, no thread, and a clock that only the test moves."""

from __future__ import annotations

import math
from typing import Any

import pytest

import dblock
from dblock._core.acquire import TRUST, LockFlows
from dblock._core.lease_state import LeaseState, Reason
from dblock._core.renewal import RenewalSchedule
from dblock._core.replies import Grant, items


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Played:
    """A renewal schedule, and leases for it."""

    def __init__(self) -> None:
        self.now = Clock()
        self.schedule = RenewalSchedule(LockFlows("dblock", "me", self.now), self.now)

    def state(self, name: str, ttl: float = 30, **options: Any) -> LeaseState:
        now = self.now.now
        state = LeaseState(Grant(name, 7, 0.0, now + ttl * TRUST, now), ttl, now=self.now, **options)
        self.schedule.add(state)
        return state

    def asked(self) -> tuple[Any, list[str]]:
        """Begin a renewal; return its flow and the names of its leases."""
        steps = self.schedule.renew_due()
        try:
            call: Any = next(steps)
        except StopIteration:
            return None, []
        return steps, [name.strip('"') for name in items(call.args[0])]

    def renew_due(self, missed: str | None = None, reasons: str | None = None) -> list[str]:
        """Renew once; return the names of the leases that were renewed."""
        steps, names = self.asked()
        if steps is not None:
            with pytest.raises(StopIteration):
                steps.send(("0", missed, reasons))
        return names


@pytest.fixture
def played() -> Played:
    return Played()


def test_lease_is_due_three_times_per_ttl(played: Played) -> None:
    assert played.schedule.due_at() == math.inf
    played.state("a", 30)
    assert played.schedule.due_at() == 1010
    assert played.renew_due() == []
    played.now.now = 1010
    assert played.renew_due() == ["a"]
    assert played.schedule.due_at() == 1020


def test_leases_that_began_at_different_times_come_to_be_renewed_together(played: Played) -> None:
    """A renewal includes the leases that are due half an interval later. After two, one statement serves all."""
    for number in range(10):
        played.state(str(number), 30)
        played.now.now += 1
    assert played.renew_due() == ["0", "1", "2", "3", "4", "5"]
    played.now.now = played.schedule.due_at()
    assert played.renew_due() == ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
    played.now.now = played.schedule.due_at()
    assert len(played.renew_due()) == 10


def test_a_renewal_is_believed_from_before_it_was_sent(played: Played) -> None:
    state = played.state("a", 30)
    played.now.now = 1010
    steps, _ = played.asked()
    played.now.now = 1012
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
def test_lease_refused_by_the_database_is_lost_and_not_renewed_again(played: Played, why: str, reason: Reason) -> None:
    kept, gone = played.state("kept"), played.state("gone")
    played.now.now = 1010
    played.renew_due("{2}", f"{{{why}}}")
    assert kept.lost() is None
    loss = gone.lost()
    assert loss is not None
    assert loss.reason is reason
    played.now.now = 1020
    assert played.renew_due() == ["kept"]


def test_released_lease_is_neither_renewed_nor_lost(played: Played) -> None:
    state = played.state("a")
    played.now.now = 1010
    steps, _ = played.asked()
    state.let_go()
    with pytest.raises(StopIteration):
        steps.send(("0", "{1}", "{released}"))
    assert state.lost() is None
    played.now.now = 1020
    assert played.renew_due() == []


def test_a_release_in_the_users_transaction_that_was_committed_is_no_loss(played: Played) -> None:
    state = played.state("a")
    with state.leaving():
        pass
    played.now.now = 1010
    played.renew_due("{1}", "{released}")
    assert state.over
    assert state.settled
    assert state.lost() is None


def test_release_in_a_rolled_back_transaction_leaves_the_lease_alive(played: Played) -> None:
    state = played.state("a")
    with state.leaving():
        pass
    played.now.now = 1010
    assert played.renew_due("{1}", "{busy}") == ["a"]
    played.now.now = 1012
    assert played.renew_due() == ["a"]
    assert state.remaining() == pytest.approx(30 * TRUST)
    played.now.now = 1022
    played.renew_due("{1}", "{superseded}")
    assert state.lost() is not None, "a loss after the rollback is one"


def test_a_renewal_from_before_the_release_says_nothing_about_its_transaction(played: Played) -> None:
    state = played.state("a")
    played.now.now = 1010
    steps, _ = played.asked()
    played.now.now = 1011
    with state.leaving():
        pass
    with pytest.raises(StopIteration):
        steps.send(("0", None, None))
    played.now.now = 1020
    played.renew_due("{1}", "{released}")
    assert state.over
    assert state.lost() is None


def test_release_that_could_not_be_sent_does_not_excuse_a_loss(played: Played) -> None:
    state = played.state("a")
    with pytest.raises(KeyError), state.leaving():
        raise KeyError
    played.now.now = 1010
    played.renew_due("{1}", "{superseded}")
    assert state.lost() is not None


def test_abandoned_lease_is_released_and_retried(played: Played) -> None:
    state = played.state("a")
    steps = played.schedule.release([state])
    next(steps)
    with pytest.raises(StopIteration):
        steps.throw(dblock.Unavailable("gone"))
    assert played.schedule.releasable([state]) == [state]
    steps = played.schedule.release([state])
    next(steps)
    with pytest.raises(StopIteration):
        steps.send((None,))
    assert played.schedule.releasable([state]) == []


def test_a_failed_renewal_is_tried_again_inside_the_trust_window(played: Played) -> None:
    state = played.state("a", 30)
    played.now.now = 1010
    steps, _ = played.asked()
    with pytest.raises(StopIteration):
        steps.throw(dblock.Unavailable("gone"))
    assert 1010 < played.schedule.due_at() <= 1011
    played.now.now = 1011
    assert played.renew_due() == ["a"]
    assert state.remaining() > 29


def test_lease_whose_renewals_fail_for_too_long_is_unreachable(played: Played) -> None:
    state = played.state("a", 30)
    for _ in range(100):
        played.now.now += 1
        steps, _ = played.asked()
        if steps is not None:
            with pytest.raises(StopIteration):
                steps.throw(dblock.Unavailable("gone"))
    loss = state.lost()
    assert loss is not None
    assert loss.reason is Reason.UNREACHABLE
    assert played.schedule.due_at() == math.inf


def test_reply_may_take_half_of_the_time_that_is_left(played: Played) -> None:
    played.state("a", 30)
    played.now.now = 1010
    steps = played.schedule.renew_due()
    call: Any = next(steps)
    assert call.within == pytest.approx((30 * TRUST - 10) / 2)
    assert 2 * call.giving_up <= call.within / 4


def answered_after(played: Played, seconds: float) -> None:
    """Renew, with a reply that takes this long."""
    steps, _ = played.asked()
    played.now.now += seconds
    with pytest.raises(StopIteration):
        steps.send(("0", None, None))


@pytest.mark.parametrize(("took", "within"), [(1, 9.7), (4.8, 9.7), (6, 12), (9.8, 19.4)])
def test_renewal_may_take_twice_as_long_as_the_last_reply(played: Played, took: float, within: float) -> None:
    played.state("a", 30)
    played.now.now = 1010
    answered_after(played, took)
    played.now.now = 1020
    call: Any = next(played.schedule.renew_due())
    assert call.within == pytest.approx(within)


def test_lease_too_late_for_a_reply_does_not_shorten_the_others_timeout(played: Played) -> None:
    played.state("long", 30)
    played.now.now = 1012
    answered_after(played, 4)
    played.state("short", 5)
    played.now.now = 1020
    call: Any = next(played.schedule.renew_due())
    assert call.args[0] == '{"long","short"}'
    assert call.within == pytest.approx((30 * TRUST - 8) / 2)


def test_reply_of_long_ago_does_not_count(played: Played) -> None:
    """That reply was slow, but it came before the short lease was granted. Time for a retry is worth more now."""
    played.state("long", 60)
    played.now.now = 1020
    answered_after(played, 3)
    played.now.now = 1032
    played.state("short", 3)
    played.now.now = 1033
    call: Any = next(played.schedule.renew_due())
    assert call.args[0] == '{"long","short"}'
    assert call.within == pytest.approx((3 * TRUST - 1) / 2)


def test_give_back_leaves_time_to_renew_held_leases(played: Played) -> None:
    """A release has until the next renewal is due, or twice as long as the last reply took. It may have to wait."""
    abandoned = played.state("abandoned")
    played.state("held", 3)
    played.now.now = 1000.2
    call: Any = next(played.schedule.release([abandoned]))
    assert call.within == pytest.approx(0.8)
    assert call.giving_up == pytest.approx(0.1)
    played.now.now = 1001
    answered_after(played, 0.5)
    call = next(played.schedule.release([abandoned]))
    assert call.within == pytest.approx(1.0)
    played.now.now = 1002.5
    with pytest.raises(StopIteration):
        next(played.schedule.release([abandoned]))
    assert played.schedule.releasable([abandoned]) == [abandoned]


def test_give_back_has_time_to_cancel_when_nothing_is_due_soon(played: Played) -> None:
    """A call that is not cancelled may stay with the server for as long as the table is locked."""
    abandoned = played.state("abandoned")
    call: Any = next(played.schedule.release([abandoned]))
    assert (call.within, call.giving_up) == (2, 2)
    played.state("held", 30)
    call = next(played.schedule.release([abandoned]))
    assert (call.within, call.giving_up) == (2, 2)


def test_due_leases_are_renewed_before_abandoned_ones_are_given_back(played: Played) -> None:
    """If replies are slow, a release must not take the connection from a renewal."""
    played.state("held")
    abandoned = played.state("abandoned")
    played.schedule.discard(abandoned)
    played.now.now = 1010
    steps = played.schedule.tick([abandoned])
    first: Any = next(steps)
    assert first.args[:1] == ('{"held"}',)
    second: Any = steps.send(("0", None, None))
    assert second.args == ('{"abandoned"}', '{"7"}')
    with pytest.raises(StopIteration) as done:
        steps.send((None,))
    assert done.value.value == []


def test_last_round_gives_leases_back_before_anything_else(played: Played) -> None:
    """Neither expired leases nor leases that were about to be tied to a presence come first."""
    played.state("run out", 3)
    played.now.now = 1005
    played.state("held")
    played.schedule.tie()
    abandoned = played.state("abandoned")
    played.schedule.discard(abandoned)
    call: Any = next(played.schedule.let_go([abandoned]))
    assert call.args[0] == '{"held","abandoned"}'
    assert call.within == 2
    assert played.schedule.due_at() == math.inf


def test_give_back_of_a_late_renewal_leaves_time_to_renew_held_leases(played: Played) -> None:
    held, late = played.state("held", 12), played.state("late", 6)
    played.now.now = 1004
    steps, names = played.asked()
    assert names == ["held", "late"]
    played.now.now = 1006
    call: Any = steps.send(("0", None, None))
    assert b"release_all" in call.sql
    assert call.args == ('{"late"}', '{"7"}')
    assert call.within == 2
    assert late.lost() is not None
    held._sent_at -= 1
    played.state("late", 3)
    played.now.now = 1008
    steps, names = played.asked()
    assert names == ["held", "late"]
    played.now.now = 1011
    with pytest.raises(StopIteration):
        steps.send(("0", None, None))


def test_a_renewal_that_comes_when_the_lease_is_lost_is_given_back(played: Played) -> None:
    """The lease has reported its loss, and waiters should not have to wait for a whole ttl."""
    state = played.state("a", 30)
    played.now.now = 1010
    steps, _ = played.asked()
    played.now.now = 1029.5
    call = steps.send(("0", None, None))
    assert b"release" in call.sql
    assert call.args == ('{"a"}', '{"7"}')
    assert state.lost() is not None
    with pytest.raises(StopIteration):
        steps.throw(dblock.Unavailable("gone"))  # then the lease expires


def test_lease_without_keep_alive_is_never_due(played: Played) -> None:
    played.state("a", keep_alive=False)
    assert played.schedule.due_at() == math.inf
    played.now.now = 1020
    assert played.renew_due() == []
    assert [state.name for state in played.schedule.held()] == ["a"]


def test_shorter_ttl_does_not_renew_without_pause(played: Played) -> None:
    """The deadline does not move, but the renewal still counts."""
    state = played.state("a", 3000)
    state.renewal_confirmed(1001, 1001 + 1, 0)
    state.change_ttl(1)
    played.now.now = 1001.4
    assert played.renew_due() == ["a"]
    assert played.schedule.due_at() > 1001.7


def test_leases_with_little_time_left_do_not_take_the_others_along(played: Played) -> None:
    """The database takes longer than the short lease can wait. The long lease can, and is renewed alone."""
    played.state("long", 30)
    played.now.now = 1010
    played.state("short", 0.4)
    played.now.now = 1010.2
    steps, names = played.asked()
    assert names == ["long", "short"]
    played.now.now = 1010.3
    with pytest.raises(StopIteration):
        steps.throw(dblock.Unavailable("too slow"))
    played.now.now = 1011.3
    steps = played.schedule.renew_due()
    call: Any = next(steps)
    assert call.args[0] == '{"long"}'
    assert call.within > 5


def test_lease_left_out_of_a_renewal_is_unreachable_too(played: Played) -> None:
    """The slow database is the reason of its loss."""
    played.state("long", 30)
    played.now.now = 1010
    steps, _ = played.asked()
    played.now.now = 1015
    with pytest.raises(StopIteration):
        steps.throw(dblock.Unavailable("too slow"))
    short = played.state("short", 3)
    short.reply_received()
    played.now.now = 1016.1
    assert played.asked()[1] == ["long"]
    played.now.now = 1018
    loss = short.lost()
    assert loss is not None
    assert loss.reason is Reason.UNREACHABLE


def test_release_of_a_row_in_use_is_retried(played: Played) -> None:
    free, busy = played.state("free"), played.state("busy")
    steps = played.schedule.release([free, busy])
    next(steps)
    with pytest.raises(StopIteration):
        steps.send(("{2}",))
    assert played.schedule.releasable([free, busy]) == [busy]
