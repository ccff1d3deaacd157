"""Check that the lock of a frozen or dead holder goes to the next waiter within the ttl and a bound.

The bound covers how late a waiter may poll, and a busy machine. Three cases are not judged: a holder that resumes
before its lease has expired, a lock for which one of the waiting processes was stopped at the time and may keep its
ticket for a while, and a lock whose next grant was never reported to a client.
"""

from __future__ import annotations

import bisect
import itertools
import math

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.history.record import History, Operation

BOUND = 1.5
"""Seconds beyond the ttl: a waiter that misses its wake-up polls within a second. The rest is for a busy machine."""

LONGEST = 60.0
"""Seconds. No client waits for longer."""


def check(history: History) -> Finding:
    """For each holder that was struck while clients waited, find when one of them was granted the lock."""
    bad: list[tuple[Operation, str]] = []
    checked = 0
    strikes = [one for one in history.faults if "victim" in one.details]
    released = {(one.key, one.details.get("token")): one.called for one in history.of("release")}
    recorded = {key: sorted(one.token for one in some) for key, some in history.by_key("granted").items()}
    for key, requests in history.by_key("acquire").items():
        reported = {one.token for one in requests if one.ok}
        acknowledged = sorted((one for one in requests if one.ok), key=lambda one: one.returned)
        newest = list(itertools.accumulate(acknowledged, _newer))
        times, begun = [one.returned for one in acknowledged], [one.called for one in requests]
        for strike in strikes:
            index = bisect.bisect_right(times, strike.called) - 1
            if index < 0 or newest[index].process != strike.details["victim"]:
                continue
            holder = newest[index]
            ttl = float(holder.details["ttl"])
            bound = strike.called + ttl + BOUND
            if released.get((key, holder.token), math.inf) <= strike.called or strike.details.get("seconds", ttl) < ttl:
                continue
            these = requests[bisect.bisect_left(begun, strike.called - LONGEST) : bisect.bisect_left(begun, bound)]
            wanted = [one for one in these if one.returned > strike.called]
            waited = [one for one in wanted if one.called < strike.called and one.process != holder.process]
            if waited and any(one.ok and one.token > holder.token and one.returned <= bound for one in wanted):
                checked += 1
                continue
            late = [one for one in waited if bound < one.returned < math.inf]
            after = recorded.get(key, [])
            next_one = bisect.bisect_right(after, holder.token)
            unknown = next_one < len(after) and after[next_one] not in reported
            if late and not unknown and not _stopped(strikes, strike.called, bound) & {one.process for one in wanted}:
                checked += 1
                what = f"waited past {bound:.3f} for a lock whose holder was struck at {strike.called:.3f}"
                bad.append((late[0], what))
    return make_finding("takeover in time", history, checked, bad)


def _newer(one: Operation, other: Operation) -> Operation:
    return one if one.token > other.token else other


def _stopped(strikes: list[Operation], since: float, until: float) -> set[str]:
    """Return the processes that were stopped for at least a part of this time. Dead waiters are passed over at once."""
    return {
        str(one.details["victim"])
        for one in strikes
        if "seconds" in one.details and one.called < until and one.returned > since
    }
