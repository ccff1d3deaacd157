"""Check that the order of tokens is the order of grants, and that no token is granted twice.

A grant that was requested after another grant had been acknowledged has the higher token. If the server recorded its
grants in the order in which it made them, the tokens in its records rise too.
"""

from __future__ import annotations

import itertools
from collections import Counter

from tests.robustness.checkers import Finding, found
from tests.robustness.history.record import History, Operation


def check(history: History) -> Finding:
    """Compare each grant with the grants acknowledged before it was requested."""
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
    """Return the grants that were requested after a higher token had been acknowledged."""
    bad: list[tuple[Operation, str]] = []
    answered = sorted(grants, key=lambda one: one.returned)
    place, highest = 0, None
    for one in sorted(grants, key=lambda one: one.called):
        while place < len(answered) and answered[place].returned < one.called:
            if highest is None or answered[place].token > highest.token:
                highest = answered[place]
            place += 1
        if highest is not None and one.token < highest.token:
            bad.append((one, f"requested after token {highest.token} had been granted"))
    return bad
