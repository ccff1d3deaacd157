"""Store the result of one run: what was played, how much of it, and the findings of each checker."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.robustness.report import latencies, timelines
from tests.robustness.scenarios import Outcome

LOCK_OPERATIONS = ("acquire", "release", "renew", "force")

MANY = 20
"""Most violations to keep of each checker. The first ones are enough to diagnose it."""


@dataclass
class Result:
    """The figures and findings of one run."""

    name: str
    workload: str
    fault: str
    seed: int
    seconds: float
    operations: int
    lock_operations: int
    grants: int
    unknown: int
    refused: int
    """Writes that a fence refused."""
    strikes: int
    findings: list[dict[str, Any]]
    exempt_checkers: dict[str, str]
    trouble: list[str] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)

    @property
    def violations(self) -> int:
        return sum(int(one["violations"]) for one in self.findings)

    @property
    def good(self) -> bool:
        return not self.violations and not self.trouble


def result_of(outcome: Outcome) -> Result:
    """Summarize an outcome."""
    history = outcome.history
    return Result(
        outcome.scenario.name,
        outcome.scenario.workload,
        outcome.scenario.fault,
        outcome.seed,
        round(outcome.seconds, 1),
        len(history),
        len(history.of(*LOCK_OPERATIONS)),
        sum(one.ok for one in history.of("acquire")),
        sum(one.outcome == "unknown" for one in history),
        sum(one.outcome == "failed" for one in history.of("write", "transfer")),
        outcome.strikes,
        [
            {
                "checker": one.checker,
                "checked": one.checked,
                "violations": len(one.violations),
                "first": one.violations[:MANY],
            }
            for one in outcome.findings
        ],
        outcome.exempt_checkers,
        [str(one) for one in outcome.trouble[:MANY]],
    )


def keep(outcome: Outcome, folder: Path) -> Result:
    """Write a result and its pictures into a folder."""
    result = result_of(outcome)
    kept = path_of(folder, result.workload, result.fault, result.seed)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {"timeline": timelines.draw(outcome.history, f"{result.name}: holder of each lock")}
    if outcome.strikes:
        drawn["latency"] = latencies.draw(outcome.history, f"{result.name}: latency around a fault")
    for what, picture in drawn.items():
        path = kept.with_name(f"{kept.stem}-{what}.svg")
        path.write_text(picture)
        result.pictures.append(path.name)
    kept.write_text(json.dumps(asdict(result), indent=1))
    return result


def path_of(folder: Path, workload: str, fault: str, seed: int) -> Path:
    """Return the path of a run's result."""
    return folder / f"run-{workload}-{fault}-{seed}.json".replace(":", "-")


def folder_of(folder: Path, workload: str, fault: str, seed: int) -> Path:
    """Return the folder for everything that a failed run has written."""
    return path_of(folder, workload, fault, seed).with_suffix("")


def read(path: Path) -> Result:
    """Read one result."""
    return Result(**json.loads(path.read_text()))


def load(folder: Path) -> list[Result]:
    """Read all results in a folder."""
    return [read(path) for path in sorted(folder.glob("run-*.json"))]
