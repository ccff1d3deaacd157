"""A lock whose holder is frozen or dead goes to the next in line within its ttl and a bound.

The bound covers how late a waiter may look in, and a machine that does other things too. Nothing is said of a holder
that goes on before its lease is over, nor where one of those who want the lock was stopped meanwhile, and may keep its
place in line for a while, nor where the lock was granted to somebody who was never told.
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
    noted = history.by_key("granted")
    for key, asked in history.by_key("acquire").items():
        grants = sorted((one for one in asked if one.ok), key=lambda one: one.token)
        for strike in strikes:
            held = [one for one in grants if one.returned <= strike.called]
            if not held or held[-1].process != strike.said["victim"]:
                continue
            holder = held[-1]
            if let_go.get((key, holder.token), math.inf) <= strike.called:
                continue
            ttl = float(holder.said["ttl"])
            bound = strike.called + ttl + BOUND
            if float(strike.said.get("seconds", math.inf)) < ttl:
                continue
            waited = [
                one for one in asked if one.called < strike.called < one.returned and one.process != holder.process
            ]
            if _stopped(strikes, strike.called, bound) & {
                one.process
                for one in asked
                if one.called < bound and one.returned > strike.called and one is not holder
            } - {holder.process}:
                continue
            after = [one.token for one in noted.get(key, []) if one.token > holder.token]
            if after and min(after) not in {one.token for one in grants}:
                continue
            in_time = any(one.token > holder.token and one.returned <= bound for one in grants)
            if in_time and waited:
                looked_at += 1
            elif any(bound < one.returned < math.inf for one in waited):
                looked_at += 1
                late = min(waited, key=lambda one: one.called)
                bad.append((late, f"waited past {bound:.3f} for a lock whose holder was struck at {strike.called:.3f}"))
    return found("takeover in time", history, looked_at, bad)


def _stopped(strikes: list[Operation], since: float, until: float) -> set[str]:
    """Return the processes that were stopped in a part of this time at least. The dead are passed over at once."""
    return {
        str(one.said["victim"])
        for one in strikes
        if "seconds" in one.said and one.called < until and one.returned > since
    }
