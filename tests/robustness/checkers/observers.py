"""Check the observers of an election: each saw every beginning and every end, once and in order.

If the database has forgotten terms, an observer may have seen terms that the log does not have any more. It then
continues after the last token that it has seen, and passes over events with lower tokens.
"""

from __future__ import annotations

from collections import defaultdict

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.history.record import History, Operation

Event = tuple[int, str]


def check(history: History) -> Finding:
    """Compare what each observer saw with the log that the database kept. An observer may be behind the log."""
    expected: list[Event] = []
    for one in sorted(history.of("term"), key=lambda one: one.token):
        expected.append((one.token, "began"))
        if one.details["ended"] is not None:
            expected.append((one.token, "ended"))
    seen: dict[str, list[Operation]] = defaultdict(list)
    for one in history.of("observed"):
        seen[f"{one.process} {one.details['worker']}"].append(one)
    may_be_lost = history.state_was_lost
    bad = [found for one in seen.values() if (found := _compare(one, expected, may_be_lost))]
    return make_finding("observers", history, sum(map(len, seen.values())), bad)


def _compare(observations: list[Operation], expected: list[Event], may_be_lost: bool) -> tuple[Operation, str] | None:
    """Return the first observation that is wrong, and why; None if there is none."""
    places = {event: place for place, event in enumerate(expected)}
    following, lost = 0, 0
    for one in observations:
        place = places.get((one.token, one.details["what"]))
        if place is None and may_be_lost:
            lost = max(lost, one.token)
            continue
        while place is not None and following < place and expected[following][0] < lost:
            following += 1
        if place != following:
            if following == len(expected):
                return one, "the observer saw more than the log has"
            token, what = expected[following]
            return one, f"the observer should have seen that {token} {what}"
        following += 1
    return None
