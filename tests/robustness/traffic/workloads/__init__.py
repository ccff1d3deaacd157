"""Workloads: what the traffic does. Each is a module of this package with a class `Workload`, named after the module.

A workload with several variants lists them in `VARIANTS`, and is named with one of them: `set_add:row`. To add a
workload, add its file: you can then play it by its name, and the whole matrix plays it too.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.robustness.checkers import Checker
    from tests.robustness.history.record import Recorder
    from tests.robustness.traffic.worker import Worker


class Base:
    """Base class of workloads: prepares the database, performs steps, records the final state, names its checkers."""

    checkers: tuple[Checker, ...] = ()
    """The checkers of the history."""
    exempt_checkers: Mapping[str, Mapping[str, str]] = {}
    """The checkers that are exempt under a fault, besides those that the fault itself exempts: by the fault's name and
    the checker's name, each with the reason."""
    threads = 2
    """Number of threads in each process."""

    def __init__(self, variant: str = "") -> None:
        self.variant = variant

    def prepare(self, dsn: str) -> None:
        """Create what the steps need, once, before any process starts."""

    @contextmanager
    def set_up(self, dsn: str, folder: Path) -> Iterator[dict[str, Any]]:
        """Run the services that the steps need besides the database, and yield options with their addresses."""
        yield {}

    def step(self, worker: Worker) -> None:
        """Perform one step; called repeatedly, in every thread of every process."""
        raise NotImplementedError

    def record_final_state(self, dsn: str, recorder: Recorder, options: dict[str, Any]) -> None:
        """Record the final state after the traffic has stopped."""


def named(name: str) -> Base:
    """Return the workload of this name."""
    module, _, variant = name.partition(":")
    workload: Any = importlib.import_module(f"{__name__}.{module}")
    found: Base = workload.Workload(variant)
    return found


def names() -> list[str]:
    """Return the names of all workloads."""
    found: list[str] = []
    for module in pkgutil.iter_modules(__path__):
        variants = getattr(importlib.import_module(f"{__name__}.{module.name}"), "VARIANTS", ())
        found += [f"{module.name}:{variant}" for variant in variants] or [module.name]
    return sorted(found)
