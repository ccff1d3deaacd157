"""The hand-over checker accepts a lock that is handed over in time, and finds one that is not."""

from __future__ import annotations

import math
from typing import Any

from tests.robustness.checkers import hand_over
from tests.robustness.history.record import History, Operation


def op(kind: str, called: float, returned: float, process: str = "a", **details: Any) -> Operation:
    outcome = details.pop("outcome", "unknown" if math.isinf(returned) else "ok")
    return Operation(process, kind, details.pop("key", "k"), called, returned, outcome, details)


GRANT = op("acquire", 0, 1, token=1)
FREED = op("release", 20, 20.1, token=1, freed=True)
LATE = op("acquire", 19, 23, "b", token=2)
GIVEN_UP = op("acquire", 19, 24, "b", outcome="failed")


def violations(*operations: Operation) -> list[str]:
    return hand_over.check(History(operations)).violations


def hand_overs(seconds: float) -> list[Operation]:
    operations = [op("acquire", 0, 0.5, token=1)]
    for token in range(1, 21):
        operations.append(op("release", token, token + 0.01, f"p{token}", token=token, freed=True))
        operations.append(op("acquire", token - 0.1, token + 0.01 + seconds, f"p{token + 1}", token=token + 1))
    return operations


def test_checker_accepts_a_lock_handed_over_in_time() -> None:
    finding = hand_over.check(History([GRANT, FREED, op("acquire", 19, 20.2, "b", token=2)]))
    assert finding.violations == []
    assert finding.checked == 1


def test_checker_finds_a_free_lock_with_a_waiter() -> None:
    assert violations(GRANT, FREED, LATE)
    assert violations(GRANT, FREED, GIVEN_UP)
    assert violations(GRANT, FREED, op("acquire", 20.5, 23, "b", token=2))


def test_checker_accepts_a_lock_that_went_to_another_waiter_first() -> None:
    others = op("acquire", 20, 20.2, "c", token=2), op("acquire", 19, 23, "b", token=3)
    assert violations(GRANT, FREED, *others) == []


def test_checker_skips_a_lock_that_may_be_held() -> None:
    assert violations(GRANT, FREED, op("acquire", 20, math.inf, "c"), LATE) == []
    assert violations(GRANT, op("release", 20, 20.1, token=1, freed=False), LATE) == []
    assert violations(GRANT, op("release", 20, math.inf, token=1), LATE) == []


def test_checker_skips_the_time_around_a_fault() -> None:
    assert violations(GRANT, FREED, LATE, op("fault", 17, 17.1, "runner", key="kill")) == []
    assert violations(GRANT, FREED, LATE, op("fault", 1, 1.1, "runner", key="kill"))


def test_missing_wake_ups_show_in_the_median() -> None:
    assert violations(*hand_overs(0.01)) == []
    assert violations(*hand_overs(0.5))
