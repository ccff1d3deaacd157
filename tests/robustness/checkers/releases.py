"""Check that no queue makes a release fail or wait: waking a waiter is a courtesy.

It applies while queues are locked by another transaction, or while the server cannot notify. Nothing else is wrong
with the server then, so a release has no other reason to fail.
"""

from __future__ import annotations

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.history.record import History, Operation

FAULTS = ("foreign-queues", "full-notifications")

BOUND = 1.0
"""Most seconds that a release takes. It waits 10 ms for a queue at most."""


def check(history: History) -> Finding:
    """Judge every release during such a fault."""
    struck = [(one.called, one.returned) for one in history.faults if one.key in FAULTS]
    bad: list[tuple[Operation, str]] = []
    checked = 0
    for one in history.of("release"):
        if not any(called < one.returned and one.called < returned for called, returned in struck):
            continue
        if one.outcome == "unknown":
            # A caller that was interrupted has an error too, but not one of the database.
            if "Unavailable" in str(one.details.get("error")):
                bad.append((one, "a release failed because of a queue"))
            continue
        checked += 1
        if one.returned - one.called > BOUND:
            bad.append((one, f"a release took {one.returned - one.called:.3f} s because of a queue"))
    return make_finding("release in time", history, checked, bad)
