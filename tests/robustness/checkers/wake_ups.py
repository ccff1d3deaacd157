"""Check that one release wakes one waiter: each lock had at least as many causes as wake-ups by the time of each.

A wake-up comes after its cause. A cause is a release, whether it was recorded or not; a wait that was given up, which
passes on a wake-up that it may have received; or a force-release at once. A single try does not wait, and so it wakes
no waiter, unless its outcome is unknown.
"""

from __future__ import annotations

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.history.record import History, Operation


def check(history: History) -> Finding:
    """Count for each lock the wake-ups and their possible causes, in the order of time."""
    bad: list[tuple[Operation, str]] = []
    woken = {key: recorded for key, recorded in history.by_key("woken").items() if key}
    causes = history.by_key("acquire", "release", "force")
    reported = {(one.key, one.token) for one in history.of("acquire") if one.ok}
    unreported: dict[str, int] = {}
    for one in history.of("granted"):
        # A grant that was reported to no client has been released by some process at some time.
        if (one.key, one.token) not in reported:
            unreported[one.key] = unreported.get(one.key, 0) + 1
    for key, recorded in woken.items():
        times = sorted(one.called for one in causes.get(key, []) if _may_wake(one))
        index, allowed = 0, unreported.get(key, 0)
        for number, one in enumerate(sorted(recorded, key=lambda one: one.returned), 1):
            while index < len(times) and times[index] <= one.returned:
                index += 1
            if number > allowed + index:
                bad.append((one, f"{number} wake-ups for {allowed + index} causes"))
                break
    return make_finding("one wake-up per release", history, sum(map(len, woken.values())), bad)


def _may_wake(one: Operation) -> bool:
    """Return whether the operation can have woken a waiter."""
    if one.kind == "acquire":
        return one.outcome == "unknown" or (one.outcome == "failed" and one.details.get("timeout") != 0)
    if one.kind == "force":
        return bool(one.details.get("now", True))
    # The release of a lost lease reports that nothing was freed, whether or not the lock was.
    return one.outcome != "failed"
