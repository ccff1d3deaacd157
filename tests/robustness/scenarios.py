"""Scenarios: which workload runs under which fault, and how one is played."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.robustness import faults
from tests.robustness.checkers import Finding, recovery
from tests.robustness.history.record import History, Operation
from tests.robustness.traffic import workloads
from tests.robustness.traffic.environment import start_environment
from tests.support.machine import UNSAFE


@dataclass(frozen=True)
class Scenario:
    """Name a workload, a fault and the duration of the run."""

    workload: str
    fault: str = "none"
    workers: int = 4
    seconds: float = 10.0
    strikes: int | None = None
    """If set, end after this number of strikes instead."""
    options: dict[str, object] = field(default_factory=dict)
    in_memory: bool = False
    """Keep the server's files in memory, which is faster."""

    @property
    def name(self) -> str:
        return f"{self.workload} / {self.fault}"


@dataclass
class Outcome:
    """Hold the history and the findings of one run."""

    scenario: Scenario
    seed: int
    history: History
    findings: list[Finding]
    seconds: float
    exempt_checkers: dict[str, str]

    @property
    def violations(self) -> list[str]:
        found = [f"{one.checker}: {what}" for one in self.findings for what in one.violations]
        return sorted(found, key=lambda one: UNSAFE not in one)  # pytest shows the first ones

    @property
    def trouble(self) -> list[Operation]:
        """Events that the traffic did not expect."""
        return self.history.of("trouble")

    @property
    def strikes(self) -> int:
        """The number of strikes that had an effect."""
        return sum(not one.details.get("no_effect") for one in self.history.faults)


def play(
    scenario: Scenario,
    seed: int = 0,
    *,
    bug: str | None = None,
    folder: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Play one scenario and check its history. If the caller names a `folder`, the history stays there.

    Raise FaultUnavailable with the reason if this machine cannot perform the fault.
    """
    with tempfile.TemporaryDirectory() as own:
        where = folder or Path(own)
        began = time.monotonic()
        fault = faults.all_faults()[scenario.fault]()
        missing = fault.missing()
        if missing is not None:
            raise faults.FaultUnavailable(missing)
        history = _play(scenario, fault, seed, bug, where, progress)
        workload = workloads.named(scenario.workload)
        exempt = {**fault.exempt_checkers, **workload.exempt_checkers.get(scenario.fault, {})}
        checkers = (*workload.checkers, *([recovery.check] if history.faults else []))
        findings = [one for one in (check(history) for check in checkers) if one.checker not in exempt]
        return Outcome(scenario, seed, history, findings, time.monotonic() - began, exempt)


def _play(
    scenario: Scenario, fault: faults.Fault, seed: int, bug: str | None, where: Path, progress: Callable[[str], None]
) -> History:
    rng = random.Random(seed)
    settings, in_memory = dict(fault.settings), scenario.in_memory
    with start_environment(scenario.workload, where, seed, settings=settings, bug=bug, in_memory=in_memory) as env:
        env.options.update(scenario.options)
        with fault.set_up(env):
            for name in [env.start_worker(wait=False) for _ in range(scenario.workers)]:
                env.wait_for(name)
            began, struck = time.monotonic(), 0
            while struck < scenario.strikes if scenario.strikes else time.monotonic() < began + scenario.seconds:
                time.sleep(rng.uniform(*fault.every))
                if fault.name != "none":
                    number = env.recorder.begin("fault", fault.name)
                    details = fault.strike(env, rng)
                    details |= {"loses_state": True} if fault.loses_state else {}
                    details |= {"no_effect": True} if fault.effect and not details[fault.effect] else {}
                    env.recorder.end(number, "ok", **details)
                    struck += 1
                progress(f"{scenario.name}: {struck} strikes, {time.monotonic() - began:.0f} s")
            if struck:
                fault.recover(env)
            env.stop_workers()
            return env.collect_history()
