"""The flows of try_acquire, acquire, renew and release, driven by hand: no database, a clock that the test moves."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dblock._core.acquire import MOST_CROWDS, TRUST, LockFlows
from dblock._core.effects import Call, JoinQueue, Sleep, Wait
from dblock._core.options import LockOptions, lock_options
from dblock._core.replies import new_attempt
from dblock._core.timings import default
from dblock._core.waiters import LocalWaiter, LocalWaiters
from dblock._runtime.wakeups import ThreadWaiter
from dblock.errors import ClientClosed, Unavailable

GRANTED = ("t", "7", "1000.5", "30", None)
HELD = ("f", None, "1000.5", "12.5", "f")
FREE = ("f", None, None, "0", "f")
OTHERS_FIRST = ("f", None, None, "0", "t")
BUSY = ("f", None, None, "0", None, "f", "f", None)
QUEUED = ("f", None, "1000.5", "12.5", "3", "t", "f", "f")


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
def flows(clock: Clock) -> LockFlows:
    return LockFlows("dblock", "me", clock, lambda low, high: high)


@pytest.fixture
def options() -> LockOptions:
    return lock_options("a", 30, None, {"why": "test"})


def finish(steps: Any, reply: Any) -> Any:
    with pytest.raises(StopIteration) as done:
        steps.send(reply)
    return done.value.value


def test_try_is_one_call_with_all_its_options(flows: LockFlows, options: LockOptions) -> None:
    steps = flows.try_acquire(options, new_attempt())
    call = next(steps)
    assert isinstance(call, Call)
    assert b'"dblock".try_acquire($1, $2, $3, $4, $5, $6,' in call.sql
    name, interval, holder, meta, attempt, durable, client, fair, ticket = call.args
    assert (name, interval, holder, meta, durable) == ("a", "30.000000 s", "me", '{"why": "test"}', "t")
    assert (client, fair, ticket) == (None, "t", None)
    assert attempt is not None
    assert len(attempt) == 32
    assert call.again is not None
    assert b"retry => true" in call.again
    assert finish(steps, GRANTED).token == 7


def test_no_two_attempts_are_the_same() -> None:
    assert len({new_attempt() for _ in range(100)}) == 100


def test_trust_window_counts_from_before_the_request(flows: LockFlows, options: LockOptions, clock: Clock) -> None:
    steps = flows.try_acquire(options, new_attempt())
    next(steps)
    clock.now += 10  # a slow reply
    assert finish(steps, GRANTED).trusted_until == pytest.approx(100 + 30 * TRUST)


def test_renewal_returns_its_send_time_and_the_failed_leases(flows: LockFlows, clock: Clock) -> None:
    clock.now = 200
    renewing = flows.renew([("a", 7, 60), ('"b\\', -3, 0.5)], within=2)
    call: Any = next(renewing)
    assert call.args == ('{"a","\\"b\\\\"}', '{"7","-3"}', '{"60.000000 s","0.500000 s"}', None)
    assert call.within == 2
    clock.now += 10
    renewal = finish(renewing, ("1000.5", "{2}", "{busy}"))
    assert renewal == (200, 1000.5, {1: "busy"})


def test_grant_whose_reply_comes_too_late_is_given_back(flows: LockFlows, options: LockOptions, clock: Clock) -> None:
    steps = flows.try_acquire(options, new_attempt())
    next(steps)
    clock.now += 29.5
    released = steps.send(GRANTED)
    assert isinstance(released, Call)
    assert b"release" in released.sql
    assert released.args == ("a", "7")
    assert finish(steps, ("t",)) is None


class Waiter(LocalWaiter):
    """Records the events of a waiter."""

    def __init__(self) -> None:
        super().__init__(LocalWaiters(LockFlows("dblock", "me")), "a", "aa")
        self.events: list[Any] = []

    def ticket_issued(self, first: bool, next_check: float, fresh: bool = False) -> None:
        super().ticket_issued(first, next_check, fresh)
        self.events.append((first, next_check))

    def ticket_redeemed(self) -> None:
        self.events.append("redeemed")

    def defer_cleanup(self) -> None:
        self.events.append("deferred")

    def leave(self) -> None:
        self.events.append("left")


def join(steps: Any, waiter: LocalWaiter | None = None) -> Any:
    """Refuse the try, reply to the request to join the queue with a waiter, and return the call that follows."""
    assert steps.send(HELD) == JoinQueue("a", "aa")
    return steps.send(waiter or Waiter())


def test_acquire_tries_then_queues_then_redeems_its_ticket_under_one_attempt(
    flows: LockFlows, options: LockOptions
) -> None:
    waiter = Waiter()
    steps = flows.acquire(options, None, "aa")
    tried: Any = next(steps)
    queued = join(steps, waiter)
    assert b'"dblock".acquire(' in queued.sql
    assert steps.send(QUEUED) == Wait(waiter, math.inf)
    redeemed: Any = steps.send(None)
    assert tried.sql == redeemed.sql
    assert (tried.args[-1], redeemed.args[-1]) == (None, "3")
    assert tried.args[4] == queued.args[4] == redeemed.args[4] == "aa"
    assert finish(steps, GRANTED).token == 7
    assert waiter.events == [(True, 12.5), "redeemed", "left"]


def test_waiter_woken_too_early_asks_again_and_keeps_its_position(flows: LockFlows, options: LockOptions) -> None:
    waiter = Waiter()
    steps = flows.acquire(options, None, "aa")
    next(steps)
    join(steps, waiter)
    steps.send(QUEUED)
    steps.send(None)
    again: Any = steps.send(HELD)
    assert b'"dblock".acquire(' in again.sql
    assert again.args[-2] == "t", "the waiter had a ticket before, so it skips dead waiters ahead"
    assert steps.send(QUEUED) == Wait(waiter, math.inf)


def test_ticket_that_comes_after_the_client_has_left_is_given_up(flows: LockFlows, options: LockOptions) -> None:
    waiter = Waiter()
    steps = flows.acquire(options, None, "aa")
    next(steps)
    join(steps, waiter)
    waiter._waiters.left = True
    with pytest.raises(ClientClosed) as closed:
        steps.send(QUEUED)
    assert closed.value.may_be_done, "the caller abandons the attempt, over a connection of its own"


def test_replaced_ticket_is_logged(flows: LockFlows, options: LockOptions, caplog: pytest.LogCaptureFixture) -> None:
    steps = flows.acquire(options, None, "aa")
    next(steps)
    join(steps)
    steps.send(QUEUED)
    steps.send(None)
    steps.send(HELD)
    assert isinstance(steps.send(("f", None, "1000.5", "12.5", "9", "f", "f", "t")), Wait)
    assert "ticket replaced" in caplog.text


def test_first_waiter_checks_a_holder_with_a_presence(flows: LockFlows, options: LockOptions) -> None:
    waiter = Waiter()
    steps = flows.acquire(options, None, "aa")
    next(steps)
    join(steps, waiter)
    steps.send(("f", None, "1000.5", "12.5", "3", "t", "t", "t"))
    assert waiter.events == [(True, default.holder_check_interval)]


def test_acquire_on_a_crowded_lock_joins_the_queue_without_a_try(flows: LockFlows, options: LockOptions) -> None:
    steps = flows.acquire(options, None, "aa", crowded=True)
    assert next(steps) == JoinQueue("a", "aa")
    call: Any = steps.send(Waiter())
    assert b'"dblock".acquire(' in call.sql


def test_crowd_is_remembered_by_its_name_until_an_attempt_does_not_queue(
    flows: LockFlows, options: LockOptions
) -> None:
    steps = flows.acquire(options, None, "aa")
    next(steps)
    join(steps, ThreadWaiter(LocalWaiters(flows), "a", "aa"))
    steps.send(QUEUED)
    steps.send(None)
    finish(steps, GRANTED)
    assert isinstance(next(flows.acquire(lock_options("b", 30, None, None), None, "bb")), Call), (
        "another lock has no crowd"
    )

    again = flows.acquire(lock_options("a", 5, None, None), None, "cc")
    assert next(again) == JoinQueue("a", "cc"), "another object for the same lock"
    again.send(ThreadWaiter(LocalWaiters(flows), "a", "cc"))
    finish(again, ("t", "8", "1000.5", "5", None, None, None, None))
    assert isinstance(next(flows.acquire(options, None, "dd")), Call), "the crowd is gone"


def test_crowds_that_a_client_remembers_are_bounded(flows: LockFlows) -> None:
    for number in range(MOST_CROWDS + 1):
        flows.crowds.note(f"lock-{number}", queued=True)
    assert flows.crowds.expected(f"lock-{MOST_CROWDS}")
    assert not flows.crowds.expected("lock-0")


def test_waiter_without_a_ticket_asks_again_soon_and_then_less_often(flows: LockFlows, options: LockOptions) -> None:
    steps = flows.acquire(options, None, "aa")
    next(steps)
    waits, pauses = [], []
    call = join(steps)
    for _ in range(8):
        waits.append(call.args[-1])
        pause = steps.send(BUSY)
        assert isinstance(pause, Wait)
        pauses.append(pause.seconds)
        call = steps.send(None)
    assert pauses == [0.01, 0.02, 0.04, 0.08, 0.16, 0.2, 0.2, 0.2]
    assert waits == ["t"] + ["f"] * 7, "only the first request waits inside the database"


def test_waiter_with_a_ticket_tries_it_again_while_the_queue_is_locked(flows: LockFlows, options: LockOptions) -> None:
    steps = flows.acquire(options, None, "aa")
    next(steps)
    join(steps)
    steps.send(QUEUED)
    steps.send(None)
    again: Any = steps.send(OTHERS_FIRST)
    assert b'"dblock".acquire(' in again.sql
    assert isinstance(steps.send(BUSY), Wait)
    tried: Any = steps.send(None)
    assert b'"dblock".try_acquire(' in tried.sql
    assert tried.args[-1] == "3"
    assert finish(steps, GRANTED).token == 7


def test_first_waiter_of_a_free_lock_whose_row_is_locked_polls_less_and_less(
    flows: LockFlows, options: LockOptions
) -> None:
    """An open transaction may prove the lease for long after its holder has released it."""
    steps = flows.acquire(options, None, "aa")
    next(steps)
    join(steps)
    steps.send(QUEUED)
    effect: Any = steps.send(None)
    pauses = []
    for _ in range(8):
        assert b'"dblock".try_acquire(' in effect.sql, "one call for each look"
        pause: Any = steps.send(FREE)
        pauses.append(pause.seconds)
        effect = steps.send(None)
    assert pauses == [0.01, 0.02, 0.04, 0.08, 0.16, 0.2, 0.2, 0.2]
    assert b'"dblock".acquire(' in steps.send(HELD).sql


def test_only_one_waiter_of_a_client_asks_for_a_locked_queue(flows: LockFlows, options: LockOptions) -> None:
    waiters = LocalWaiters(flows)
    first, second, third = (ThreadWaiter(waiters, "a", attempt) for attempt in ("aa", "bb", "cc"))
    running = []
    for waiter in (first, second, third):
        waiters.add(waiter)
        steps: Any = flows.acquire(options, None, waiter.attempt)
        next(steps)
        steps.send(HELD)
        running.append((steps, steps.send(waiter)))
    (one, asking), (two, _), (three, waiting) = running[0], running[1], running[2]
    assert b'"dblock".acquire(' in asking.sql
    # All three ask at once. The first reply to find the queue locked decides the order.
    assert one.send(BUSY).seconds == 0.01
    assert two.send(BUSY).seconds == 0.01
    assert isinstance(waiting, Call)
    assert three.send(BUSY).seconds == 0.01
    assert two.send(None) == Wait(second, math.inf), "the second waits for its turn"
    assert three.send(None) == Wait(third, math.inf)
    newcomer: Any = flows.acquire(options, None, "dd")
    next(newcomer)
    fourth = ThreadWaiter(waiters, "a", "dd")
    waiters.add(fourth)
    newcomer.send(HELD)
    assert newcomer.send(fourth) == Wait(fourth, math.inf), "a new waiter does not ask either"
    other = ThreadWaiter(waiters, "b", "ee")
    waiters.add(other)
    assert other.take_turn(), "another lock is not affected"

    one.send(None)
    assert isinstance(one.send(QUEUED), Wait)
    second.wait(0)
    asks = two.send(None)
    assert b'"dblock".acquire(' in asks.sql, "the first got through, and the second follows"
    assert three.send(None) == Wait(third, math.inf), "woken too early"
    two.close()
    assert b'"dblock".acquire(' in three.send(None).sql, "the second has left"
    assert isinstance(three.send(QUEUED), Wait)
    assert b'"dblock".acquire(' in newcomer.send(None).sql
    assert isinstance(newcomer.send(QUEUED), Wait)
    assert other.take_turn()
    assert first.take_turn()


def test_waiter_that_never_had_a_ticket_abandons_nothing(flows: LockFlows, options: LockOptions, clock: Clock) -> None:
    steps = flows.acquire(options, 1.0, "aa")
    next(steps)
    join(steps)
    clock.now += 1
    assert finish(steps, BUSY) is None


def test_wait_ends_with_its_timeout_and_leaves_no_ticket(flows: LockFlows, options: LockOptions, clock: Clock) -> None:
    waiter = Waiter()
    steps = flows.acquire(options, 1.0, "aa")
    next(steps)
    clock.now += 0.996
    join(steps, waiter)
    wait = steps.send(QUEUED)
    assert isinstance(wait, Wait)
    assert wait.seconds == pytest.approx(0.004)
    clock.now += 0.004
    left: Any = steps.send(None)
    assert b"abandon" in left.sql
    assert left.args == ("a", "aa")
    assert finish(steps, ("t",)) is None
    assert waiter.events[-1] == "left"


def test_interrupted_waiter_leaves_the_queue(flows: LockFlows, options: LockOptions) -> None:
    waiter = Waiter()
    steps = flows.acquire(options, None, "aa")
    next(steps)
    join(steps, waiter)
    steps.send(QUEUED)
    with pytest.raises(KeyboardInterrupt):
        steps.throw(KeyboardInterrupt())
    assert waiter.events[-1] == "left"


def test_timeout_of_zero_sends_one_request(flows: LockFlows, options: LockOptions) -> None:
    steps = flows.acquire(options, 0, new_attempt())
    next(steps)
    assert finish(steps, HELD) is None


def test_retry_that_finds_its_own_grant_trusts_only_its_remaining_time(
    flows: LockFlows, options: LockOptions, clock: Clock
) -> None:
    steps = flows.try_acquire(options, new_attempt())
    next(steps)
    assert finish(steps, ("t", "7", "1000.5", "4", None)).trusted_until == pytest.approx(100 + 4 * TRUST)


def test_retried_release_that_frees_nothing_is_no_loss_within_the_trust_window(
    flows: LockFlows, options: LockOptions, clock: Clock
) -> None:
    acquiring = flows.try_acquire(options, new_attempt())
    next(acquiring)
    grant = finish(acquiring, GRANTED)
    for now, released in ((clock.now, True), (grant.trusted_until, False)):
        clock.now = now
        steps = flows.release(grant.name, grant.token, grant.trusted_until)
        call: Any = next(steps)
        assert b"nullif" in call.again
        assert finish(steps, (None,)) is released


@pytest.mark.parametrize("how", ["try", "no time"])
def test_try_retries_a_lock_that_is_neither_held_nor_available(
    flows: LockFlows, options: LockOptions, how: str
) -> None:
    """A renewal that was sent before a release may keep the row locked for a moment."""
    attempt = new_attempt()
    steps = flows.try_acquire(options, attempt) if how == "try" else flows.acquire(options, 0, attempt)
    first: Any = next(steps)
    assert isinstance(steps.send(("f", None, None, "0", "f")), Sleep)
    again: Any = next(steps)
    assert again.args == first.args, "a new attempt would not find the grant of the first"
    assert finish(steps, GRANTED).token == 7


def test_try_gives_up_after_three_requests(flows: LockFlows, options: LockOptions) -> None:
    steps = flows.try_acquire(options, new_attempt())
    requests = 0
    with pytest.raises(StopIteration) as done:
        step = next(steps)
        while True:
            requests += isinstance(step, Call)
            step = steps.send(("f", None, None, "0", "f") if isinstance(step, Call) else None)
    assert done.value.value is None
    assert requests == 3


def test_grant_that_came_too_late_and_cannot_be_released_may_be_held(
    flows: LockFlows, options: LockOptions, clock: Clock
) -> None:
    steps = flows.try_acquire(options, "aa")
    next(steps)
    clock.now += 1000
    steps.send(GRANTED)
    with pytest.raises(Unavailable) as raised:
        steps.throw(Unavailable("no connection could be opened"))
    assert raised.value.may_be_done
