"""Faults: what is done to the processes, the network and the server while the traffic runs.

Each fault is a class with a name. `set_up` provides what it needs before the traffic starts. `strike` injects the fault
once, and returns when the fault is over and the traffic can continue. A fault names the checkers that are exempt under
it, each with the reason. If this machine cannot perform the fault, `missing` says what it needs: the fault is then
skipped with that reason, and does not count as passed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.robustness.traffic.environment import Environment


class FaultUnavailable(Exception):
    """Raised with the reason if this machine lacks what a fault needs."""


class Fault:
    """Inject nothing; the base class of all faults."""

    name = "none"
    settings: Mapping[str, str] = {}
    """Server settings that the fault needs."""
    exempt_checkers: Mapping[str, str] = {}
    """The checkers that are exempt under the fault, by name, each with the reason."""
    loses_state = False
    """Whether the database may forget what it has acknowledged."""
    effect = ""
    """The figure in a strike's result that is 0 if the strike had no effect, if there is such a figure."""
    every = (0.2, 0.6)
    """Least and most seconds between two strikes."""
    afterwards = 2.0
    """Seconds of traffic after the last strike, so that a fault without recovery shows."""

    @classmethod
    def missing(cls) -> str | None:
        """Return what the fault needs and this machine lacks, or None."""
        return None

    @contextmanager
    def set_up(self, env: Environment) -> Iterator[None]:
        """Set up what the fault needs, before the traffic starts."""
        yield

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        """Inject the fault once; return the details to record."""
        return {}

    def recover(self, env: Environment) -> None:
        """Let the traffic continue after the last strike, and do in that time what an operator would do."""
        time.sleep(self.afterwards)


def all_faults() -> dict[str, type[Fault]]:
    """Return every fault by its name, in the same order in every process that collects the tests."""
    import importlib
    import pkgutil

    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    found: dict[str, type[Fault]] = {}
    pending = [Fault]
    while pending:
        one = pending.pop()
        if "name" in vars(one):  # the base class of a family has none
            found[one.name] = one
        pending += one.__subclasses__()
    return dict(sorted(found.items()))
