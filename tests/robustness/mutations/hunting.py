"""Hunt a bug: insert it, play the scenario that should provoke it, and see which checker finds it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tests.robustness.mutations import ONLY_SLOW, Bug, all_bugs
from tests.robustness.scenarios import Outcome, Scenario, play


class Caught(NamedTuple):
    """The checkers that found the bug, the number of operations until the first of them did, and the total duration."""

    checkers: list[str]
    operations: int
    seconds: float
    runs: int


def hunt(bug: Bug, seeds: Iterable[int] = range(5)) -> Caught | None:
    """Play the bug's scenario with the bug until one of its checkers finds it; return None if none does."""
    operations, seconds = 0, 0.0
    for runs, seed in enumerate(seeds, 1):
        outcome = play(scenario(bug), seed, bug=bug.name)
        seconds += outcome.seconds
        found = [one for one in outcome.findings if one.violations and one.checker in bug.found_by]
        if found:
            found.sort(key=lambda one: one.after or 0)
            return Caught([one.checker for one in found], operations + (found[0].after or 0), seconds, runs)
        operations += len(outcome.history)
    return None


def control(bug: Bug, seed: int = 0) -> Outcome:
    """Play the bug's scenario without the bug, but with all its delays."""
    return play(scenario(bug), seed, bug=bug.name + ONLY_SLOW)


def hunt_and_control(name: str, with_control: bool) -> tuple[Caught | None, list[str]]:
    """Hunt a bug, and return what a control run found too, if one is wanted."""
    bug = all_bugs()[name]
    caught = hunt(bug)
    outcome = control(bug) if with_control else None
    return caught, [*outcome.violations, *map(str, outcome.trouble)] if outcome else []


def scenario(bug: Bug) -> Scenario:
    """Return the scenario that should provoke the bug."""
    return Scenario(bug.workload, bug.fault, bug.workers, bug.seconds, bug.strikes, dict(bug.options), in_memory=True)
