"""Check that a holder learns of its loss before the next grant: no holder believes in a lease that was superseded.

Only a holder whose lock was force-released at once is exempt, from that moment on.
"""

from __future__ import annotations

import bisect

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.checkers.early_ends import believable, force_released
from tests.robustness.history.record import History, Operation


def check(history: History) -> Finding:
    """Find leases that a holder believed in after a later grant of the same lock had been acknowledged."""
    bad: list[tuple[Operation, str]] = []
    since = force_released(history)
    beliefs = {key: believable(reported, since) for key, reported in history.by_key("believe").items()}
    grants = history.by_key("acquire")
    for key, believed in beliefs.items():
        acknowledged = sorted((one for one in grants.get(key, []) if one.ok), key=lambda one: one.returned)
        times = [one.returned for one in acknowledged]
        # The highest token that had been acknowledged by each of these times.
        highest: list[int] = []
        for one in acknowledged:
            highest.append(max(one.token, highest[-1] if highest else 0))
        for one in believed:
            index = bisect.bisect_left(times, one.called) - 1
            if index >= 0 and highest[index] > one.token:
                bad.append((one, f"believed in token {one.token} when {highest[index]} had been granted"))
    return make_finding("loss reported first", history, sum(map(len, beliefs.values())), bad)
