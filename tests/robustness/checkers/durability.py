"""What was acknowledged is durable: every grant that was answered is known to the server in the end, or a later one."""

from __future__ import annotations

from tests.robustness.checkers import Finding, found
from tests.robustness.histories import History, Operation


def check(history: History) -> Finding:
    """Compare the grants that were answered with the newest token of each lock, as the server has it in the end."""
    bad: list[tuple[Operation, str]] = []
    newest = {one.key: one.token for one in history.of("newest")}
    grants = [one for one in history.of("acquire") if one.ok]
    if newest:
        bad = [
            (one, f"acknowledged, and the server knows of nothing beyond {newest.get(one.key, 0)}")
            for one in grants
            if one.token > newest.get(one.key, 0)
        ]
    return found("durability", history, len(grants) if newest else 0, bad)
