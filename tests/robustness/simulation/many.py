"""Run many seeds, in one process or in several, and summarize the outcomes."""

from __future__ import annotations

import collections
import contextlib
import functools
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.robustness.simulation.elections import mutations as elections
from tests.robustness.simulation.elections.run import ElectionRun
from tests.robustness.simulation.mutations import BUGS, Bug
from tests.robustness.simulation.run import Outcome, Run
from tests.robustness.simulation.schedules import mutations as schedules
from tests.robustness.simulation.schedules.run import ScheduleRun
from tests.robustness.simulation.shared_locks import mutations as shared_locks
from tests.robustness.simulation.shared_locks.run import SharedRun

WORKLOADS: dict[str, type[Run]] = {
    "locks": Run,
    "shared_locks": SharedRun,
    "elections": ElectionRun,
    "schedules": ScheduleRun,
}
"""What the processes of a run do."""

BUGS_OF: dict[str, dict[str, Bug[Any]]] = {
    "locks": BUGS,
    "shared_locks": shared_locks.BUGS,
    "elections": elections.BUGS,
    "schedules": schedules.BUGS,
}
"""The bugs that are found in each workload."""

ALL_BUGS = [bug for bugs in BUGS_OF.values() for bug in bugs]

BATCH = 250
"""How many seeds a process runs before it reports."""

MOST_SHOWN = 20


@dataclass
class Summary:
    """The outcomes of some seeds."""

    seeds: int = 0
    steps: int = 0
    grants: int = 0
    handed_over: int = 0
    slowest: float = 0.0
    simulated: float = 0.0
    """Seconds of simulated time."""
    took: float = 0.0
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    """What a recipe did, by kind."""
    failures: dict[int, str] = field(default_factory=dict)

    def add(self, other: Summary) -> None:
        """Add the outcomes of other seeds."""
        self.seeds += other.seeds
        self.steps += other.steps
        self.grants += other.grants
        self.handed_over += other.handed_over
        self.slowest = max(self.slowest, other.slowest)
        self.simulated += other.simulated
        self.counts.update(other.counts)
        self.failures.update(other.failures)

    def progress(self) -> str:
        """Return the progress as text."""
        return f"{self.seeds} seeds, {len(self.failures)} failed, {self.a_minute} a minute"

    @property
    def a_minute(self) -> int:
        """How many seeds were run in a minute."""
        return round(self.seeds / max(self.took, 0.001) * 60)

    def report(self) -> dict[str, Any]:
        """Return everything as data."""
        return {**vars(self), "a_minute": self.a_minute}

    def __str__(self) -> str:
        kinds = collections.Counter(what.partition(":")[0] for what in self.failures.values())
        lines = [
            f"{self.seeds} seeds in {self.took:.1f} s ({self.a_minute} a minute): "
            f"{self.steps} steps, {self.grants} grants, {self.simulated / 3600:.1f} simulated hours, "
            f"slowest hand-over in calm {self.slowest:.3f} s. "
            + (f"{len(self.failures)} FAILED: {dict(kinds)}" if self.failures else "Everything held.")
        ]
        if self.counts:
            lines.append(", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items())))
        lines += [
            f"  --seed {seed} --trace   {what[:120]}" for seed, what in sorted(self.failures.items())[:MOST_SHOWN]
        ]
        return "\n".join(lines)


def workload_of(bug: str) -> str:
    """Return the workload that a bug is found in."""
    return next(workload for workload, bugs in BUGS_OF.items() if bug in bugs)


def run_one(seed: int, bug: str | None = None, tracing: bool = False, workload: str = "locks") -> Outcome:
    """Run one seed, with a bug if one is named. A bug decides the workload."""
    if bug is None:
        return WORKLOADS[workload](seed, tracing).go()
    workload = workload_of(bug)
    run = WORKLOADS[workload](seed, tracing)
    with contextlib.contextmanager(BUGS_OF[workload][bug])(run):
        return run.go()


def find_bug(bug: str, first: int, seeds: int) -> tuple[int, Outcome] | None:
    """Return after how many seeds a bug is found, and the outcome. None if it is not found."""
    for number, seed in enumerate(range(first, first + seeds), 1):
        outcome = run_one(seed, bug)
        if outcome.check:
            return number, outcome
    return None


def run_batch(seeds: Iterable[int], bug: str | None = None, workload: str = "locks") -> Summary:
    """Run these seeds, one after the other."""
    summary = Summary()
    for seed in seeds:
        outcome = run_one(seed, bug, workload=workload)
        summary.add(
            Summary(
                1,
                outcome.steps,
                outcome.grants,
                outcome.handed_over,
                outcome.slowest,
                outcome.seconds,
                counts=collections.Counter(outcome.counts),
                failures={seed: str(outcome.what)} if outcome.check else {},
            )
        )
    return summary


def run_many(
    first: int,
    seeds: int,
    processes: int = 1,
    bug: str | None = None,
    progress: Callable[[Summary], object] | None = None,
    workload: str = "locks",
) -> Summary:
    """Run so many seeds, and report the progress."""
    summary, began = Summary(), time.monotonic()

    def note(part: Summary) -> None:
        summary.add(part)
        summary.took = time.monotonic() - began
        if progress is not None:
            progress(summary)

    batches = [range(at, min(at + BATCH, first + seeds)) for at in range(first, first + seeds, BATCH)]
    if processes == 1:
        for batch in batches:
            note(run_batch(batch, bug, workload))
        return summary
    context = multiprocessing.get_context("spawn")
    # Only this process handles Ctrl-C. Leaving the block ends the others.
    with context.Pool(processes, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        for part in pool.imap_unordered(functools.partial(run_batch, bug=bug, workload=workload), batches):
            note(part)
    return summary
