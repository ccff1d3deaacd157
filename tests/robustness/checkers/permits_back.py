"""Check that every permit is available again after the traffic has stopped and the leases of the dead have expired."""

from __future__ import annotations

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.history.record import History


def check(history: History) -> Finding:
    """Compare how many permits are available with how many there are."""
    final = history.of("available")
    bad = [
        (one, f"{one.details['available']} of {one.details['permits']} permits are available, and no holder is left")
        for one in final
        if one.details["available"] != one.details["permits"]
    ]
    return make_finding("permits back", history, len(final), bad)
