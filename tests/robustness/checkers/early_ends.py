"""Find the leases in a history that may end before their ttl; shared by the checkers of what holders believe."""

from __future__ import annotations

import math
from collections import defaultdict

from tests.robustness.history.record import History, Operation

LEASE_SAFE_FAULTS = frozenset({"none", "freeze", "freeze-past", "kill", "reap"})
"""The faults that end no lease before its ttl, except the leases of their victim."""

CLOCK_RATIO = 0.99
"""The least part of a ttl that passes on our clock while the database counts the whole ttl: the two clocks differ."""


def force_released(history: History) -> dict[int, float]:
    """Return the tokens whose locks were force-released at once, each with the earliest moment of that."""
    found: dict[int, float] = {}
    for one in history.of("force"):
        if one.details.get("now") and one.outcome != "failed" and one.details.get("freed", True):
            found[one.token] = min(one.called, found.get(one.token, math.inf))
    return found


def believable(operations: list[Operation], since: dict[int, float]) -> list[Operation]:
    """Leave out what the holders of force-released locks recorded afterwards: they could not know of the release."""
    return [
        one
        for one in operations
        if one.kind in ("acquire", "force") or one.returned <= since.get(one.details.get("token", 0), math.inf)
    ]


def earliest(history: History) -> dict[int, float]:
    """Return for each token the moment before which no other client can hold its lock, unless the lock was released.

    That moment is at least one ttl after the grant. The grant was made after its request, and after every moment at
    which the previous holder still held the lock. A renewal makes the moment later. The moment is unknown for the
    holders that were killed, and for all holders under a fault that may separate a client from the database.
    """
    if any(one.key not in LEASE_SAFE_FAULTS for one in history.faults):
        return {}
    victims = {str(one.details["victim"]) for one in history.faults if one.key == "kill"}
    found: dict[int, float] = {}
    lives: dict[str, list[Operation]] = history.by_key("acquire", "believe", "renew", "release")
    for operations in lives.values():
        # Until when each token is known to have been held.
        seen: dict[int, float] = defaultdict(lambda: -math.inf)
        for one in operations:
            if one.ok and "token" in one.details and one.details.get("freed", True) and one.kind != "acquire":
                seen[one.token] = max(seen[one.token], one.called)
        last = -math.inf
        for grant in sorted((one for one in operations if one.kind == "acquire" and one.ok), key=lambda one: one.token):
            if grant.process not in victims and "ttl" in grant.details:
                found[grant.token] = max(grant.called, last) + grant.details["ttl"] * CLOCK_RATIO
            last = max(last, grant.called, seen[grant.token])
        ttls = {
            one.token: one.details["ttl"]
            for one in operations
            if one.kind == "acquire" and one.ok and "ttl" in one.details
        }
        for one in operations:
            if one.kind == "renew" and one.ok and one.token in found and one.token in ttls:
                found[one.token] = max(found[one.token], one.called + ttls[one.token] * CLOCK_RATIO)
    return found
