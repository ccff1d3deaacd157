"""Check that a set has every acknowledged element, none twice, and none that no worker added.

An element of unknown outcome may be there or not. Every writer writes back all that it has read, and each element names
its token. So the elements also show in which order the writes were accepted: their tokens never fall.
"""

from __future__ import annotations

import itertools
from collections import Counter

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.history.record import History, Operation


def check(history: History) -> Finding:
    """Compare the final state of each set with the writes to it."""
    bad: list[tuple[Operation, str]] = []
    checked = 0
    tried = history.by_key("write")
    final = {one.key: one for one in history.of("final")}
    for key, written in tried.items():
        if not final:
            break
        there = Counter(final[key].details["elements"]) if key in final else Counter()
        checked += len(written)
        bad += [
            (one, f"acknowledged, but lost: {one.details['element']}")
            for one in written
            if one.ok and not there[one.details["element"]]
        ]
        bad += [
            (one, f"refused, but still there: {one.details['element']}")
            for one in written
            if one.outcome == "failed" and there[one.details["element"]]
        ]
    for key, one in final.items():
        tokens = {write.details["element"]: write.token for write in tried.get(key, [])}
        elements = one.details["elements"]
        bad += [(one, f"{what} is there {times} times") for what, times in Counter(elements).items() if times > 1]
        bad += [(one, f"no worker has added {what}") for what in elements if what not in tokens]
        known = [what for what in elements if what in tokens]
        bad += [
            (one, f"{after} came after {before}, which has the higher token")
            for before, after in itertools.pairwise(known)
            if tokens[after] < tokens[before]
        ]
    return make_finding("sets", history, checked, bad)
