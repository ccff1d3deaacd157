"""Check that acknowledged grants are durable: at the end, the server knows every acknowledged grant.

The lock's row must have the grant's token or a later one, unless the reaper may have deleted the row since. If the
server recorded its grants, each in the transaction of the grant, this grant must be among the records.
"""

from __future__ import annotations

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.history.record import History, Operation


def check(history: History) -> Finding:
    """Compare the acknowledged grants with the server's final state."""
    bad: list[tuple[Operation, str]] = []
    newest = {one.key: one.token for one in history.of("newest")}
    recorded = {(one.key, one.token) for one in history.of("granted")}
    grants = [one for one in history.of("acquire") if one.ok]
    reaped = any(one.key == "reap" for one in history.faults)
    if newest:
        bad = [
            (one, f"acknowledged, but the newest token on the server is {newest.get(one.key, 0)}")
            for one in grants
            if one.token > newest.get(one.key, 0) and (one.key in newest or not reaped)
        ]
    if recorded:
        bad += [(one, "acknowledged, but not recorded") for one in grants if (one.key, one.token) not in recorded]
    return make_finding("durability", history, len(grants) if newest else 0, bad)
