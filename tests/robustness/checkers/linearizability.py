"""Each lock, taken by itself, answers as a fenced mutex would that does one thing at a time.

Where nothing can have cut a lease short, nobody has the lock before its ttl is over, unless it was released.
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
    """Search for an order of each lock's operations; what was refused, or has no token, says nothing."""
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
            bad.append((where, f"lock {key!r} cannot have answered so, whatever the order"))
    return found("linearizability", history, looked_at, bad)


def _unheard_of(told: list[Operation], noted: list[Operation]) -> list[Operation]:
    """Return the grants that the server has noted and nobody was told of, as operations of unknown outcome.

    So it is when the answer is lost, and the grant is forced before it is found again: who asked is granted another.
    """
    answered = {one.token: one.called for one in told if one.kind == "acquire"}
    return [
        # Grants are made in the order of tokens: not before the one before it was asked for.
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
    """Take a release of what was lost as one that nobody can tell of: it gives back what turns out to be held still."""
    if one.kind == "release" and one.said.get("freed") is False:
        said = {name: value for name, value in one.said.items() if name != "freed"}
        return dataclasses.replace(one, outcome=UNKNOWN, returned=math.inf, said=said)
    return one
