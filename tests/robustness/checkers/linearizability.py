"""Check that each lock by itself is linearizable with respect to a fenced mutex.

If no event can have ended a lease early, no other client holds the lock before the ttl has passed, unless the lock was
released.
"""

from __future__ import annotations

import dataclasses
import math

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.checkers.early_ends import believable, earliest, force_released
from tests.robustness.history.models import FencedMutex, linearize
from tests.robustness.history.record import UNKNOWN, History, Operation

KINDS = ("acquire", "believe", "renew", "release", "force")


def check(history: History) -> Finding:
    """Search for an order of each lock's operations. Refused operations and those without a token say nothing."""
    bad: list[tuple[Operation, str]] = []
    checked = 0
    since = force_released(history)
    model = FencedMutex(earliest(history))
    recorded = history.by_key("granted")
    for key, operations in history.by_key(*KINDS).items():
        reported = [one for one in operations if "token" in one.details and one.outcome != "failed"]
        reported = [
            _with_unknown_outcome(one)
            for one in believable(reported, since)
            if one.ok or one.kind in ("release", "force")
        ]
        checked += len(reported)
        where = linearize(model, [*reported, *_unreported(reported, recorded.get(key, []))])
        if where is not None:
            bad.append((where, f"no order of the operations explains this reply of lock {key!r}"))
    return make_finding("linearizability", history, checked, bad)


def _unreported(reported: list[Operation], recorded: list[Operation]) -> list[Operation]:
    """Return the grants that the server recorded and no client reported, as operations of unknown outcome.

    This happens if a reply is lost, and the grant is force-released before a retry finds it: the client then gets
    another grant.
    """
    acknowledged = {one.token: one.called for one in reported if one.kind == "acquire"}
    return [
        # Grants are made in the order of their tokens, so not before the previous one was requested.
        dataclasses.replace(
            one,
            kind="acquire",
            outcome=UNKNOWN,
            called=max((called for token, called in acknowledged.items() if token < one.token), default=-math.inf),
            returned=math.inf,
        )
        for one in recorded
        if one.token not in acknowledged
    ]


def _with_unknown_outcome(one: Operation) -> Operation:
    """Give the release of a lost lease an unknown outcome: it frees the lock if the lease turns out to be held."""
    if one.kind == "release" and one.details.get("freed") is False:
        details = {name: value for name, value in one.details.items() if name != "freed"}
        return dataclasses.replace(one, outcome=UNKNOWN, returned=math.inf, details=details)
    return one
