"""Each bug, inserted alone, is found by a checker that is meant for it, and the same run without it is clean."""

from __future__ import annotations

import pytest

from tests.robustness.mutations import Bug, all_bugs, edited
from tests.robustness.mutations.hunting import control, hunt

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("embedded_binaries")]

QUICK = (
    "row deleted on release",
    "loss ignored",
    "fence compares nothing",
    "decided slots are forgotten",
    "term without a beginning",
    "writer beside readers",
    "held permit granted again",
)
"""One bug of the tokens, one of the client, one of the resource, and one of each recipe and of each shared lock."""

BUGS = all_bugs()


def some(quick: tuple[str, ...]) -> list[object]:
    """Mark all but the quick ones as long, and of the quick ones all but the first for the second stage."""
    return [pytest.param(bug, id=name, marks=_when(name, quick)) for name, bug in BUGS.items()]


def _when(name: str, quick: tuple[str, ...]) -> list[pytest.MarkDecorator]:
    if name not in quick:
        return [pytest.mark.nightly]
    return [] if name == quick[0] else [pytest.mark.second_stage]


@pytest.mark.second_stage
@pytest.mark.parametrize("bug", some(QUICK))
def test_checker_finds_the_inserted_bug(bug: Bug) -> None:
    caught = hunt(bug)
    assert caught is not None, f"none of {bug.found_by} has found the bug, which {bug.what}"


@pytest.mark.parametrize("bug", some(()))
def test_control_run_without_the_bug_is_clean(bug: Bug) -> None:
    outcome = control(bug)
    assert not outcome.violations
    assert not outcome.trouble
    checked = {one.checker for one in outcome.findings if one.checked}
    assert checked & set(bug.found_by), "the checkers that should find the bug had nothing to check"


def test_every_bug_can_still_be_inserted() -> None:
    assert len(BUGS) >= 20
    for bug in BUGS.values():
        assert bug.found_by
        edits = edited(bug)
        assert bug.sql or bug.client or edits, bug.name
