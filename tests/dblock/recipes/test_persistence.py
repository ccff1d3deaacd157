"""When a candidate campaigns again: the flow of `run`, driven by hand on a clock of the test."""

from __future__ import annotations

from typing import Any

import pytest

import dblock
from dblock._core.timings import Timings
from dblock.recipes.elections.persistence import Body, Campaign, Outcome, Pause, Stopped, keep_campaigning


class Driver:
    """Performs the effects of the flow, and counts its pauses as time that has passed."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stopped = False
        self.effects: list[Any] = []
        self.flow = keep_campaigning("e", lambda: self.stopped, lambda: self.now, lambda low, high: high, Timings())
        self.effect = next(self.flow)

    def reply(self, value: Any) -> Any:
        """Send a reply or an error, and return the next effect."""
        self.effects.append(self.effect)
        self.effect = self.flow.throw(value) if isinstance(value, BaseException) else self.flow.send(value)
        return self.effect

    def pause(self) -> float:
        """Let a pause pass, and return how long it is."""
        assert isinstance(self.effect, Pause)
        self.now += self.effect.seconds
        seconds = self.effect.seconds
        self.reply(None)
        return seconds

    def fail(self) -> float:
        """Lead, fail, pause, and return the pause."""
        assert isinstance(self.effect, Campaign)
        assert isinstance(self.reply("term"), Body)
        self.reply(Outcome(failed=True))
        return self.pause()


def test_body_that_returns_by_itself_ends_the_run() -> None:
    driver = Driver()
    driver.reply("term")
    with pytest.raises(StopIteration) as done:
        driver.reply(Outcome(by_itself=True, value=41))
    assert done.value.value == 41


def test_loss_is_followed_by_a_campaign_at_once() -> None:
    driver = Driver()
    for _ in range(100):
        driver.reply("term")
        assert driver.reply(Outcome()) == Campaign(stepped_back=False)


def test_campaign_that_fails_is_repeated_with_growing_pauses() -> None:
    driver = Driver()
    pauses = []
    for _ in range(12):
        driver.reply(dblock.Unavailable("away"))
        pauses.append(driver.pause())
    assert pauses == sorted(pauses)
    assert pauses[0] <= 0.05
    assert pauses[-1] == 5.0
    driver.reply("term")
    driver.reply(Outcome())
    driver.reply(dblock.Unavailable("away"))
    assert driver.pause() <= 0.05, "a success starts the pauses over"


@pytest.mark.parametrize("end", [Stopped(), dblock.ClientClosed()])
def test_stop_and_close_end_the_run(end: Exception) -> None:
    with pytest.raises(StopIteration):
        Driver().reply(end)


def test_third_failure_within_ten_seconds_steps_back() -> None:
    driver = Driver()
    assert driver.fail() < 0.5
    assert driver.fail() < 0.5
    assert driver.effect == Campaign(stepped_back=False)
    assert driver.fail() == 1.0
    assert driver.effect == Campaign(stepped_back=True)
    assert driver.fail() == 2.0
    assert [driver.fail() for _ in range(3)] == [4.0, 8.0, 0.4], "the last one is no third failure within 10 s"


def test_failures_far_apart_do_not_step_back() -> None:
    driver = Driver()
    for _ in range(10):
        driver.fail()
        driver.now += 5.0
        assert driver.effect == Campaign(stepped_back=False)


def test_long_term_ends_the_step_back() -> None:
    driver = Driver()
    for _ in range(3):
        driver.fail()
    assert driver.effect == Campaign(stepped_back=True)
    driver.reply("term")
    driver.now += 11.0
    assert driver.reply(Outcome()) == Campaign(stepped_back=False)


def test_step_back_ends_after_five_minutes() -> None:
    driver = Driver()
    for _ in range(3):
        driver.fail()
    driver.reply(dblock.Unavailable("away"))
    driver.now += 300.0
    driver.pause()
    assert driver.effect == Campaign(stepped_back=False)
