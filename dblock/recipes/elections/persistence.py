"""When `run` campaigns again: after every loss and every error, with growing pauses, until it is stopped.

A body that keeps failing steps back: the candidate then has a lower rank than every other one, so that it leads only if
no other candidate is there.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from dblock._core.effects import Flow
from dblock._core.outage import Outage
from dblock._core.timings import Timings
from dblock.errors import ClientClosed, DblockError

logger = logging.getLogger("dblock")

FIRST_PAUSE = 0.05
"""Seconds before the next campaign after one that failed. The pause doubles each time."""

FAILURES, WITHIN = 3, 10.0
"""A body that fails this often within so many seconds makes its candidate step back."""

STEPPED_BACK_FOR = 300.0
"""Seconds for which a candidate stays behind the others, unless it leads for longer than WITHIN before."""

LONGEST_STEP = 30.0
"""Seconds that a candidate pauses at most when it steps back. The first pause lasts a second, and each one doubles."""


class Stopped(Exception):
    """The election was stopped while a candidate waited. Not one of dblock's errors, so that its ticket is given up."""


class Campaign(NamedTuple):
    """Wait until this candidate leads. The result is the term."""

    stepped_back: bool


class Body(NamedTuple):
    """Run the body of a term to its end. The result is an Outcome."""

    term: Any


class Pause(NamedTuple):
    """Let this many seconds pass, or less if the election is stopped."""

    seconds: float


class Outcome(NamedTuple):
    """How a body has ended."""

    failed: bool = False
    by_itself: bool = False
    """Whether it has returned although it could have continued."""
    value: Any = None


def keep_campaigning(
    name: str,
    stopped: Callable[[], bool],
    clock: Callable[[], float],
    uniform: Callable[[float, float], float],
    timings: Timings,
) -> Flow[Any]:
    """Campaign again after every loss and error. The result is what a body has returned by itself."""
    outage = Outage(f"election {name!r}: the candidate can campaign again")
    pause = FIRST_PAUSE
    failures: deque[float] = deque(maxlen=FAILURES)
    steps, stepped_back_until = 0, -math.inf
    while not stopped():
        try:
            term = yield Campaign(clock() < stepped_back_until)
        except (Stopped, ClientClosed):
            return None
        except DblockError as error:
            outage.failed("election %r: the campaign failed, the candidate retries: %s", name, error)
            yield Pause(uniform(pause / 2, pause))
            pause = min(pause * 2, timings.longest_election_pause)
            continue
        outage.worked()
        pause = FIRST_PAUSE
        began = clock()
        outcome: Outcome = yield Body(term)
        if outcome.by_itself:
            return outcome.value
        if clock() - began >= WITHIN:
            steps, stepped_back_until = 0, -math.inf
            failures.clear()
        if not outcome.failed:
            continue
        failures.append(clock())
        if len(failures) == FAILURES and clock() - failures[0] <= WITHIN:
            steps += 1
            stepped_back_until = clock() + STEPPED_BACK_FOR
            seconds = min(2.0 ** (steps - 1), LONGEST_STEP)
            logger.warning(
                "election %r: the body has failed %d times within %g s, the candidate steps back behind the others for "
                "%g s",
                name,
                FAILURES,
                WITHIN,
                STEPPED_BACK_FOR,
            )
        else:
            seconds = FIRST_PAUSE * 2 ** len(failures)
        yield Pause(uniform(seconds / 2, seconds))
    return None
