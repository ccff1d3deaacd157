"""Check that no money appears or disappears: every snapshot adds up, and the balances match the journal.

The journal has every acknowledged transfer once, no refused transfer, and no transfer that no worker made. Tokens rise
in the order of the journal. A reader's snapshot has every transfer acknowledged before the snapshot, and no transfer
begun after it.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.history.record import History, Operation


def check(history: History) -> Finding:
    """Check each snapshot, and the final journal."""
    transfers = [one for one in history.of("write") if "transfer" in one.details]
    sums = [one for one in history.of("sum") if one.ok]
    bad = [
        (one, f"the balances add up to {one.details['total']} instead of {one.details['should_be']}")
        for one in sums
        if one.details["total"] != one.details["should_be"]
    ]
    bad += _entries(sums, transfers)
    balances = history.of("balance")
    if balances:
        bad += _journal(history.of("entry"), transfers)
        bad += _balances(history.of("entry"), balances)
    return make_finding("bank", history, len(sums) + len(transfers), bad)


def _entries(sums: list[Operation], transfers: list[Operation]) -> list[tuple[Operation, str]]:
    bad: list[tuple[Operation, str]] = []
    done = sorted(one.returned for one in transfers if one.ok)
    begun = sorted(one.called for one in transfers if one.outcome != "failed")
    for one in sums:
        least, most = bisect.bisect_left(done, one.called), bisect.bisect_right(begun, one.returned)
        if not least <= one.details["entries"] <= most:
            bad.append((one, f"sees {one.details['entries']} journal entries, instead of {least} to {most}"))
    return bad


def _journal(entries: list[Operation], transfers: list[Operation]) -> list[tuple[Operation, str]]:
    bad: list[tuple[Operation, str]] = []
    times = Counter(one.details["transfer"] for one in entries)
    known = {one.details["transfer"]: one for one in transfers}
    for one in transfers:
        if one.ok and not times[one.details["transfer"]]:
            bad.append((one, "acknowledged, but not in the journal"))
        if one.outcome == "failed" and times[one.details["transfer"]]:
            bad.append((one, "refused, but still in the journal"))
    entries = sorted(entries, key=lambda one: int(one.details["order"]))
    for one in entries:
        if times[one.details["transfer"]] > 1:
            bad.append((one, f"in the journal {times[one.details['transfer']]} times"))
        if one.details["transfer"] not in known:
            bad.append((one, "in the journal, but no worker made it"))
    for before, after in itertools.pairwise(entries):
        if after.token < before.token:
            bad.append((after, f"in the journal after token {before.token}"))
    return bad


def _balances(entries: list[Operation], balances: list[Operation]) -> list[tuple[Operation, str]]:
    moved: dict[str, int] = defaultdict(int)
    for one in entries:
        moved[str(one.details["source"])] -= one.details["amount"]
        moved[str(one.details["target"])] += one.details["amount"]
    return [
        (one, f"the balance is {one.details['balance']}, but by the journal {one.details['before'] + moved[one.key]}")
        for one in balances
        if one.details["balance"] != one.details["before"] + moved[one.key]
    ]
