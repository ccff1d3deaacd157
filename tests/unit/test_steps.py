"""The steps, driven by hand: no database, and a clock that stands still until told."""

from __future__ import annotations

from typing import Any

import pytest

from dblock.steps import POLL_LONGEST, TRUST, Call, Service, Sleep, new_attempt
from dblock.terms import Terms, terms

GRANTED = ("t", "7", "1000.5", "30")
HELD = ("f", None, "1000.5", "12.5")


class Clock:
    """A clock that only a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(clock: Clock) -> Service:
    return Service("dblock", "me", clock, lambda low, high: high)


@pytest.fixture
def wanted() -> Terms:
    return terms("a", 30, None, {"why": "test"})


def finish(steps: Any, answer: Any) -> Any:
    with pytest.raises(StopIteration) as done:
        steps.send(answer)
    return done.value.value


def test_a_try_is_one_call_that_carries_all_it_needs(service: Service, wanted: Terms) -> None:
    steps = service.try_acquire(wanted, new_attempt())
    call = next(steps)
    assert isinstance(call, Call)
    assert call.sql.endswith(b'FROM "dblock".try_acquire($1, $2, $3, $4, $5, $6)')
    name, interval, holder, meta, attempt, durable = call.args
    assert (name, interval, holder, meta, durable) == ("a", "30.000000 s", "me", '{"why": "test"}', "t")
    assert attempt is not None
    assert len(attempt) == 32
    assert call.again is not None
    assert b"sent_before => true" in call.again
    assert finish(steps, GRANTED).token == 7


def test_no_two_attempts_are_the_same() -> None:
    assert len({new_attempt() for _ in range(100)}) == 100


def test_the_trust_window_counts_from_before_the_request(service: Service, wanted: Terms, clock: Clock) -> None:
    steps = service.try_acquire(wanted, new_attempt())
    next(steps)
    clock.now += 10  # a slow reply
    assert finish(steps, GRANTED).trusted_until == pytest.approx(100 + 30 * TRUST)


def test_a_renewal_tells_when_it_was_sent_and_who_was_missed(service: Service, clock: Clock) -> None:
    clock.now = 200
    renewing = service.renew([("a", 7, 60), ('"b\\', -3, 0.5)], within=2)
    call: Any = next(renewing)
    assert call.args == ('{"a","\\"b\\\\"}', '{"7","-3"}', '{"60.000000 s","0.500000 s"}')
    assert call.within == 2
    clock.now += 10
    renewal = finish(renewing, ("1000.5", "{2}", "{busy}"))
    assert renewal == (200, 1000.5, {1: "busy"})


def test_an_answer_that_comes_too_late_to_be_trusted_is_given_back(
    service: Service, wanted: Terms, clock: Clock
) -> None:
    steps = service.try_acquire(wanted, new_attempt())
    next(steps)
    clock.now += 29.5
    released = steps.send(GRANTED)
    assert isinstance(released, Call)
    assert b"release" in released.sql
    assert released.args == ("a", "7")
    assert finish(steps, ("t",)) is None


def test_acquire_asks_again_under_the_same_attempt(service: Service, wanted: Terms) -> None:
    steps = service.acquire(wanted, None, new_attempt())
    first: Any = next(steps)
    assert isinstance(steps.send(HELD), Sleep)
    second = steps.send(None)
    assert first == second
    assert finish(steps, GRANTED).token == 7


def test_acquire_sleeps_longer_each_time_up_to_a_bound(service: Service, wanted: Terms) -> None:
    steps = service.acquire(wanted, None, new_attempt())
    next(steps)
    slept = []
    for _ in range(20):
        sleep = steps.send(HELD)
        assert isinstance(sleep, Sleep)
        slept.append(sleep.seconds)
        steps.send(None)
    assert slept == sorted(slept)
    assert slept[-1] == POLL_LONGEST


def test_acquire_does_not_sleep_past_the_holders_deadline(service: Service, wanted: Terms) -> None:
    steps = service.acquire(wanted, None, new_attempt())
    next(steps)
    for _ in range(20):
        steps.send(HELD)
        steps.send(None)
    assert steps.send(("f", None, "1000.5", "0.05")) == Sleep(0.05)


def test_acquire_does_not_sleep_past_its_timeout(service: Service, wanted: Terms, clock: Clock) -> None:
    steps = service.acquire(wanted, 1.0, new_attempt())
    next(steps)
    clock.now += 0.996
    sleep = steps.send(HELD)
    assert isinstance(sleep, Sleep)
    assert sleep.seconds == pytest.approx(0.004)
    clock.now += 0.004
    steps.send(None)
    assert finish(steps, HELD) is None


def test_a_timeout_of_zero_asks_once(service: Service, wanted: Terms) -> None:
    steps = service.acquire(wanted, 0, new_attempt())
    next(steps)
    assert finish(steps, HELD) is None


def test_a_retry_that_finds_its_own_grant_trusts_only_what_is_left_of_it(
    service: Service, wanted: Terms, clock: Clock
) -> None:
    steps = service.try_acquire(wanted, new_attempt())
    next(steps)
    assert finish(steps, ("t", "7", "1000.5", "4")).trusted_until == pytest.approx(100 + 4 * TRUST)


def test_a_release_sent_again_that_frees_nothing_is_no_loss_while_the_lease_is_believed(
    service: Service, wanted: Terms, clock: Clock
) -> None:
    acquiring = service.try_acquire(wanted, new_attempt())
    next(acquiring)
    grant = finish(acquiring, GRANTED)
    for now, released in ((clock.now, True), (grant.trusted_until, False)):
        clock.now = now
        steps = service.release(grant.name, grant.token, grant.trusted_until)
        call: Any = next(steps)
        assert b"nullif" in call.again
        assert finish(steps, (None,)) is released


def test_a_try_looks_again_at_a_lock_that_is_neither_held_nor_to_be_had(service: Service, wanted: Terms) -> None:
    steps = service.try_acquire(wanted, new_attempt())
    first: Any = next(steps)
    assert isinstance(steps.send(("f", None, "-Infinity", "0")), Sleep)
    again: Any = next(steps)
    assert again.args == first.args, "another attempt would not find the grant of the first"
    assert finish(steps, GRANTED).token == 7


def test_a_try_does_not_look_for_ever(service: Service, wanted: Terms) -> None:
    steps = service.try_acquire(wanted, new_attempt())
    looks = 0
    with pytest.raises(StopIteration) as done:
        step = next(steps)
        while True:
            looks += isinstance(step, Call)
            step = steps.send(("f", None, "-Infinity", "0") if isinstance(step, Call) else None)
    assert done.value.value is None
    assert looks == 3


def test_waiting_is_spread_out(clock: Clock, wanted: Terms) -> None:
    asked: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        asked.append((low, high))
        return low

    steps = Service("dblock", "me", clock, uniform).acquire(wanted, None, new_attempt())
    next(steps)
    assert steps.send(HELD) == Sleep(asked[0][0])
    assert asked[0][0] < asked[0][1]
