"""Check that grants follow the tickets, and that no ticket is left behind.

The server's own records give the order of events. A grant that redeemed a ticket came before the grants of all waiters
behind it in the queue, so of two grants with tickets, the later one has the later ticket. A client without a ticket is
granted the lock only if the queue is empty. Tickets that were given up, or passed over because their waiter was dead or
sent no heartbeat in time, are deleted and do not count any more.
"""

from __future__ import annotations

from tests.robustness.checkers import Finding, found
from tests.robustness.checkers.excuses import SPARING
from tests.robustness.history.record import History, Operation


def check(history: History) -> Finding:
    """Go through the server's records of each lock and rebuild its queue."""
    bad: list[tuple[Operation, str]] = []
    looked_at = 0
    struck = {one.key for one in history.faults}
    if struck <= SPARING:
        for noted in history.by_key("lined up", "left", "served").values():
            noted.sort(key=lambda one: int(one.said["order"]))
            looked_at += sum(one.kind == "served" for one in noted)
            # Dead waiters are passed over before their tickets are deleted.
            bad += _out_of_turn(noted, only_if_served="kill" in struck)
    bad += [(one, "a ticket that no waiter will redeem") for one in history.of("ghost")]
    bad += [(one, "no other client wanted the lock, but it could not be acquired") for one in history.of("stuck")]
    return found("line", history, looked_at, bad)


def _out_of_turn(noted: list[Operation], only_if_served: bool) -> list[tuple[Operation, str]]:
    """Return the grants that came before a waiter further ahead; if `only_if_served`, one that was served later."""
    bad: list[tuple[Operation, str]] = []
    acts = {one.said["act"]: one.said["attempt"] for one in noted if one.kind == "served"}
    # The tickets that were deleted by a grant of the lock, in the same transaction.
    redeemed = {_place(one) for one in noted if one.kind == "left" and acts.get(one.said["act"]) == one.said["attempt"]}
    standing: dict[tuple[str, int], Operation] = {}
    own: dict[str, Operation] = {}
    """Tickets that were deleted in the transaction of a grant, just before the grant was recorded."""
    for one in noted:
        if one.kind == "lined up":
            standing[_place(one)] = one
        elif one.kind == "left":
            place = standing.pop(_place(one), None)
            if place is not None:
                own[one.said["act"]] = place
        else:
            attempt = one.said["attempt"]
            mine = next((place for place in standing.values() if place.said["attempt"] == attempt), None)
            left = own.get(one.said["act"])
            if mine is None and left is not None and left.said["attempt"] == attempt:
                mine = left
            for key, place in standing.items():
                ahead = mine is None or place.said["order"] < mine.said["order"]
                if place is not mine and ahead and (key in redeemed or not only_if_served):
                    bad.append((one, f"served before {place.said['attempt']}, which has ticket {place.said['ticket']}"))
                    break
    return bad


def _place(one: Operation) -> tuple[str, int]:
    return one.said["attempt"], one.said["ticket"]
