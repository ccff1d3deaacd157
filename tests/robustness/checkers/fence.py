"""Check that a resource accepts nothing below an accepted or claimed token, and refuses nothing without reason.

Take two writes to one resource, the second sent after the reply to the first. If both were accepted, the second has
the higher pair of token and write number. Likewise after a claim, whether alone or together with a grant: no write
below its token is accepted. A refused write had a token below some other token that had been presented, or may have
been presented, by then.
"""

from __future__ import annotations

import math
from collections import defaultdict

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.history.record import History, Operation

Pair = tuple[int, int]


def check(history: History) -> Finding:
    """Compare each write with the replies received before the write was sent."""
    bad: list[tuple[Operation, str]] = []
    checked = 0
    writes = history.by_key("write")
    presented: dict[str, list[Operation]] = defaultdict(list)
    for one in history.of("claim"):
        presented[one.key].append(one)
    for one in history.of("acquire"):
        for resource in one.details.get("claims", ()):
            presented[resource].append(one)
    for key, written in writes.items():
        checked += len(written)
        bad += _accepted_below(written, presented.get(key, []))
        bad += _refused_without_reason(written, presented.get(key, []))
    return make_finding("fence", history, checked, bad)


def _pair(one: Operation) -> Pair:
    """Return the token and number of a write. A write without a number of its own may repeat its token."""
    return one.token, int(one.details.get("number", 0))


def _accepted_below(written: list[Operation], claims: list[Operation]) -> list[tuple[Operation, str]]:
    bad: list[tuple[Operation, str]] = []
    # A claim is below every write with its token.
    acknowledged = [(one.returned, (one.token, -1), one) for one in claims if one.ok]
    acknowledged += [(one.returned, _pair(one), one) for one in written if one.ok]
    acknowledged.sort(key=lambda item: item[0])
    index = 0
    highest: tuple[Pair, Operation] | None = None
    for one in sorted((one for one in written if one.ok), key=lambda one: one.called):
        while index < len(acknowledged) and acknowledged[index][0] < one.called:
            if highest is None or acknowledged[index][1] > highest[0]:
                highest = acknowledged[index][1], acknowledged[index][2]
            index += 1
        if highest is None:
            continue
        pair, before = highest
        repeated = pair == _pair(one) and "number" in one.details
        if _pair(one) < pair or repeated:
            bad.append((one, f"accepted after {before}"))
    return bad


def _refused_without_reason(written: list[Operation], claims: list[Operation]) -> list[tuple[Operation, str]]:
    """Return the refused writes for which no higher token can have been presented by then."""
    bad: list[tuple[Operation, str]] = []
    # A grant that was not acknowledged, or was undone, may have claimed under a token that no client reported.
    reasons = [(one.called, (one.token, -1) if one.ok or one.kind == "claim" else (math.inf, 0)) for one in claims]
    reasons += [(one.called, _pair(one)) for one in written if one.outcome != "failed"]
    reasons.sort(key=lambda item: item[0])
    index, highest = 0, (-math.inf, 0.0)
    for one in sorted((one for one in written if one.outcome == "failed"), key=lambda one: one.returned):
        if "Stale" not in str(one.details.get("error", "Stale")):
            continue
        while index < len(reasons) and reasons[index][0] <= one.returned:
            highest = max(highest, reasons[index][1])
            index += 1
        if highest <= _pair(one):
            bad.append((one, "refused as stale, but no client has presented a higher token"))
    return bad
