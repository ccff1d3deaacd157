"""First come, first served: grants follow the places in line, and nobody is left standing in it.

What the server noted is the order of things. A grant that redeemed a place came to it before everybody who stood in
line behind; so of two grants with places, the later one has the later place. Somebody without a place is granted the
lock only when nobody stands in line. Places that were given up or passed over, of the dead and of those who were not
heard of in time, are gone and count no more.
"""

from __future__ import annotations

from tests.robustness.checkers import Finding, found
from tests.robustness.checkers.excuses import SPARING
from tests.robustness.history.record import History, Operation


def check(history: History) -> Finding:
    """Go through what the server noted of each lock, and keep its line."""
    bad: list[tuple[Operation, str]] = []
    looked_at = 0
    struck = {one.key for one in history.faults}
    if struck <= SPARING:
        for noted in history.by_key("lined up", "left", "served").values():
            noted.sort(key=lambda one: int(one.said["order"]))
            looked_at += sum(one.kind == "served" for one in noted)
            # The dead are passed over before their places are taken from them.
            bad += _out_of_turn(noted, only_if_served="kill" in struck)
    bad += [(one, "a place in line that nobody waits at") for one in history.of("ghost")]
    bad += [(one, "nobody else wanted the lock, and it was not to be had") for one in history.of("stuck")]
    return found("line", history, looked_at, bad)


def _out_of_turn(noted: list[Operation], only_if_served: bool) -> list[tuple[Operation, str]]:
    """Return the grants that came before somebody who stood further ahead; of those who were served later, perhaps."""
    bad: list[tuple[Operation, str]] = []
    acts = {one.said["act"]: one.said["attempt"] for one in noted if one.kind == "served"}
    # The places that were left by being granted the lock, in one act with it.
    redeemed = {_place(one) for one in noted if one.kind == "left" and acts.get(one.said["act"]) == one.said["attempt"]}
    standing: dict[tuple[str, int], Operation] = {}
    own: dict[str, Operation] = {}
    """Places that were left in the act of being served, a moment before it was noted."""
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
                    bad.append((one, f"served before {place.said['attempt']}, who has place {place.said['ticket']}"))
                    break
    return bad


def _place(one: Operation) -> tuple[str, int]:
    return one.said["attempt"], one.said["ticket"]
