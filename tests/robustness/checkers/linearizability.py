"""Check that each lock by itself is linearizable with respect to a fenced mutex.

If no event can have ended a lease early, no other client holds the lock before the ttl has passed, unless the lock was
released.
"""

from __future__ import annotations

import dataclasses
import math

from tests.robustness.checkers import Finding, found
from tests.robustness.checkers.excuses import believable, broken, earliest
from tests.robustness.history.models import FencedMutex, linearize
from tests.robustness.history.record import UNKNOWN, History, Operation

KINDS = ("acquire", "believe", "renew", "release", "force")


def check(history: History) -> Finding:
    """Search for an order of each lock's operations. Refused operations and those without a token say nothing."""
    bad: list[tuple[Operation, str]] = []
    looked_at = 0
    since = broken(history)
    model = FencedMutex(earliest(history))
    noted = history.by_key("granted")
    for key, operations in history.by_key(*KINDS).items():
        told = [one for one in operations if "token" in one.said and one.outcome != "failed"]
        told = [_as_it_was(one) for one in believable(told, since) if one.ok or one.kind in ("release", "force")]
        looked_at += len(told)
        where = linearize(model, [*told, *_unheard_of(told, noted.get(key, []))])
        if where is not None:
            bad.append((where, f"no order of the operations explains this reply of lock {key!r}"))
    return found("linearizability", history, looked_at, bad)


def _unheard_of(told: list[Operation], noted: list[Operation]) -> list[Operation]:
    """Return the grants that the server recorded and no client reported, as operations of unknown outcome.

    This happens if a reply is lost, and the grant is force-released before a retry finds it: the client then gets
    another grant.
    """
    answered = {one.token: one.called for one in told if one.kind == "acquire"}
    return [
        # Grants are made in the order of their tokens, so not before the previous one was requested.
        dataclasses.replace(
            one,
            kind="acquire",
            outcome=UNKNOWN,
            called=max((called for token, called in answered.items() if token < one.token), default=-math.inf),
            returned=math.inf,
        )
        for one in noted
        if one.token not in answered
    ]


def _as_it_was(one: Operation) -> Operation:
    """Give the release of a lost lease an unknown outcome: it frees the lock if the lease turns out to be held."""
    if one.kind == "release" and one.said.get("freed") is False:
        said = {name: value for name, value in one.said.items() if name != "freed"}
        return dataclasses.replace(one, outcome=UNKNOWN, returned=math.inf, said=said)
    return one
