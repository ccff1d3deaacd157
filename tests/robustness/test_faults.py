"""Every fault describes itself, ends when it says so, and leaves the traffic able to continue."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.robustness import faults, matrix
from tests.robustness.faults import Fault, FaultUnavailable
from tests.robustness.scenarios import Outcome, Scenario, play
from tests.robustness.traffic import workloads
from tests.support.stages import first

ALL = faults.all_faults()

CHECKERS = {
    "linearizability",
    "token order",
    "loss reported first",
    "takeover in time",
    "one wake-up per release",
    "durability",
}


def played(fault: str, strikes: int, workers: int, folder: Path) -> Outcome:
    try:
        return play(Scenario("mutex", fault, workers, strikes=strikes), seed=1, folder=folder)
    except FaultUnavailable as error:
        pytest.skip(f"{fault}: {error}")


def continues(outcome: Outcome) -> bool:
    """Return whether locks were granted after the last strike had ended."""
    ended = max(one.returned for one in outcome.history.faults)
    return any(one.ok and one.called > ended for one in outcome.history.of("acquire"))


@pytest.mark.parametrize("fault", ALL.values(), ids=list(ALL))
def test_fault_says_what_it_does_and_why_a_checker_is_exempt(fault: type[Fault]) -> None:
    assert fault.__doc__
    assert all(name in CHECKERS and len(why) > 40 for name, why in fault.exempt_checkers.items())
    assert {"token order", "durability"} - set(fault.exempt_checkers) or fault.name == "split-brain"


@pytest.mark.parametrize("workload", workloads.names())
def test_workload_says_why_a_checker_is_exempt(workload: str) -> None:
    for fault, exempt in workloads.named(workload).exempt_checkers.items():
        assert fault in ALL
        assert all(len(why) > 40 for why in exempt.values())
        assert set(exempt) <= {"recovery"}


@pytest.mark.parametrize("workload", [*matrix.RECIPES, *matrix.SHARED])
def test_matrix_plays_recipes_and_shared_locks_against_every_fault(workload: str) -> None:
    assert {scenario.fault for scenario, _ in matrix.full() if scenario.workload == workload} == set(ALL)


def test_fault_without_its_prerequisite_says_so_and_plays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.robustness.faults.clock.library", lambda: None)
    with pytest.raises(FaultUnavailable, match="libfaketime is not installed"):
        play(Scenario("mutex", "clock"), folder=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("embedded_binaries")
@pytest.mark.parametrize("fault", first(0, ["crash-one", "present-cut"]))
def test_traffic_continues_after_a_fault(fault: str, tmp_path: Path) -> None:
    outcome = played(fault, strikes=2, workers=2, folder=tmp_path)
    assert not outcome.violations
    assert not outcome.trouble
    assert outcome.strikes
    assert continues(outcome)


@pytest.mark.usefixtures("embedded_binaries")
@pytest.mark.second_stage
@pytest.mark.parametrize("workload", matrix.RECIPES)
def test_recipe_keeps_its_record_when_processes_are_killed(workload: str, tmp_path: Path) -> None:
    outcome = play(Scenario(workload, "kill", workers=2, strikes=2, in_memory=True), seed=1, folder=tmp_path)
    assert not outcome.violations
    assert not outcome.trouble
    assert all(one.checked for one in outcome.findings)
    assert continues(outcome)


@pytest.mark.usefixtures("embedded_binaries")
@pytest.mark.second_stage
@pytest.mark.parametrize("workload", matrix.SHARED)
def test_shared_lock_has_no_holders_too_many_when_processes_are_killed(workload: str, tmp_path: Path) -> None:
    outcome = play(Scenario(workload, "kill", workers=2, strikes=2, in_memory=True), seed=1, folder=tmp_path)
    assert not outcome.violations
    assert not outcome.trouble
    assert all(one.checked or one.checker == "writers in turn" for one in outcome.findings)
    assert continues(outcome)


@pytest.mark.usefixtures("embedded_binaries")
@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", sorted(name for name in ALL if name != "none" and not name.startswith("cluster-")))
def test_traffic_continues_after_every_fault(fault: str, tmp_path: Path) -> None:
    outcome = played(fault, strikes=5, workers=4, folder=tmp_path)
    assert not outcome.violations
    assert not outcome.trouble
    assert outcome.strikes
    assert continues(outcome)
