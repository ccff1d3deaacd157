"""Check that the lock of a frozen or dead holder goes to the next waiter within the ttl and a bound.

The bound covers how late a waiter may poll, and a busy machine. Three cases are not judged: a holder that resumes
before its lease has expired, a lock for which one of the waiting processes was stopped at the time and may keep its
ticket for a while, and a lock whose next grant was never reported to a client.
"""

from __future__ import annotations

import bisect
import itertools
import math

from tests.robustness.checkers import Finding, found
from tests.robustness.history.record import History, Operation

BOUND = 1.5
"""Seconds beyond the ttl: a waiter that misses its wake-up polls within a second. The rest is for a busy machine."""

LONGEST = 60.0
"""Seconds. No client waits for longer."""


def check(history: History) -> Finding:
    """For each holder that was struck while clients waited, find when one of them was granted the lock."""
    bad: list[tuple[Operation, str]] = []
    looked_at = 0
    strikes = [one for one in history.faults if "victim" in one.said]
    let_go = {(one.key, one.said.get("token")): one.called for one in history.of("release")}
    noted = {key: sorted(one.token for one in some) for key, some in history.by_key("granted").items()}
    for key, asked in history.by_key("acquire").items():
        told = {one.token for one in asked if one.ok}
        answered = sorted((one for one in asked if one.ok), key=lambda one: one.returned)
        newest = list(itertools.accumulate(answered, _newer))
        times, begun = [one.returned for one in answered], [one.called for one in asked]
        for strike in strikes:
            place = bisect.bisect_right(times, strike.called) - 1
            if place < 0 or newest[place].process != strike.said["victim"]:
                continue
            holder = newest[place]
            ttl = float(holder.said["ttl"])
            bound = strike.called + ttl + BOUND
            if let_go.get((key, holder.token), math.inf) <= strike.called or strike.said.get("seconds", ttl) < ttl:
                continue
            these = asked[bisect.bisect_left(begun, strike.called - LONGEST) : bisect.bisect_left(begun, bound)]
            wanted = [one for one in these if one.returned > strike.called]
            waited = [one for one in wanted if one.called < strike.called and one.process != holder.process]
            if waited and any(one.ok and one.token > holder.token and one.returned <= bound for one in wanted):
                looked_at += 1
                continue
            late = [one for one in waited if bound < one.returned < math.inf]
            after = noted.get(key, [])
            next_one = bisect.bisect_right(after, holder.token)
            unknown = next_one < len(after) and after[next_one] not in told
            if late and not unknown and not _stopped(strikes, strike.called, bound) & {one.process for one in wanted}:
                looked_at += 1
                what = f"waited past {bound:.3f} for a lock whose holder was struck at {strike.called:.3f}"
                bad.append((late[0], what))
    return found("takeover in time", history, looked_at, bad)


def _newer(one: Operation, other: Operation) -> Operation:
    return one if one.token > other.token else other


def _stopped(strikes: list[Operation], since: float, until: float) -> set[str]:
    """Return the processes that were stopped for at least a part of this time. Dead waiters are passed over at once."""
    return {
        str(one.said["victim"])
        for one in strikes
        if "seconds" in one.said and one.called < until and one.returned > since
    }
