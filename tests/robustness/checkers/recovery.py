"""The faults were felt, and are over when they are over: some strike did something, and after the last one locks are
granted again.
"""

from __future__ import annotations

import math

from tests.robustness.checkers import Finding, found
from tests.robustness.history.record import History, Operation


def check(history: History) -> Finding:
    """Look for a strike that was not in vain, and for a grant that was answered after the last."""
    strikes = [one for one in history.faults if not math.isinf(one.returned)]
    bad: list[tuple[Operation, str]] = []
    if strikes:
        last = max(strikes, key=lambda one: one.returned)
        if all(one.said.get("in_vain") for one in strikes):
            bad.append((last, f"none of {len(strikes)} strikes did anything"))
        if not any(one.ok and one.returned > last.returned for one in history.of("acquire")):
            bad.append((last, "no lock was granted to anybody after it"))
    return found("recovery", history, len(strikes), bad)
