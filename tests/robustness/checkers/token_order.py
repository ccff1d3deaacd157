"""Tokens are in the order of the grants, and no token is granted twice.

What was granted after another grant had been answered has the higher token. Where the server itself has noted its
grants in the order in which it made them, those rise too.
"""

from __future__ import annotations

import itertools
from collections import Counter

from tests.robustness.checkers import Finding, found
from tests.robustness.history.record import History, Operation


def check(history: History) -> Finding:
    """Compare each grant with those that were answered before it was asked for."""
    bad: list[tuple[Operation, str]] = []
    grants = [one for one in history.of("acquire") if one.ok]
    for asked in history.by_key("acquire").values():
        bad += _backwards([one for one in asked if one.ok])
    times = Counter(one.token for one in grants)
    bad += [(one, f"token {one.token} was granted {times[one.token]} times") for one in grants if times[one.token] > 1]
    witnessed = history.by_key("granted")
    for key, noted in witnessed.items():
        noted.sort(key=lambda one: int(one.said["order"]))
        for before, after in itertools.pairwise(noted):
            if after.token <= before.token:
                bad.append((after, f"the server granted {key!r} under {before.token}, and then under {after.token}"))
    return found("token order", history, len(grants) + sum(map(len, witnessed.values())), bad)


def _backwards(grants: list[Operation]) -> list[tuple[Operation, str]]:
    """Return the grants that were asked for after one with a higher token had been answered."""
    bad: list[tuple[Operation, str]] = []
    answered = sorted(grants, key=lambda one: one.returned)
    place, highest = 0, None
    for one in sorted(grants, key=lambda one: one.called):
        while place < len(answered) and answered[place].returned < one.called:
            if highest is None or answered[place].token > highest.token:
                highest = answered[place]
            place += 1
        if highest is not None and one.token < highest.token:
            bad.append((one, f"asked for after token {highest.token} had been granted"))
    return bad
