"""Workloads: what the traffic does. Each is a module of this package with a class `Workload`; its name is the module's.

Adding one is adding its file, and naming it in the scenarios that should run it.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.robustness.checkers import Checker
    from tests.robustness.histories import Recorder
    from tests.robustness.traffic import Worker


class Base:
    """What a workload may do besides its steps: prepare the database, look at it in the end, and name its checkers."""

    checkers: tuple[Checker, ...] = ()
    """What must be true of the history."""

    def prepare(self, dsn: str) -> None:
        """Make what the steps need, once, before any process starts."""

    def step(self, worker: Worker) -> None:
        """Do one thing; called again and again, in every thread of every process."""
        raise NotImplementedError

    def conclude(self, dsn: str, recorder: Recorder) -> None:
        """Write down how things stand when all is over."""


def named(name: str) -> Base:
    """Return a workload."""
    workload: Any = importlib.import_module(f"{__name__}.{name}")
    found: Base = workload.Workload()
    return found


def names() -> list[str]:
    """Return the names of all of them."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))
