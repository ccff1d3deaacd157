"""Check that a force-released lease is not renewed any more, and cannot be force-released again once it was freed."""

from __future__ import annotations

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.history.record import History, Operation


def check(history: History) -> Finding:
    """Find renewals that began after the operator had received the reply."""
    taken: dict[tuple[str, int], Operation] = {}
    for one in history.of("force"):
        if one.ok and one.details.get("taken") and (one.key, one.token) not in taken:
            taken[one.key, one.token] = one
    bad: list[tuple[Operation, str]] = []
    for one in history.of("renew", "force"):
        first = taken.get((one.key, int(one.details.get("token", 0))))
        if first is None or not one.ok or one.called <= first.returned:
            continue
        if one.kind == "renew":
            bad.append((one, f"renewed after it was force-released: {first}"))
        elif first.details.get("now") and one.details.get("taken"):
            bad.append((one, f"force-released again after it had been freed: {first}"))
    return make_finding("forced", history, len(taken), bad)
