"""Check that the keep-alive keeps its leases as long as nothing is wrong with the process, the network or the server.

Only runs without a fault are judged: any fault may delay a renewal.
"""

from __future__ import annotations

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.history.record import History, Operation


def check(history: History) -> Finding:
    """Judge every lease that the keep-alive was to renew."""
    bad: list[tuple[Operation, str]] = []
    if history.faults:
        return make_finding("lease kept alive", history, 0, bad)
    kept = {one.token for one in history.of("acquire") if one.ok and one.details.get("keep_alive")}
    for one in history.of("loss"):
        if one.token in kept:
            bad.append((one, f"a lease was lost ({one.details.get('reason')}), although nothing was wrong"))
    return make_finding("lease kept alive", history, len(kept), bad)
