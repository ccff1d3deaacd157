"""One run of an election: a storm, then calm, in which every candidate leads once more."""

from __future__ import annotations

from collections.abc import Callable

from dblock.recipes.elections.records import election_options
from tests.robustness.simulation.client import Client
from tests.robustness.simulation.elections.candidate import Candidate, Mandate
from tests.robustness.simulation.elections.checks import TermChecks
from tests.robustness.simulation.elections.observer import Observer
from tests.robustness.simulation.run import Run

ELECTION = "E"

LOOKS = 12.0
"""Seconds within which an observer reads the rest of the log."""


class ElectionRun(Run):
    """Candidates and observers of one election, beside threads that use a lock."""

    checks: TermChecks
    checks_of = TermChecks

    def __init__(self, seed: int, tracing: bool = False) -> None:
        super().__init__(seed, tracing)
        self.candidates: list[Candidate] = []
        self.observers: list[Observer] = []
        self.store.elections.observer = self.checks

    @property
    def recipe_faults(self) -> dict[Callable[[], object], float]:
        """The faults that an election has beside those of locks."""
        return {self.transfer: 2.5, self.stop: 0.7}

    def _start(self, number: int) -> None:
        chance = self.world.random
        client = self._process(number)
        mandates = [self._mandate() for _ in range(chance.randrange(1, 5))]
        self._nominate(client, f"candidate {number}", mandates, chance.choice([0, 0, 0, 1]))
        if number == 0 or chance.random() < 0.2:
            options = election_options(ELECTION, self._ttl, None, 0, None, None, None)
            since = chance.choice([0, 0, None])
            self.observers.append(Observer(client, f"observer {number}", options, since))
        if chance.random() < 0.2:
            self._employ(client, f"thread {number}", [self._errand()])

    def _nominate(self, client: Client, name: str, mandates: list[Mandate], priority: int) -> None:
        options = election_options(ELECTION, self._ttl, {"url": name}, priority, None, None, None)
        candidate = Candidate(client, name, options, mandates, self.checks, self._write)
        self.candidates.append(candidate)
        self.workers.append(candidate)

    def _mandate(self) -> Mandate:
        chance = self.world.random
        return Mandate(
            self._ttl * chance.choice([0.05, 0.2, 0.6, 1.4]),
            chance.randrange(1, 4),
            chance.random() < 0.15,
            chance.random() < 0.1,
            f"behind election:{ELECTION}",
        )

    def transfer(self) -> None:
        """Let a candidate ask for a transfer to another."""
        chance = self.world.random
        live = [one for one in self.candidates if not one.client.dead and not one.client.stopped]
        if live:
            chance.choice(live).transfer(chance.choice(self.candidates).client.name)

    def stop(self) -> None:
        """Stop a candidate for good."""
        live = [one for one in self.candidates if not one.client.dead and not one.client.stopped and not one.done]
        if live:
            self.world.random.choice(live).stop()

    def _calm_down(self) -> None:
        super()._calm_down()
        for observer in self.observers:
            observer.hurries = True

    def _compete(self, number: int, client: Client) -> None:
        mandate = Mandate(0.3, 1, False, False, f"behind election:{ELECTION}")
        self._nominate(client, f"candidate {number}.last", [mandate], 0)

    def _check_end(self) -> None:
        super()._check_end()
        observers = [one for one in self.observers if not one.client.dead]
        for observer in observers:
            observer.look_again()
        self.world.run(self.world.now + LOOKS, self.checks.each)
        for observer in observers:
            self.checks.observed(observer.thread, observer.since, observer.seen)
