"""Check which holders a read-write lock or a semaphore had at the same time.

A holder that was granted a share and later still believed in it held it in between. So two holders that exclude each
other, and whose times overlap, are a violation: a writer beside any other holder, two holders of one permit, or more
holders than permits. And between a writer and the reader that it became, no other writer was granted the lock.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.history.record import History, Operation


class Hold(NamedTuple):
    """A share, from when to when it was certainly held, and the grant and the last belief."""

    since: float
    until: float
    mode: str
    """`read`, `write` or `permit`."""
    grant: Operation
    last: Operation


def holds(history: History) -> dict[str, list[Hold]]:
    """Return the shares of each lock that were held for a while, in the order of their beginnings."""
    believed: dict[int, Operation] = {}
    for one in history.of("believe"):
        if one.token not in believed or one.called > believed[one.token].called:
            believed[one.token] = one
    found: dict[str, list[Hold]] = {}
    for key, requests in history.by_key("acquire").items():
        granted = [one for one in requests if one.ok and "mode" in one.details and one.token in believed]
        found[key] = sorted(
            Hold(one.returned, believed[one.token].called, one.details["mode"], one, believed[one.token])
            for one in granted
            if believed[one.token].called > one.returned
        )
    return found


def check(history: History) -> Finding:
    """Compare every holder with those that held a share when it did."""
    bad: list[tuple[Operation, str]] = []
    checked = 0
    for key, those in holds(history).items():
        current: list[Hold] = []
        for hold in those:
            current = [one for one in current if one.until > hold.since]
            bad += [(hold.last, f"{key!r}: {why}") for why in _conflicts(hold, current)]
            current.append(hold)
            checked += 1
    bad += _between(history)
    return make_finding("linearizability", history, checked, bad)


def _conflicts(hold: Hold, others: list[Hold]) -> list[str]:
    token = hold.grant.token
    if hold.mode != "permit":
        excluded = [one for one in others if "write" in (one.mode, hold.mode)]
        return [f"{token} ({hold.mode}) beside {one.grant.token} ({one.mode})" for one in excluded]
    details = hold.grant.details
    found = []
    if not 0 <= details["permit"] < details["permits"]:
        found.append(f"{token} has permit {details['permit']} of {details['permits']}")
    if len(others) >= details["permits"]:
        found.append(f"{token} is one of {len(others) + 1} holders, and there are {details['permits']} permits")
    return found + [
        f"{token} has permit {details['permit']}, as {one.grant.token} has"
        for one in others
        if one.grant.details["permit"] == details["permit"]
    ]


def _between(history: History) -> list[tuple[Operation, str]]:
    """Return the readers that were writers before, if another writer was granted the lock in between."""
    writers = {key: [one.token for one in some] for key, some in history.by_key("granted").items()}
    return [
        (one, f"{one.key!r}: the writer {token} came between {one.details['writer']} and {one.token}")
        for one in history.of("acquire")
        if one.ok and "writer" in one.details
        for token in writers.get(f"{one.key}#writer", [])
        if one.details["writer"] < token < one.token
    ]
