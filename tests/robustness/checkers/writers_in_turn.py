"""Check that readers do not pass a writer that waits, so that a stream of readers cannot starve it.

A reader that asked long after a writer is granted the lock after that writer. Only runs without a fault are judged: a
client that is stopped or cut off loses its ticket.
"""

from __future__ import annotations

import bisect

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.history.record import History, Operation

QUEUED_WITHIN = 1.0
"""Seconds within which a writer that waits has its ticket, also on a busy machine."""


def check(history: History) -> Finding:
    """For each writer that waited, find a reader that came later and was granted the lock before it."""
    bad: list[tuple[Operation, str]] = []
    checked = 0
    for requests in history.by_key("acquire").values() if not history.faults else ():
        granted = [one for one in requests if one.ok and "writer" not in one.details]
        readers = [one for one in granted if one.details.get("mode") == "read"]
        asked = [one.called for one in readers]
        for writer in granted:
            if writer.details.get("mode") != "write":
                continue
            checked += 1
            later = readers[bisect.bisect_right(asked, writer.called + QUEUED_WITHIN) :]
            passed = [one for one in later if one.token < writer.token]
            if passed:
                what = f"{len(passed)} readers that asked later than this writer were granted the lock before it"
                bad.append((writer, what))
    return make_finding("writers in turn", history, checked, bad)
