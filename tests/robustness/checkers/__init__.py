"""Checkers: each takes a history, and says what in it must not be. Each is a module with a function `check`.

A checker never guesses: what it calls a violation is one however the unknown outcomes of the history went.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.robustness.history.record import History, Operation


@dataclass
class Finding:
    """What one checker has to say of one history."""

    checker: str
    looked_at: int
    """Operations that it could judge; a check that looked at nothing has shown nothing."""
    violations: list[str] = field(default_factory=list)
    after: int | None = None
    """How many operations of the history had ended when the first violation could be seen."""


Checker = Callable[[History], Finding]


def operations_until(history: History, moment: float) -> int:
    """Return how many operations had been begun by then."""
    return sum(one.called <= moment for one in history)


def found(checker: str, history: History, looked_at: int, bad: list[tuple[Operation, str]]) -> Finding:
    """Put together what was found: each violation with the operation at which it shows."""
    first = min((one.called if one.returned == float("inf") else one.returned for one, _ in bad), default=None)
    return Finding(
        checker,
        looked_at,
        [f"{what}\n    {one}" for one, what in bad],
        None if first is None else operations_until(history, first),
    )
