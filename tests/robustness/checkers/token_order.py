"""Check that the order of tokens is the order of grants, and that no token is granted twice.

A grant that was requested after another grant had been acknowledged has the higher token. If the server recorded its
grants in the order in which it made them, the tokens in its records rise too.
"""

from __future__ import annotations

import itertools
from collections import Counter

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.history.record import History, Operation


def check(history: History) -> Finding:
    """Compare each grant with the grants acknowledged before it was requested."""
    bad: list[tuple[Operation, str]] = []
    grants = [one for one in history.of("acquire") if one.ok]
    for requests in history.by_key("acquire").values():
        bad += _backwards([one for one in requests if one.ok])
    times = Counter(one.token for one in grants)
    bad += [(one, f"token {one.token} was granted {times[one.token]} times") for one in grants if times[one.token] > 1]
    witnessed = history.by_key("granted")
    for key, recorded in witnessed.items():
        recorded.sort(key=lambda one: int(one.details["order"]))
        for before, after in itertools.pairwise(recorded):
            if after.token <= before.token:
                bad.append((after, f"the server granted {key!r} under {before.token}, and then under {after.token}"))
    return make_finding("token order", history, len(grants) + sum(map(len, witnessed.values())), bad)


def _backwards(grants: list[Operation]) -> list[tuple[Operation, str]]:
    """Return the grants that were requested after a higher token had been acknowledged."""
    bad: list[tuple[Operation, str]] = []
    acknowledged = sorted(grants, key=lambda one: one.returned)
    index, highest = 0, None
    for one in sorted(grants, key=lambda one: one.called):
        while index < len(acknowledged) and acknowledged[index].returned < one.called:
            if highest is None or acknowledged[index].token > highest.token:
                highest = acknowledged[index]
            index += 1
        if highest is not None and one.token < highest.token:
            bad.append((one, f"requested after token {highest.token} had been granted"))
    return bad
