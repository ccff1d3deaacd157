"""One run of shared locks: a storm, then calm, in which every process wants the same lock once more."""

from __future__ import annotations

from collections.abc import Callable

from dblock._core.shared_acquire import SharedOptions, read_write_options, semaphore_options
from tests.robustness.simulation.client import Client
from tests.robustness.simulation.run import Run
from tests.robustness.simulation.shared_locks.checks import SharedChecks
from tests.robustness.simulation.shared_locks.worker import SharedErrand, SharedWorker

LOCK, SEMAPHORE = "RW", "S"

GROWS_AFTER, HOLDS_PERMIT = 1.0, 1.6
"""Seconds into the calm contest after which the semaphore grows, and for which each permit is held.

In between, no release wakes the waiters, which have all had their early checks.
"""


class SharedRun(Run):
    """Threads that use a read-write lock or a semaphore, or both."""

    checks: SharedChecks
    checks_of = SharedChecks

    def __init__(self, seed: int, tracing: bool = False) -> None:
        super().__init__(seed, tracing)
        chance = self.world.random
        self._locks = chance.choice([[LOCK], [LOCK], [SEMAPHORE], [SEMAPHORE], [LOCK, SEMAPHORE]])
        self._permits = chance.choice([1, 2, 2, 3])
        self._reads = chance.choice([0.3, 0.6, 0.8])
        abandon = self.store.abandon

        def checked(name: str, attempt: str, only_ticket: bool = False) -> bool:
            gave_back = abandon(name, attempt, only_ticket)
            if not only_ticket:
                self.checks.gave_up(name, attempt)
            return gave_back

        self.store.abandon = checked  # type: ignore[method-assign]

    @property
    def recipe_faults(self) -> dict[Callable[[], object], float]:
        """The faults that shared locks have beside those of all locks."""
        return {self.resize: 2.0}

    def resize(self, by: int | None = None) -> None:
        """Change the number of permits, as an operator does."""
        chance, head = self.world.random, self.store.tables.rows.get(SEMAPHORE)
        if head is None or head.permits is None or not self.database.up:
            return
        permits = chance.choice([1, 2, 3]) if by is None else head.permits + by
        if self.world.tracing:
            self.world.say("operator", f"resizes {SEMAPHORE} from {head.permits} to {permits}")
        if permits > head.permits:
            self.checks.resized(SEMAPHORE)
        self.database.call(None, lambda: self.store.resize_semaphore(SEMAPHORE, permits))

    def _start(self, number: int) -> None:
        chance = self.world.random
        client = self._process(number)
        for thread in range(chance.choice([1, 2, 2, 3])):
            errands = [self._shared_errand() for _ in range(chance.randrange(1, 6))]
            self._use_shared(client, f"thread {number}.{thread}", errands)

    def _use_shared(self, client: Client, name: str, errands: list[SharedErrand]) -> None:
        self.workers.append(SharedWorker(client, name, errands, self.checks, self._write))

    def _shared_options(self, name: str, mode: str, ttl: float, claims: bool, keep_alive: bool) -> SharedOptions:
        if name == LOCK:
            resources = [f"behind {LOCK}#writer"] if claims and mode == "write" else []
            return read_write_options(mode, name, ttl, None, None, keep_alive, resources)
        resources = [f"behind {SEMAPHORE}#{{permit}}"] if claims else []
        return semaphore_options(self._permits, name, ttl, None, None, keep_alive, resources)

    def _shared_errand(self) -> SharedErrand:
        chance = self.world.random
        name = chance.choice(self._locks)
        mode = "read" if chance.random() < self._reads else "write"
        options = self._shared_options(name, mode, self._ttl, chance.random() < 0.3, chance.random() < 0.8)
        return SharedErrand(
            options,
            chance.choice([None, None, 0.0, 0.3, 2.0]),
            chance.random() < 0.1,
            self._ttl * chance.choice([0.05, 0.2, 0.6, 1.4]),
            chance.randrange(1, 4),
            chance.random() < 0.15,
            chance.random() < 0.1,
            "",
            chance.choice([0.0, 0.0, 0.5]),
            name == LOCK and mode == "write" and chance.random() < 0.4,
        )

    def _contest(self) -> None:
        super()._contest()
        if SEMAPHORE in self._locks:
            self.world.after(GROWS_AFTER, self.resize, 1)

    def _compete(self, number: int, client: Client) -> None:
        name = self._locks[-1]
        for thread in range(3):
            mode = self.world.random.choice(["read", "write"])
            options = self._shared_options(name, mode, 2.0, False, True)
            holds_for = 0.3 if name == LOCK else HOLDS_PERMIT
            errand = SharedErrand(options, None, False, holds_for, 1, False, False, "")
            self._use_shared(client, f"thread {number}.last{thread}", [errand])
