"""A host of a schedule that runs on the test's clock, without a thread."""

from __future__ import annotations

from typing import Any

from dblock.errors import ClientClosed
from dblock.recipes.schedules.schedule import LONGEST_WAIT, WAITING, Schedule, _log_failed_claim, _log_failed_run
from dblock.testing.clock import Clock, Timer

LEAST_PAUSE = 1e-6
"""Seconds to the next claim at least, so that rounding cannot make the clock stand still."""

DAY = 86_400.0


class Host:
    """Runs the slots of a schedule at their moments, as `schedule.run()` does in a thread of a real host."""

    def __init__(self, clock: Clock, schedule: Schedule[..., Any], args: tuple[Any, ...], options: Any) -> None:
        self._clock = clock
        self._schedule = schedule
        self._args = args
        self._options = options
        self._timer: Timer | None = clock.call_later(0.0, self._look)

    def stop(self) -> None:
        """Run no more slots."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _look(self) -> None:
        """Run the slot that is due, if there is one for this host, and come back when the next one may be."""
        pause = LONGEST_WAIT
        try:
            claim, run = self._schedule._slots.claim(queue=False)
        except ClientClosed:
            self._timer = None
            return
        except Exception as error:
            _log_failed_claim(self._schedule.name, error)
        else:
            pause = max(min(claim.wait, LONGEST_WAIT if claim.decision in WAITING else DAY), LEAST_PAUSE)
            if run is not None:
                pause = 0.0
                try:
                    self._schedule._perform(run, *self._args, **self._options)
                except Exception as error:
                    _log_failed_run(self._schedule.name, error)
        if self._timer is not None:
            self._timer = self._clock.call_later(pause, self._look)
