"""Check that one release wakes one waiter: each lock had at least as many causes as wake-ups by the time of each.

A wake-up comes after its cause. A cause is a release, whether it was recorded or not; a wait that was given up, which
passes on a wake-up that it may have received; or a force-release at once. A single try does not wait, and so it wakes
no waiter, unless its outcome is unknown.
"""

from __future__ import annotations

from tests.robustness.checkers import Finding, found
from tests.robustness.history.record import History, Operation


def check(history: History) -> Finding:
    """Count for each lock the wake-ups and their possible causes, in the order of time."""
    bad: list[tuple[Operation, str]] = []
    woken = {key: noted for key, noted in history.by_key("woken").items() if key}
    causes = history.by_key("acquire", "release", "force")
    told = {(one.key, one.token) for one in history.of("acquire") if one.ok}
    silent: dict[str, int] = {}
    for one in history.of("granted"):
        # A grant that was reported to no client has been released by some process at some time.
        if (one.key, one.token) not in told:
            silent[one.key] = silent.get(one.key, 0) + 1
    for key, noted in woken.items():
        times = sorted(one.called for one in causes.get(key, []) if _may_wake(one))
        place, allowed = 0, silent.get(key, 0)
        for number, one in enumerate(sorted(noted, key=lambda one: one.returned), 1):
            while place < len(times) and times[place] <= one.returned:
                place += 1
            if number > allowed + place:
                bad.append((one, f"{number} wake-ups for {allowed + place} causes"))
                break
    return found("one wake-up per release", history, sum(map(len, woken.values())), bad)


def _may_wake(one: Operation) -> bool:
    """Return whether the operation can have woken a waiter."""
    if one.kind == "acquire":
        return one.outcome == "unknown" or (one.outcome == "failed" and one.said.get("timeout") != 0)
    if one.kind == "force":
        return bool(one.said.get("now", True))
    # The release of a lost lease reports that nothing was freed, whether or not the lock was.
    return one.outcome != "failed"
