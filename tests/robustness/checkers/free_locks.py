"""Check that a try of a free lock is granted.

A lock is certainly free if, for a while before the try and during it, no other request for the lock was open, no ticket
of one could be left, and no grant of it could still be held. A refusal is then wrong. A try that was refused leaves
nothing behind, so other refused tries do not count.
"""

from __future__ import annotations

import math

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.history.record import History, Operation

SETTLED = 0.5
"""Seconds before the try in which nothing else may happen to the lock."""

LEAVING = 3.5
"""Seconds that the ticket of a waiter without a grant may stay in the queue at most."""


def check(history: History) -> Finding:
    """Judge every refused try of a lock that no other client can have used at that time."""
    bad: list[tuple[Operation, str]] = []
    checked = 0
    freed = {(one.key, one.token): one.returned for one in history.of("release") if one.ok}
    for key, requests in history.by_key("acquire").items():
        used = [(one.called, _until(one, freed), one) for one in requests if not _is_refused_try(one)]
        for one in requests:
            if one.details.get("timeout") != 0 or math.isinf(one.returned):
                continue
            begin = one.called - SETTLED
            if any(other is not one and since < one.returned and begin < until for since, until, other in used):
                continue
            checked += 1
            if _is_refused_try(one):
                bad.append((one, f"a try of lock {key!r} was refused, although no client had it or waited for it"))
    return make_finding("free lock granted", history, checked, bad)


def _is_refused_try(one: Operation) -> bool:
    return one.details.get("timeout") == 0 and one.outcome == "failed"


def _until(one: Operation, freed: dict[tuple[str, int], float]) -> float:
    """Return the moment after which this request certainly leaves the lock alone."""
    if one.ok:
        return freed.get((one.key, one.token), math.inf)
    return one.returned + LEAVING if one.outcome == "failed" else math.inf
