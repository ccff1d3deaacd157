"""One release wakes one waiter: there are no more wake-ups than there were ends of grants or of waits to cause them."""

from __future__ import annotations

from tests.robustness.checkers import Finding, found
from tests.robustness.histories import History, Operation


def check(history: History) -> Finding:
    """Count wake-ups, and what can have caused one each: a grant that ended, a wait that was given up."""
    woken = history.of("woken")
    # Every acquisition, however it ended, ends at most once: by a release, by leaving the line, by being forced.
    causes = len(history.of("acquire")) + len(history.of("force"))
    bad: list[tuple[Operation, str]] = []
    if len(woken) > causes:
        bad.append((woken[causes], f"{len(woken)} wake-ups for {causes} causes"))
    return found("one wake-up per release", history, len(woken), bad)
