"""Check what was written under the fence of a term: never a stale term after a later one."""

from __future__ import annotations

import itertools

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.history.record import History


def check(history: History) -> Finding:
    """Find writes that a fence accepted from a term after it had accepted one of a later term."""
    written = sorted(history.of("led"), key=lambda one: int(one.details["order"]))
    bad = [
        (after, f"accepted after a write of the term {before.token}")
        for before, after in itertools.pairwise(written)
        if after.token < before.token
    ]
    led = {one.token for one in history.of("term")}
    bad += [(one, "accepted from a candidate that never led") for one in written if one.token not in led]
    return make_finding("term fence", history, len(written), bad)
