"""The report shows what was proved and what was not: runs that failed, were not played, or had nothing to check."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.robustness import __main__ as suite
from tests.robustness import matrix
from tests.robustness.history.record import OK, History, Operation
from tests.robustness.report import page, results, timelines
from tests.robustness.report.results import Result
from tests.robustness.scenarios import Scenario
from tests.robustness.soak import drawing
from tests.robustness.soak.flatness import MEMORY, Series

SCENARIO = Scenario("mutex", "crash")


def result(checked: int = 9, violations: int = 0, **more: Any) -> Result:
    found = {"checker": "loss reported first", "checked": checked, "violations": violations, "first": ["two holders"]}
    figures = (1.0, 10, 9, 8, 0, 0, 3)
    return Result(SCENARIO.name, "mutex", "crash", 7, *figures, [found], {"durability": "it may be lost"}, **more)


def written(folder: Path, *some: Result, **more: Any) -> str:
    return page.write(some, folder, **more).read_text()


def test_report_does_not_count_a_checker_that_saw_nothing(tmp_path: Path) -> None:
    assert "loss reported first (9)" in written(tmp_path, result())
    assert "*nothing to check: loss reported first*" in written(tmp_path, result(checked=0))


def test_report_lists_failures_exempt_checkers_and_skipped_scenarios(tmp_path: Path) -> None:
    text = written(
        tmp_path, result(violations=1), result(trouble=["it hung"]), not_played=["mutex / clock: no library"]
    )
    assert "**2 of 2 runs failed.**" in text
    assert "**1 were not played.**" in text
    assert "- mutex / clock: no library" in text
    assert "two holders" in text
    assert "0 and trouble" in text
    assert "- under crash, **durability**: it may be lost" in text


@pytest.mark.parametrize("ended_with", [-9, 1, 0, suite.SKIPPED])
def test_failed_run_fails_the_suite_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ended_with: int
) -> None:
    monkeypatch.setattr(matrix, "full", lambda: [(SCENARIO, 7), (SCENARIO, 8)])
    monkeypatch.setattr(suite, "_run", lambda command, out: ended_with)
    good = results.path_of(tmp_path, "mutex", "crash", 8)
    good.write_text(json.dumps(asdict(result())))
    args = argparse.Namespace(out=tmp_path, only="", at_once=1)
    assert suite._all(args) == int(ended_with in (-9, 1))
    assert ("FAILED" in capsys.readouterr().out) == (ended_with in (-9, 1))
    assert "- mutex / crash, seed 7: has no result" in (tmp_path / "report.md").read_text()


def test_earlier_result_counts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix, "full", lambda: [(SCENARIO, 7)])
    results.path_of(tmp_path, "mutex", "crash", 7).write_text(json.dumps(asdict(result(violations=2))))
    assert suite._all(argparse.Namespace(out=tmp_path, only="", at_once=1)) == 1
    assert "FAILED" in capsys.readouterr().out


def test_fault_labels_do_not_overlap() -> None:
    faults = [
        Operation("runner", "fault", "server", at, at + 0.01, OK, {"label": name})
        for at, name in ((1.0, "the first"), (1.1, "the second"), (6.0, "the third"))
    ]
    acquired = [Operation("worker", "acquire", "a", at, at + 0.1, OK, {"token": 1}) for at in (0.0, 10.0)]
    picture = timelines.draw(History([*acquired, *faults]), "A run")
    assert picture.count('opacity="0.22"') == 3
    assert [name for name in ("the first", "the second", "the third") if name in picture] == ["the first", "the third"]


@pytest.mark.parametrize(("processes", "all_named"), [(2, True), (30, False)])
def test_soak_legend_names_the_lines_as_far_as_there_is_space(processes: int, all_named: bool) -> None:
    names = [f"worker {number}" for number in range(processes)]
    series = [Series(f"memory of {name}", "MB", MEMORY, [(0.0, 1.0), (1.0, 2.0)]) for name in names]
    picture = drawing.svg_of(series, 1, "A soak")
    assert all(f"<title>{name}</title>" in picture for name in names)
    assert all(f">{name}</text>" in picture for name in names) is all_named
    assert ("…" not in picture) is all_named
