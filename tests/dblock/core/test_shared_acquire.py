"""The flows of read-write locks and semaphores, driven by hand: no database, a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest

from dblock._core.acquire import TRUST
from dblock._core.effects import Call, Sleep
from dblock._core.lease_state import LeaseState, Status
from dblock._core.options import lock_options
from dblock._core.replies import Grant, new_attempt
from dblock._core.shared_acquire import (
    SharedFlows,
    SharedOptions,
    is_reader,
    read_write_options,
    semaphore_options,
)
from dblock.errors import DatabaseError, InvalidArgument, Unavailable
from tests.dblock.core.test_acquire import Clock, finish

GRANTED = ("t", "7", "1000.5", "30", None, "f", "f", None, "a#1")
NOT_GRANTED = ("f", None, "1000.5", "12.5", None, "f", "f", "f", None)
LOCKED = ("f", None, None, "0", None, "f", "f", None, None)
LOCKED_AGAIN = ("f", None, None, "0", None, "f", "f", "undecided", None)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def flows(clock: Clock) -> SharedFlows:
    return SharedFlows("dblock", "me", clock, lambda low, high: high)


@pytest.fixture
def options() -> SharedOptions:
    return semaphore_options(2, "a", 30, None, None, True)


def test_plain_lock_is_asked_for_as_before(flows: SharedFlows) -> None:
    call: Any = next(flows.try_acquire(lock_options("a", 30, None, None), new_attempt()))
    assert b".try_acquire(" in call.sql


def test_grant_has_the_name_of_its_share_and_of_its_lock(
    flows: SharedFlows, options: SharedOptions, clock: Clock
) -> None:
    steps = flows.try_acquire(options, "attempt")
    call: Any = next(steps)
    assert call.args == (
        "a", "semaphore", None, "2", "30.000000 s", "me", None, "attempt", None, None, "f", "t"
    )  # fmt: skip
    clock.now += 10
    grant = finish(steps, GRANTED)
    assert (grant.name, grant.lock, grant.token) == ("a#1", "a", 7)
    assert grant.trusted_until == pytest.approx(100 + 30 * TRUST)


def test_try_asks_again_only_while_another_transaction_has_locked_the_row(
    flows: SharedFlows, options: SharedOptions
) -> None:
    steps = flows.try_acquire(options, "attempt")
    next(steps)
    assert isinstance(steps.send(LOCKED), Sleep)
    assert isinstance(steps.send(None), Call)
    assert finish(steps, NOT_GRANTED) is None


def test_late_grant_is_given_back_by_the_name_of_its_share(
    flows: SharedFlows, options: SharedOptions, clock: Clock
) -> None:
    steps = flows.try_acquire(options, "attempt")
    next(steps)
    clock.now += 29.5
    released: Any = steps.send(GRANTED)
    assert b".release(" in released.sql
    assert released.args == ("a#1", "7")


def test_waiter_says_how_many_permits_and_that_it_had_a_ticket(flows: SharedFlows, options: SharedOptions) -> None:
    """A failover may have lost the semaphore, which this request then creates again."""
    asked: Any = next(flows._enqueue(options, "attempt", 5, had_ticket=False))
    again: Any = next(flows._enqueue(options, "attempt", 5, had_ticket=True))
    redeemed: Any = next(flows._try(options, "attempt", 5, ticket=3))
    assert [call.args[3] for call in (asked, again, redeemed)] == ["2", "2", "2"]
    assert [call.args[10] for call in (asked, again, redeemed)] == ["f", "t", "t"]
    assert [call.args[8] for call in (asked, again, redeemed)] == [flows.client] * 3


def test_retry_that_is_not_decided_is_sent_until_it_is(flows: SharedFlows, options: SharedOptions) -> None:
    """The first request may be what has locked the row, and its grant is then found."""
    steps = flows.try_acquire(options, "attempt")
    call: Any = next(steps)
    assert call.again == flows.statements.acquire_shared_again
    for _ in range(10):
        assert isinstance(steps.send(LOCKED_AGAIN), Sleep)
        assert steps.send(None).sql == flows.statements.acquire_shared_again
    assert finish(steps, GRANTED).token == 7


def test_retry_that_is_never_decided_may_have_been_granted(
    flows: SharedFlows, options: SharedOptions, clock: Clock
) -> None:
    steps = flows.try_acquire(options, "attempt")
    next(steps)
    clock.now += flows.timings.give_up_within + 1
    with pytest.raises(Unavailable) as caught:
        steps.send(LOCKED_AGAIN)
    assert caught.value.may_be_done, "so that the caller gives the grant back"


@pytest.fixture
def writer(clock: Clock) -> LeaseState:
    return LeaseState(Grant("a#writer", 7, 1000.5, 130.0, 100.0, lock="a"), 30, now=clock)


def test_downgraded_lease_is_over_and_its_readers_are_woken(flows: SharedFlows, writer: LeaseState) -> None:
    steps = flows.downgrade(writer, "attempt")
    call: Any = next(steps)
    assert call.args == ("a", "7", "attempt", "30.000000 s", None)
    assert writer.remaining() == 0, "it is not believed while the request is under way"
    woken: Any = steps.send(("t", "8", "1001", "30", "a#reader-0"))
    assert (b"wake_queue" in woken.sql, woken.args) == (True, ("a",))
    grant = finish(steps, ("",))
    assert (grant.name, grant.lock, grant.token) == ("a#reader-0", "a", 8)
    assert writer.status is Status.RELEASED


def test_keep_alive_does_not_take_a_downgraded_lease_for_lost(flows: SharedFlows, writer: LeaseState) -> None:
    """Its renewal is refused when the database has downgraded it and the reply is on its way."""
    steps = flows.downgrade(writer, "attempt")
    next(steps)
    assert writer.being_left
    writer.renewal_refused("released")
    steps.send(("t", "8", "1001", "30", "a#reader-0"))
    assert writer.loss is None


def test_downgrade_that_finds_the_lease_proved_leaves_it_held(
    flows: SharedFlows, writer: LeaseState, clock: Clock
) -> None:
    steps = flows.downgrade(writer, "attempt")
    next(steps)
    undecided = (None, None, None, None, None)
    assert isinstance(steps.send(undecided), Sleep)
    steps.send(None)
    clock.now += flows.timings.give_up_within + 1
    with pytest.raises(DatabaseError, match="is still held: an open transaction has proved it"):
        steps.send(undecided)
    assert writer.remaining() > 0


def test_shares_are_told_apart_by_their_names(clock: Clock) -> None:
    def state(name: str, lock: str | None) -> LeaseState:
        return LeaseState(Grant(name, 7, 1000.5, 130.0, 100.0, lock=lock), 30, now=clock)

    assert is_reader(state("a#reader-0", "a"))
    assert not is_reader(state("a#writer", "a"))
    assert not is_reader(state("a#reader-0", None)), "a plain lock of that name"


def test_options_of_shared_locks_are_checked() -> None:
    assert read_write_options("read", "ü" * 240, 30, None, None, True).mode == "read"
    with pytest.raises(InvalidArgument, match="takes 1 to 480 bytes"):
        read_write_options("read", "ü" * 241, 30, None, None, True)
    with pytest.raises(InvalidArgument, match="keep_alive"):
        read_write_options("write", "a", 30, None, None, "yes")  # type: ignore[arg-type]
    assert semaphore_options(None, "a", 30, None, None, True, ["gpu:{permit}"]).claims == ("gpu:{permit}",)


def test_downgrade_that_may_be_under_way_is_never_taken_for_refused(
    flows: SharedFlows, writer: LeaseState, clock: Clock
) -> None:
    """The first request may be what has locked the row: its connection broke while it was committed."""
    steps = flows.downgrade(writer, "attempt")
    next(steps)
    assert isinstance(steps.send(("undecided", None, None, None, None)), Sleep)
    assert steps.send(None).sql == flows.statements.downgrade_again
    with pytest.raises(Unavailable) as raised:
        steps.throw(Unavailable("no connection could be opened"))
    assert raised.value.may_be_done
    assert (writer.remaining(), writer.status) == (0, Status.RELEASING)


def test_downgrade_that_is_not_decided_in_time_may_be_done(
    flows: SharedFlows, writer: LeaseState, clock: Clock
) -> None:
    steps = flows.downgrade(writer, "attempt")
    next(steps)
    steps.send(("undecided", None, None, None, None))
    steps.send(None)
    clock.now += flows.timings.give_up_within + 1
    with pytest.raises(DatabaseError, match="is given back") as raised:
        steps.send(("undecided", None, None, None, None))
    assert raised.value.may_be_done
    assert writer.remaining() == 0
