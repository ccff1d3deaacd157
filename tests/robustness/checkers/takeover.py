"""A lock whose holder is frozen or dead goes to the next in line within its ttl and a bound.

The bound covers how late a waiter may look in, and a machine that does other things too.
"""

from __future__ import annotations

import math

from tests.robustness.checkers import Finding, found
from tests.robustness.histories import History, Operation

BOUND = 1.5
"""Seconds beyond the ttl: a waiter that misses its wake-up looks in within a second; the rest is a busy machine."""


def check(history: History) -> Finding:
    """For each holder that was struck down while others waited, find out when one of them had the lock."""
    bad: list[tuple[Operation, str]] = []
    looked_at = 0
    strikes = [one for one in history.faults if "victim" in one.said]
    let_go = {(one.key, one.said.get("token")): one.called for one in history.of("release")}
    for key, asked in history.by_key("acquire").items():
        grants = sorted((one for one in asked if one.ok), key=lambda one: one.token)
        for strike in strikes:
            held = [one for one in grants if one.returned <= strike.called]
            if not held or held[-1].process != strike.said["victim"]:
                continue
            holder = held[-1]
            if let_go.get((key, holder.token), math.inf) <= strike.called:
                continue
            bound = strike.called + float(holder.said["ttl"]) + BOUND
            waited = [
                one for one in asked if one.called < strike.called < one.returned and one.process != holder.process
            ]
            in_time = any(one.token > holder.token and one.returned <= bound for one in grants)
            if in_time and waited:
                looked_at += 1
            elif any(bound < one.returned < math.inf for one in waited):
                looked_at += 1
                late = min(waited, key=lambda one: one.called)
                bad.append((late, f"waited past {bound:.3f} for a lock whose holder was struck at {strike.called:.3f}"))
    return found("takeover in time", history, looked_at, bad)
