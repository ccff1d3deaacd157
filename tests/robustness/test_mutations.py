"""The checkers can find what they are for: each bug, put in alone, is found, and without it nothing is."""

from __future__ import annotations

import pytest

from tests.robustness.mutations import Bug, all_bugs, edited
from tests.robustness.mutations.hunting import control, hunt

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("embedded_binaries")]

QUICK = ("row deleted on release", "loss ignored", "fence compares nothing")
"""One of the tokens, one of the client, one of the resource."""

BUGS = all_bugs()


def some(quick: tuple[str, ...]) -> list[object]:
    """Mark as long all but a few, and of these all but the first for the second stage."""
    return [pytest.param(bug, id=name, marks=_when(name, quick)) for name, bug in BUGS.items()]


def _when(name: str, quick: tuple[str, ...]) -> list[pytest.MarkDecorator]:
    if name not in quick:
        return [pytest.mark.long]
    return [] if name == quick[0] else [pytest.mark.second_stage]


@pytest.mark.parametrize("bug", some(QUICK))
def test_a_bug_is_found(bug: Bug) -> None:
    caught = hunt(bug)
    assert caught is not None, f"none of {bug.found_by} has found that it {bug.what}"


@pytest.mark.parametrize("bug", some(()))
def test_control_run_without_the_mutation_is_clean(bug: Bug) -> None:
    outcome = control(bug)
    assert not outcome.violations
    assert not outcome.trouble
    looked_at = {one.checker for one in outcome.findings if one.looked_at}
    assert looked_at & set(bug.found_by), "those that should find the bug had something to look at"


def test_the_bugs_are_many_and_each_can_still_be_put_in() -> None:
    assert len(BUGS) >= 20
    for bug in BUGS.values():
        assert bug.found_by
        assert bug.sql or bug.client or edited(bug), bug.name
