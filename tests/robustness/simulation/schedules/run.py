"""One run of a schedule: a storm, then calm, in which every host sees the next slots decided."""

from __future__ import annotations

from collections.abc import Callable

from dblock._core.slots import Definition, check_definition
from tests.robustness.simulation.client import Client
from tests.robustness.simulation.run import Run
from tests.robustness.simulation.schedules.checks import SlotChecks
from tests.robustness.simulation.schedules.host import Host

SCHEDULE = "S"


class ScheduleRun(Run):
    """The hosts of one schedule."""

    checks: SlotChecks
    checks_of = SlotChecks

    def __init__(self, seed: int, tracing: bool = False) -> None:
        super().__init__(seed, tracing)
        chance = self.world.random
        every, delay = chance.choice([(0.5, None), (1.0, None), (2.0, None), (None, 0.25), (None, 1.0)])
        self.definition: Definition = check_definition(
            SCHEDULE,
            every=every,
            delay=delay,
            catch_up=chance.choice(["none", "latest", "latest", "all"]),
            delivery=chance.choice(["at-most-once", "at-least-once"]),
            grace=chance.choice([None, None, 0.125]),
            ttl=self._ttl,
            planner=lambda name, expression, zone: lambda after, until: [],
        )
        self.store.schedules.observer = self.checks
        self.checks.at_most_once = not self.definition.stands_by

    def _start(self, number: int) -> None:
        client, share = self._process(number), self.world.random.choice([0.0, 0.2])
        self._schedule(client, f"host {number}", self._lasts, share)

    def _schedule(
        self, client: Client, name: str, lasts: Callable[[], float], fails: float = 0.0, until: float | None = None
    ) -> None:
        self.workers.append(Host(client, name, self.definition, lasts, fails, self.checks, self._write, until))

    def _lasts(self) -> float:
        return self._ttl * self.world.random.choice([0.02, 0.1, 0.3, 0.6, 1.4])

    def _compete(self, number: int, client: Client) -> None:
        self._schedule(client, f"host {number}.last", lambda: 0.05, until=self.world.now)

    def _check_end(self) -> None:
        super()._check_end()
        self.checks.check_ledger(self.store.tables.schedules[SCHEDULE])
