"""The model of the protocol holds, and fails with each of its seeded bugs."""

from __future__ import annotations

import shutil

import pytest

from spec import check

pytestmark = [
    pytest.mark.skipif(not (shutil.which("spin") and shutil.which("gcc")), reason="needs spin and gcc"),
    pytest.mark.timeout(900),
]

QUICK = ("states CLAIMS", "LOST_WAKEUP", "states PERMITS=2", "WAKES_ONE readers", "DOWNGRADE_IN_TWO_STEPS")


def some(names: list[str]) -> list[object]:
    """Mark as long the searches that take more than a few seconds, or resemble the others."""
    return [pytest.param(name, id=name, marks=[] if name in QUICK else [pytest.mark.nightly]) for name in names]


SETTINGS = {f"{setting.kind} {setting.flags}".strip(): setting for setting in check.SETTINGS}


@pytest.mark.second_stage
@pytest.mark.parametrize("name", some([*SETTINGS]))
def test_protocol_model_has_no_violation(name: str) -> None:
    found = check.search(SETTINGS[name])
    assert found.error is None
    assert found.states > 10_000, "too few states were searched"


@pytest.mark.second_stage
@pytest.mark.parametrize("bug", some([*check.BUGS]))
def test_seeded_bug_violates_the_model(bug: str) -> None:
    assert check.seeded(bug).error in check.VIOLATIONS.values()


@pytest.mark.parametrize("name", some([*check.POSSIBLE]))
def test_model_reaches_each_state_that_should_be_possible(name: str) -> None:
    assert check.search(check.POSSIBLE[name], f"CAN_{name.split()[0]}").error is not None
