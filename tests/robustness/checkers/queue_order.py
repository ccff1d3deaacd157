"""Check that grants follow the tickets, and that no ticket is left behind.

The server's own records give the order of events. A grant that redeemed a ticket came before the grants of all waiters
behind it in the queue, so of two grants with tickets, the later one has the later ticket. A client without a ticket is
granted the lock only if the queue is empty. Tickets that were given up, or passed over because their waiter was dead or
sent no heartbeat in time, are deleted and do not count any more.
"""

from __future__ import annotations

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.checkers.early_ends import LEASE_SAFE_FAULTS
from tests.robustness.history.record import History, Operation


def check(history: History) -> Finding:
    """Go through the server's records of each lock and rebuild its queue."""
    bad: list[tuple[Operation, str]] = []
    checked = 0
    struck = {one.key for one in history.faults}
    if struck <= LEASE_SAFE_FAULTS:
        for recorded in history.by_key("queued", "left", "served").values():
            recorded.sort(key=lambda one: int(one.details["order"]))
            checked += sum(one.kind == "served" for one in recorded)
            # Dead waiters are passed over before their tickets are deleted.
            bad += _out_of_turn(recorded, only_if_served="kill" in struck)
    bad += [(one, "a ticket that no waiter will redeem") for one in history.of("orphan")]
    bad += [(one, "no other client wanted the lock, but it could not be acquired") for one in history.of("stuck")]
    return make_finding("queue order", history, checked, bad)


def _out_of_turn(recorded: list[Operation], only_if_served: bool) -> list[tuple[Operation, str]]:
    """Return the grants that came before a waiter further ahead; if `only_if_served`, one that was served later."""
    bad: list[tuple[Operation, str]] = []
    acts = {one.details["act"]: one.details["attempt"] for one in recorded if one.kind == "served"}
    # The tickets that were deleted by a grant of the lock, in the same transaction.
    redeemed = {
        _ticket_key(one)
        for one in recorded
        if one.kind == "left" and acts.get(one.details["act"]) == one.details["attempt"]
    }
    waiting: dict[tuple[str, int], Operation] = {}
    deleted: dict[str, Operation] = {}
    """Tickets that were deleted in the transaction of a grant, just before the grant was recorded."""
    for one in recorded:
        if one.kind == "queued":
            waiting[_ticket_key(one)] = one
        elif one.kind == "left":
            ticket = waiting.pop(_ticket_key(one), None)
            if ticket is not None:
                deleted[one.details["act"]] = ticket
        else:
            attempt = one.details["attempt"]
            mine = next((ticket for ticket in waiting.values() if ticket.details["attempt"] == attempt), None)
            left = deleted.get(one.details["act"])
            if mine is None and left is not None and left.details["attempt"] == attempt:
                mine = left
            for key, ticket in waiting.items():
                ahead = mine is None or ticket.details["order"] < mine.details["order"]
                if ticket is not mine and ahead and (key in redeemed or not only_if_served):
                    bad.append(
                        (one, f"served before {ticket.details['attempt']}, which has ticket {ticket.details['ticket']}")
                    )
                    break
    return bad


def _ticket_key(one: Operation) -> tuple[str, int]:
    return one.details["attempt"], one.details["ticket"]
