"""The model of the protocol holds, and does not hold with any of the bugs that are put into it."""

from __future__ import annotations

import shutil

import pytest

from spec import check

pytestmark = [
    pytest.mark.skipif(not (shutil.which("spin") and shutil.which("gcc")), reason="needs spin and gcc"),
    pytest.mark.timeout(900),
]

QUICK = ("asking", "LOST_WAKEUP")


def some(names: dict[str, list[str]]) -> list[object]:
    """Mark as long what takes more than a few seconds, or is like the others."""
    return [pytest.param(name, id=name, marks=[] if name.startswith(QUICK) else [pytest.mark.long]) for name in names]


@pytest.mark.parametrize("setting", some(check.SETTINGS))
def test_the_protocol_holds(setting: str) -> None:
    found = check.search([*check.SETTINGS[setting], "N=2"])
    assert found.error is None
    assert found.states > 100_000, "there was something to search"


@pytest.mark.long
def test_the_protocol_holds_for_three() -> None:
    assert check.search(["N=3"]).error is None


@pytest.mark.parametrize("bug", some(check.BUGS))
def test_a_bug_is_found_out(bug: str) -> None:
    flags = check.BUGS[bug]
    assert check.search([f"BUG_{bug}", *(flags if "N=3" in flags else [*flags, "N=2"])]).error is not None
