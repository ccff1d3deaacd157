"""Check the log of an election: one term after another, each with its end, and none missing."""

from __future__ import annotations

import itertools

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.history.record import History, Operation

CLOCK_STEP = 0.001
"""Seconds by which two readings of the database's clock may be out of order: a float rounds them."""


def check(history: History) -> Finding:
    """Find terms that overlap, are missing or have no end, in the log that the database kept."""
    bad: list[tuple[Operation, str]] = []
    log = sorted(history.of("term"), key=lambda one: one.token)
    times_tell = not history.clock_was_set
    for before, after in itertools.pairwise(log):
        if after.details["number"] != before.details["number"] + 1:
            bad.append((after, f"its number follows {before.details['number']}"))
        if before.details["ended"] is None:
            bad.append((before, f"it has no end, and {after.token} came after it"))
        elif times_tell and before.details["ended"] > after.details["began"] + CLOCK_STEP:
            bad.append((after, f"it began before the term {before.token} had ended"))
    kept, elections = {one.token for one in log}, {one.key for one in log}
    acquired = [] if history.state_was_lost else history.of("acquire")
    bad += [
        (one, "this candidate led, and the log does not have its term")
        for one in acquired
        if one.ok and one.token not in kept and (one.key in elections or one.key.startswith("election:"))
    ]
    return make_finding("term log", history, len(log), bad)
