"""The waiters of a client, driven by hand: when the client checks the queue for them, and which it wakes."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import pytest

from dblock._core import clock as clocks
from dblock._core.acquire import LockFlows
from dblock._core.effects import Call
from dblock._core.listener_flow import ListenerFlow
from dblock._core.statements import PROBE
from dblock._core.timings import default
from dblock._core.waiters import LocalWaiters
from dblock._runtime.wakeups import ThreadWaiter
from dblock.errors import Unavailable


class Clock:
    """A clock that only the test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Waiter(ThreadWaiter):
    """Counts the wake-ups of a waiter."""

    woken = 0

    def wake(self) -> None:
        self.woken += 1


class FakeListener(ListenerFlow):
    """Counts the wake-ups of a listener, which has a fake connection."""

    def __init__(self) -> None:
        nothing: Any = object()
        self.wakes = 0
        super().__init__(LockFlows("dblock", "me"), nothing, "", None, self.ring)
        self.connection = nothing
        self._replied_at = clocks.now()

    def ring(self) -> None:
        self.wakes += 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def wakes() -> list[bool]:
    return []


@pytest.fixture
def waiters(clock: Clock, wakes: list[bool], monkeypatch: pytest.MonkeyPatch) -> LocalWaiters:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    found = LocalWaiters(LockFlows("dblock", "me"), lambda: wakes.append(True), clock)
    found.notifications_work = True
    return found


def wait_for(
    waiters: LocalWaiters, attempt: str, first: bool = False, next_check: float = 30, name: str = "a"
) -> Waiter:
    waiter = Waiter(waiters, name, attempt)
    waiters.add(waiter)
    waiter.ticket_issued(first, next_check)
    return waiter


def reply(steps: Any, *row: str | None) -> None:
    with pytest.raises(StopIteration):
        steps.send(row)


def test_check_is_never_due_without_waiters(waiters: LocalWaiters) -> None:
    assert waiters.due_at() == math.inf
    assert list(waiters.check(5)) == []
    waiter = wait_for(waiters, "aa")
    waiter.leave()
    assert waiters.due_at() == math.inf
    waiter.leave()  # a second call does no harm


@pytest.mark.parametrize(
    ("notifications_work", "first", "next_check", "due_in"),
    [
        (True, False, 30, default.heartbeat_interval),
        (True, True, 30, default.heartbeat_interval),
        (True, True, 0.3, 0.3),
        (True, True, default.holder_check_interval, default.holder_check_interval),
        (False, True, 30, default.poll_interval),
        (False, False, 30, default.poll_interval_of_others),
    ],
)
def test_next_check_depends_on_position_and_notifications(
    waiters: LocalWaiters, clock: Clock, notifications_work: bool, first: bool, next_check: float, due_in: float
) -> None:
    waiters.notifications_work = notifications_work
    wait_for(waiters, "aa", first, next_check)
    assert waiters.due_at() == pytest.approx(clock.now + due_in)


def test_new_ticket_is_checked_early_and_then_less_often(waiters: LocalWaiters, clock: Clock) -> None:
    """The holder or a waiter ahead may have died before, and a release may have missed the ticket."""
    waiter = wait_for(waiters, "aa")
    waiter.ticket_issued(False, 30, fresh=True)
    intervals = []
    for _ in range(6):
        intervals.append(waiters.due_at() - clock.now)
        clock.now = waiters.due_at()
        steps = waiters.check(5)
        next(steps)
        reply(steps, "1", None, None, None)
    assert intervals == pytest.approx(
        [default.early_check, 0.2, 0.4, 0.8, default.heartbeat_interval, default.heartbeat_interval]
    )
    waiters.add(Waiter(waiters, "a", "bb"))
    waiter.ticket_issued(True, 30, fresh=True)
    assert waiters.due_at() == pytest.approx(clock.now + default.early_check), "also for a waiter that is first"


def test_listener_is_woken_only_for_an_earlier_check(waiters: LocalWaiters, wakes: list[bool]) -> None:
    wait_for(waiters, "aa")
    waiters.due_at()
    before = len(wakes)
    for number in range(100):
        wait_for(waiters, f"b{number}")
    assert len(wakes) == before
    wait_for(waiters, "cc", first=True, next_check=0.2)
    assert len(wakes) == before + 1


def test_notification_wakes_the_waiter_that_it_names(waiters: LocalWaiters) -> None:
    one, other = wait_for(waiters, "0" * 31 + "1"), wait_for(waiters, "0" * 31 + "2")
    waiters.notified("00000000-0000-0000-0000-000000000002")
    waiters.notified("00000000-0000-0000-0000-000000000003")  # of an unknown waiter, or of one that has left
    assert (one.woken, other.woken) == (0, 1)


def test_heartbeat_checks_all_waiters_and_wakes_the_first(waiters: LocalWaiters, clock: Clock) -> None:
    here, there, far = wait_for(waiters, "aa"), wait_for(waiters, "bb", name="b"), wait_for(waiters, "cc", name="b")
    clock.now += default.heartbeat_interval
    steps = waiters.check(5)
    call: Any = next(steps)
    assert b"heartbeat" in call.sql
    assert call.args[1] in ('{"a","b"}', '{"b","a"}')
    reply(steps, "3", "{aa,bb}", "{0,12.5}", "{f,t}")
    assert (here.woken, there.woken, far.woken) == (1, 0, 0)
    assert waiters.due_at() == pytest.approx(clock.now + default.holder_check_interval), (
        "the holder has a presence, so it is checked often"
    )


def test_waiters_whose_tickets_are_gone_are_woken_to_take_new_ones(waiters: LocalWaiters, clock: Clock) -> None:
    waiting = [wait_for(waiters, "aa"), wait_for(waiters, "bb")]
    clock.now += default.heartbeat_interval
    steps = waiters.check(5)
    next(steps)
    reply(steps, "1", None, None, None)
    assert [waiter.woken for waiter in waiting] == [1, 1]


def test_waiter_about_to_redeem_its_ticket_is_not_missed(waiters: LocalWaiters, clock: Clock) -> None:
    staying, going = wait_for(waiters, "aa"), wait_for(waiters, "bb")
    clock.now += default.heartbeat_interval
    steps = waiters.check(5)
    next(steps)
    going.ticket_redeemed()
    reply(steps, "1", None, None, None)
    assert staying.woken == 0


def test_ticket_without_a_waiter_is_abandoned(waiters: LocalWaiters, clock: Clock) -> None:
    wait_for(waiters, "aa")
    clock.now += default.heartbeat_interval
    steps = waiters.check(5)
    next(steps)
    call: Any = steps.send(("2", "{bb}", "{0}", "{f}"))
    assert b"only_ticket => true" in call.sql, "a grant that came in between must be kept"
    assert call.args == ("a", "bb")
    reply(steps, "t")


def test_wake_up_that_comes_before_the_wait_is_not_lost(waiters: LocalWaiters) -> None:
    waiter = ThreadWaiter(waiters, "a", "aa")
    waiter.wake()
    waiter.wake()
    began = time.monotonic()
    waiter.wait(60)
    waiter.wait(60)
    assert time.monotonic() - began < 30, "the waiter was woken before"
    waiter.ticket_redeemed()
    began = time.monotonic()
    waiter.wait(0.05)
    assert time.monotonic() - began >= 0.04, "the wake-up was used up"


def test_new_waiter_wakes_the_listener_only_to_begin_to_listen(waiters: LocalWaiters, wakes: list[bool]) -> None:
    waiters.notifications_work = False
    waiters.add(Waiter(waiters, "a", "aa"))
    assert wakes == [True]
    for attempt in ("bb", "cc"):
        waiters.reset_after_fork()
        waiters.notifications_work = True
        waiters.add(Waiter(waiters, "a", attempt))
    assert wakes == [True], "notifications work, so the listener is listening"


def test_waiter_that_joins_while_the_listener_stops_is_listened_for() -> None:
    listener = FakeListener()
    listener.listens = listener.waiters.notifications_work = True
    stopping = listener._listen_if_needed()
    assert next(stopping) == Call(b"UNLISTEN *", ())
    # A waiter that joins now assumes that the listener listens, and a last notification seems to confirm it.
    newcomer = Waiter(listener.waiters, "a", "aa")
    listener.waiters.add(newcomer)
    listener.notified(PROBE)
    with pytest.raises(StopIteration):
        stopping.send(None)
    assert listener._seconds_until_due() == 0, "the listener does not sleep before it listens again"
    assert next(listener._listen_if_needed()) == Call(f'LISTEN "{listener.channel}"'.encode(), ())
    newcomer.leave()
    assert listener._seconds_until_due() > 1
    wakes = listener.wakes
    listener.waiters.add(Waiter(listener.waiters, "a", "bb"))
    assert listener.wakes == wakes + 1, "a later waiter wakes the listener"


def test_listener_keeps_listening_for_waiters_that_never_wait_long() -> None:
    """The listener checks every few seconds, and such waiters come and go between two checks."""
    listener = FakeListener()
    listener.listens = listener.waiters.notifications_work = True
    newcomer = Waiter(listener.waiters, "a", "aa")
    listener.waiters.add(newcomer)
    listener.notified("aa")
    newcomer.leave()
    with pytest.raises(StopIteration):
        next(listener._listen_if_needed())
    assert listener.listens


def clean_up(waiters: LocalWaiters, clock: Clock, stuck: set[str], seconds: float) -> list[str]:
    """Run the deferred cleanup. Each stuck attempt fails after this time. Return the attempts in order."""
    asked = []
    steps = waiters.run_cleanup()
    try:
        call = next(steps)
        while True:
            asked.append(call.args[1])
            if call.args[1] in stuck:
                clock.now += seconds
                call = steps.throw(Unavailable("no reply"))
            else:
                call = steps.send((None,))
    except StopIteration:
        return asked


def test_cleanup_continues_after_an_attempt_that_is_stuck(waiters: LocalWaiters, clock: Clock) -> None:
    for attempt in ("aa", "bb", "cc"):
        waiters.defer_cleanup("a", attempt)
    assert clean_up(waiters, clock, {"aa"}, 0.5) == ["aa", "bb", "cc"]
    assert waiters.in_use
    assert clean_up(waiters, clock, set(), 0.5) == ["aa"]
    assert not waiters.in_use


def test_cleanup_ends_before_a_heartbeat_is_late_and_continues_with_the_rest(
    waiters: LocalWaiters, clock: Clock
) -> None:
    for attempt in ("aa", "bb", "cc"):
        waiters.defer_cleanup("a", attempt)
    stuck = {"aa", "bb"}
    assert [clean_up(waiters, clock, stuck, 2.0) for _ in range(4)] == [["aa"], ["bb"], ["cc", "aa"], ["bb"]]
