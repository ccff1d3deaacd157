"""Check that the faults had an effect, and that locks are granted again after the last one."""

from __future__ import annotations

import math

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.history.record import History, Operation


def _cancelled(history: History) -> bool:
    """Return whether a call was cancelled."""
    return any(str(one.details.get("error", "")).startswith(("Interrupted", "CancelledError")) for one in history)


def _forked(history: History) -> bool:
    """Return whether a child has tried to use a lease of its parent."""
    return any(one.details.get("leases") for one in history.of("child"))


TRACES = {"cancel": _cancelled, "fork": _forked}
"""How to tell whether a fault had an effect that the traffic's processes carry out themselves."""


def check(history: History) -> Finding:
    """Find a strike that had an effect, and a grant that was acknowledged after the last strike."""
    strikes = [one for one in history.faults if not math.isinf(one.returned)]
    bad: list[tuple[Operation, str]] = []
    if strikes:
        last = max(strikes, key=lambda one: one.returned)
        traces = TRACES.get(last.key)
        if all(one.details.get("no_effect") for one in strikes) or (traces is not None and not traces(history)):
            bad.append((last, f"none of {len(strikes)} strikes had an effect"))
        if not any(one.ok and one.returned > last.returned for one in history.of("acquire")):
            bad.append((last, "no lock was granted after it"))
    return make_finding("recovery", history, len(strikes), bad)
