"""One release wakes one waiter: no lock wakes more than there were ends of grants or of waits to cause it, by then.

A wake-up comes after what caused it: a grant that was given back, with or without a word of it; a wait that was given
up, which passes the wake-up on that it may have had; a lock that was freed by force. A single try waits for nothing and
so wakes nobody, unless nobody can tell how it ended.
"""

from __future__ import annotations

from tests.robustness.checkers import Finding, found
from tests.robustness.history.record import History, Operation


def check(history: History) -> Finding:
    """Count for each lock the wake-ups, and what can have caused one each, in the order of time."""
    bad: list[tuple[Operation, str]] = []
    woken = {key: noted for key, noted in history.by_key("woken").items() if key}
    causes = history.by_key("acquire", "release", "force")
    told = {(one.key, one.token) for one in history.of("acquire") if one.ok}
    silent: dict[str, int] = {}
    for one in history.of("granted"):
        # A grant that nobody was told of was given back by somebody at some time.
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
    """Tell whether it can have woken somebody."""
    if one.kind == "acquire":
        return one.outcome == "unknown" or (one.outcome == "failed" and one.said.get("timeout") != 0)
    if one.kind == "force":
        return bool(one.said.get("now", True))
    # Of one that was lost before it is told that nothing was freed, whether or not.
    return one.outcome != "failed"
