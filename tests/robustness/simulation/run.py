"""One run: a storm, in which everything can go wrong, and then calm, in which every waiter must be served.

The seed decides how many processes and threads there are, what they want, how bad the network is and what happens to
them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from dblock._core import clock
from dblock.testing.database.fence import Fence
from dblock.testing.database.recipes import RecipeStore
from dblock.testing.database.tables import Ticket
from tests.robustness.simulation.checks import Checks
from tests.robustness.simulation.client import Client
from tests.robustness.simulation.database import Database
from tests.robustness.simulation.faults import Faults
from tests.robustness.simulation.network import Network, Weather
from tests.robustness.simulation.worker import Errand, Worker, wanted
from tests.robustness.simulation.world import BodyFailed, Violation, World

SETTLES = 12.0
"""Seconds after the storm in which its effects end: calls without a reply, pauses, lost leases."""

SERVED_WITHIN = 40.0
"""Seconds after the storm within which every worker is done."""

FORGOTTEN_AFTER = 4.0
"""Seconds without a heartbeat after which a client is taken to be dead."""


@dataclass
class Outcome:
    """The outcome of a run."""

    seed: int
    check: str | None
    """The check that found something; None if none did."""
    what: str | None
    steps: int
    grants: int
    handed_over: int
    slowest: float
    seconds: float
    digest: str
    story: list[str]
    counts: dict[str, int]
    """What a recipe did, by kind: terms, for example."""


class Thread(Protocol):
    """A thread of a process."""

    client: Client
    thread: str
    """Its name."""
    hurries: bool
    """Whether it ends with what is under way."""
    done: bool

    def cancel(self) -> None:
        """Make it leave whatever it waits for."""


class Run:
    """Everything in one run."""

    checks_of: type[Checks] = Checks
    """The kind of its checks."""

    def __init__(self, seed: int, tracing: bool = False) -> None:
        self.world = world = World(seed, tracing)
        chance = world.random
        self.checks = self.checks_of(world)
        self.fence = Fence()
        self.store = RecipeStore(lambda: world.now, chance, self.checks)
        mortal = chance.random() < 0.3
        self.database = self.checks.database = Database(world, self.store, self.fence, mortal)
        self.network = Network(world, self.database, self._weather())
        self.store.notify = self.network.notify
        self.network.on_session_end = self.checks.session_ended
        self.storm = chance.uniform(3.0, 6.0)
        self.clients: list[Client] = []
        self.workers: list[Thread] = []
        self._locks = ["A", "B"][: 1 if chance.random() < 0.7 else 2]
        self._ttl = chance.choice([0.3, 0.8, 2.0, 3.0])

    def _weather(self) -> Weather:
        chance = self.world.random
        if chance.random() < 0.15:
            return Weather()
        return Weather(
            chance.choice([0.004, 0.02, 0.08]),
            chance.choice([0.0, 0.02, 0.1]),
            chance.choice([0.3, 1.0, 3.0]),
            chance.choice([0.0, 0.03, 0.15, 0.3]),
            chance.choice([0.0, 0.3, 0.6]),
            chance.choice([0.0, 0.01, 0.05]),
            chance.choice([0.0, 0.2]),
        )

    def go(self) -> Outcome:
        """Run it."""
        found: Violation | None = None
        with _isolated() as log:
            try:
                self._happen()
                log.check()
            except Violation as violation:
                found = violation
                if self.world.tracing:
                    self.world.say("VIOLATION", str(violation))
        return Outcome(
            self.world.seed,
            found.check if found else None,
            str(found) if found else None,
            self.world.steps,
            self.checks.grants,
            self.checks.handed_over,
            self.checks.slowest,
            self.world.now,
            self.world.digest() if self.world.tracing else "",
            self.world.story,
            self.checks.counts,
        )

    def _happen(self) -> None:
        world, chance = self.world, self.world.random
        for number in range(chance.choice([2, 2, 3, 3, 4])):
            self._start(number)
        faults = Faults(self)
        world.run(self.storm, self.checks.each)
        faults.end()
        self._calm_down()
        world.run(self.storm + SETTLES, self.checks.each)
        self._contest()
        world.run(world.now + SERVED_WITHIN - SETTLES, self._calm_step)
        self._check_end()

    def _calm_down(self) -> None:
        self.network.weather = Weather()
        for worker in self.workers:
            worker.hurries = True

    @property
    def recipe_faults(self) -> dict[Callable[[], object], float]:
        """The faults of a recipe, and how often each happens relative to the others."""
        return {}

    def _start(self, number: int) -> None:
        chance = self.world.random
        client = self._process(number)
        for thread in range(chance.choice([1, 1, 2])):
            errands = [self._errand() for _ in range(chance.randrange(1, 6))]
            self._employ(client, f"thread {number}.{thread}", errands)

    def _process(self, number: int) -> Client:
        """Start a process with a client."""
        world, chance = self.world, self.world.random
        grace = chance.choice([None, 0.15, 0.15, 0.5])
        client = Client(
            world, self.network, f"client {number}", chance.uniform(0.992, 1.008), chance.choice([1.0, 3.0]), grace
        )
        client.on_refusal = self.checks.refused
        client.deaf = chance.random() < 0.1
        self.clients.append(client)
        self.checks.clients[client.flows.client] = client
        return client

    def _employ(self, client: Client, name: str, errands: list[Errand]) -> None:
        checks = self.checks
        self.workers.append(Worker(client, name, errands, checks.asks, checks.holds, self._write, checks.released))

    def _errand(self) -> Errand:
        chance = self.world.random
        name = chance.choice(self._locks)
        durable = chance.random() < 0.93
        resource = f"behind {name}"
        terms = wanted(
            name,
            self._ttl,
            None,
            durable=durable,
            keep_alive=chance.random() < 0.8,
            fair=chance.random() < 0.85,
            claims=[resource] if durable and chance.random() < 0.3 else [],
        )
        return Errand(
            terms,
            chance.choice([None, None, 0.0, 0.3, 2.0]),
            chance.random() < 0.1,
            self._ttl * chance.choice([0.05, 0.2, 0.6, 1.4]),
            chance.randrange(1, 4),
            chance.random() < 0.15,
            chance.random() < 0.1,
            resource,
            chance.choice([0.0, 0.0, 0.5]),
        )

    def _write(self, client: Client, resource: str, token: int, number: int) -> None:
        if token > 0 and resource:
            self.world.after(self.network.delay(), self._written, client, resource, token, number)

    def _written(self, client: Client, resource: str, token: int, number: int) -> None:
        accepted = self.fence.write(resource, token, number)
        if self.world.tracing:
            verdict = "accepted" if accepted else "refused"
            self.world.say("resource", f"{resource}: write {number} of {client.name} under {token} {verdict}")
        self.checks.written(resource, token, number, accepted)

    def _contest(self) -> None:
        """Let every live process want the same lock at once, in calm weather, where nothing excuses a delay."""
        if not all(worker.done or worker.client.dead for worker in self.workers):
            self._unserved()
        self.checks.calm = True
        self.workers = [worker for worker in self.workers if not worker.client.dead]
        for number, client in enumerate([client for client in self.clients if not client.dead]):
            self._compete(number, client)

    def _compete(self, number: int, client: Client) -> None:
        terms = wanted(self._locks[0], 2.0, None)
        errand = Errand(terms, None, False, 0.3, 1, False, False, f"behind {self._locks[0]}")
        self._employ(client, f"thread {number}.last", [errand])

    def _calm_step(self) -> None:
        self.checks.each()
        self.checks.tick()

    def _check_end(self) -> None:
        if not all(worker.done for worker in self.workers):
            self._unserved()
        # A client that left a ticket behind is dead by now, or has noticed it.
        self.world.run(self.world.now + FORGOTTEN_AFTER, self.checks.each)
        # The first run finds the queues without a waiter, the second deletes the shared locks that have such a queue.
        for _ in range(2):
            self.database.call(None, lambda: self.store.reap(0.0))
        left: list[Ticket] = list(self.checks.ghosts())
        if left or self.store.tables.rows:
            raise Violation("ghosts", f"left behind: {left} {list(self.store.tables.rows.values())}")

    def _unserved(self) -> None:
        waiting = [worker.thread for worker in self.workers if not worker.done and not worker.client.dead]
        raise Violation("served", f"{', '.join(waiting)} still not done {self.world.now - self.storm:.1f} s later")


class _Logger(logging.Handler):
    """Keeps the errors that dblock logs and survives: each of them is a finding here."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._thread = threading.get_ident()
        self.errors: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread != self._thread:
            return  # of a real client that runs in the same process
        if record.exc_info and isinstance(record.exc_info[1], BodyFailed):
            return  # a body that was meant to fail
        self.errors.append(record)

    def check(self) -> None:
        """Raise a Violation for the first error that was logged."""
        if self.errors:
            raise Violation("unexpected", logging.Formatter().format(self.errors[0]))


@contextlib.contextmanager
def _isolated() -> Iterator[_Logger]:
    """Keep dblock from the real clock, and its log from everything but the handler that is returned."""
    logger, handler = logging.getLogger("dblock"), _Logger()
    now, before = clock.now, (logger.level, logger.propagate, logger.handlers)
    simulating = threading.get_ident()

    def checked() -> float:
        # Threads of real clients that run in the same process keep the real clock.
        if threading.get_ident() == simulating:
            raise AssertionError("each process has a clock of its own")
        return now()

    clock.now = checked
    logger.propagate, logger.handlers = False, [handler]
    logger.setLevel(logging.ERROR)
    try:
        yield handler
    finally:
        clock.now = now
        logger.propagate, logger.handlers = before[1:]
        logger.setLevel(before[0])
