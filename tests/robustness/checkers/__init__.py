"""Checkers: each is a module with a function `check` that takes a history and returns the violations in it.

A checker never guesses. It reports a violation only if it is one for every possible outcome of the unknown operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.robustness.history.record import History, Operation
from tests.support.machine import UNSAFE

DEPEND_ON_TIME = (
    "free lock granted", "hand-over in time", "lease kept alive", "permits back", "queue order", "recovery",
    "release in time", "takeover in time", "writers in turn",
)  # fmt: skip
"""The checkers whose violations a late machine may cause."""


@dataclass
class Finding:
    """Hold the result of one checker for one history."""

    checker: str
    checked: int
    """Number of operations that the checker could judge. If it is 0, the check has shown nothing."""
    violations: list[str] = field(default_factory=list)
    after: int | None = None
    """Number of operations in the history at the moment when the first violation became visible."""

    def __post_init__(self) -> None:
        if self.checker not in DEPEND_ON_TIME:
            self.violations = [f"{UNSAFE}: {one}" for one in self.violations]


Checker = Callable[[History], Finding]


def operations_until(history: History, moment: float) -> int:
    """Return the number of operations that had begun by this moment."""
    return sum(one.called <= moment for one in history)


def make_finding(checker: str, history: History, checked: int, bad: list[tuple[Operation, str]]) -> Finding:
    """Make a finding from the violations, each with the operation at which it shows."""
    first = min((one.called if one.returned == float("inf") else one.returned for one, _ in bad), default=None)
    return Finding(
        checker,
        checked,
        [f"{what}\n    {one}" for one, what in bad],
        None if first is None else operations_until(history, first),
    )
