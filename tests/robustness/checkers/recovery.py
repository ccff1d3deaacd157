"""Check that the faults had an effect, and that locks are granted again after the last one."""

from __future__ import annotations

import math

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.history.record import History, Operation


def check(history: History) -> Finding:
    """Find a strike that had an effect, and a grant that was acknowledged after the last strike."""
    strikes = [one for one in history.faults if not math.isinf(one.returned)]
    bad: list[tuple[Operation, str]] = []
    if strikes:
        last = max(strikes, key=lambda one: one.returned)
        if all(one.details.get("no_effect") for one in strikes):
            bad.append((last, f"none of {len(strikes)} strikes had an effect"))
        if not any(one.ok and one.returned > last.returned for one in history.of("acquire")):
            bad.append((last, "no lock was granted after it"))
    return make_finding("recovery", history, len(strikes), bad)
