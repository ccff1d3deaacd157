"""Check that a released lock goes to a waiter within a bound, and usually at once.

The bound applies to each hand-over: a waiter that misses its wake-up polls within a second, and a ticket that no
waiter redeems is given up within three seconds. The median shows what is usual, that is whether wake-ups arrive at all.
The takeover checker judges what happens near a fault. If the outcome of an acquisition is unknown, the lock may be held
and is not judged.
"""

from __future__ import annotations

import bisect
import math
import statistics

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.history.record import History, Operation

BOUND = 2.0
"""Most seconds between a release and the next grant, while a waiter is queued."""

USUAL = 0.25
"""Most seconds at the median of a run with faults."""

USUAL_IN_CALM = 0.05
"""Most seconds at the median of a run without faults. Without wake-ups the first waiter polls, which takes longer."""

ENOUGH = 12
"""Fewest hand-overs for which the median says anything."""

NEAR = 5.0
"""Seconds around a fault, during which the queue may be waiting for dead clients."""


def check(history: History) -> Finding:
    """For each lock that was released while clients waited, find when one of them was granted it."""
    bad: list[tuple[Operation, str]] = []
    checked = 0
    taken: list[tuple[Operation, float]] = []
    struck = [(one.called, one.returned) for one in history.faults]
    releases = history.by_key("release")
    for key, requests in history.by_key("acquire").items():
        grants = sorted((one for one in requests if one.ok), key=lambda one: one.token)
        tokens = [one.token for one in grants]
        in_doubt = [one.called for one in requests if one.outcome == "unknown"]
        for freed in releases.get(key, []):
            if not (freed.ok and freed.details.get("freed")):
                continue
            index = bisect.bisect_right(tokens, freed.token)
            after = grants[index] if index < len(grants) else None
            granted = after.returned if after else math.inf
            waits = [
                (min(one.returned, granted) - max(one.called, freed.returned), one)
                for one in requests
                if one.called < granted and freed.returned < one.returned < math.inf
            ]
            if not waits:
                continue
            longest, waiter = max(waits, key=lambda wait: wait[0])
            begin, end = freed.called - NEAR, freed.returned + longest
            if any(called < end and begin < returned for called, returned in struck):
                continue
            if any(begin < called < end for called in in_doubt):
                continue
            checked += 1
            if longest > BOUND:
                bad.append((waiter, f"waited for {longest:.3f} s after token {freed.token} had been released"))
            if after is not None and any(one.called < freed.called for _, one in waits):
                taken.append((after, granted - freed.returned))
    taken.sort(key=lambda one: one[0].returned)
    most = USUAL if struck else USUAL_IN_CALM
    if len(taken) >= ENOUGH and (usual := statistics.median(seconds for _, seconds in taken)) > most:
        bad.append((taken[ENOUGH - 1][0], f"{len(taken)} hand-overs took {usual:.3f} s at the median"))
    return make_finding("hand-over in time", history, checked, bad)
