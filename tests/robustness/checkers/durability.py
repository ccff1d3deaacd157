"""What was acknowledged is durable: every grant that was answered is known to the server in the end.

That is: the lock's row has its token or a later one, unless the reaper may have taken the row since; and where the
server noted its grants, in the same transaction as each, this one is among them.
"""

from __future__ import annotations

from tests.robustness.checkers import Finding, found
from tests.robustness.history.record import History, Operation


def check(history: History) -> Finding:
    """Compare the grants that were answered with what the server has in the end."""
    bad: list[tuple[Operation, str]] = []
    newest = {one.key: one.token for one in history.of("newest")}
    noted = {(one.key, one.token) for one in history.of("granted")}
    grants = [one for one in history.of("acquire") if one.ok]
    reaped = any(one.key == "reap" for one in history.faults)
    if newest:
        bad = [
            (one, f"acknowledged, and the server knows of nothing beyond {newest.get(one.key, 0)}")
            for one in grants
            if one.token > newest.get(one.key, 0) and (one.key in newest or not reaped)
        ]
    if noted:
        bad += [(one, "acknowledged, and not noted") for one in grants if (one.key, one.token) not in noted]
    return found("durability", history, len(grants) if newest else 0, bad)
