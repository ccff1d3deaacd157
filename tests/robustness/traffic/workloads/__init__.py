"""Workloads: what the traffic does. Each is a module of this package with a class `Workload`; its name is the module's.

One that is done in several ways has `VARIANTS`, and is named with one of them: `set_add:row`. Adding a workload is
adding its file: it can be played by its name then, and the whole matrix plays it too.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.robustness.checkers import Checker
    from tests.robustness.history.record import Recorder
    from tests.robustness.traffic.worker import Worker


class Base:
    """What a workload may do besides its steps: prepare the database, look at it in the end, and name its checkers."""

    checkers: tuple[Checker, ...] = ()
    """What must be true of the history."""
    threads = 2
    """Threads of each process."""

    def __init__(self, variant: str = "") -> None:
        self.variant = variant

    def prepare(self, dsn: str) -> None:
        """Make what the steps need, once, before any process starts."""

    @contextmanager
    def setting(self, dsn: str, folder: Path) -> Iterator[dict[str, Any]]:
        """Run what the steps need besides the database, while the stage stands; yield options that tell where."""
        yield {}

    def step(self, worker: Worker) -> None:
        """Do one thing; called again and again, in every thread of every process."""
        raise NotImplementedError

    def conclude(self, dsn: str, recorder: Recorder, options: dict[str, Any]) -> None:
        """Write down how things stand when all is over."""


def named(name: str) -> Base:
    """Return a workload."""
    module, _, variant = name.partition(":")
    workload: Any = importlib.import_module(f"{__name__}.{module}")
    found: Base = workload.Workload(variant)
    return found


def names() -> list[str]:
    """Return the names of all of them."""
    found: list[str] = []
    for module in pkgutil.iter_modules(__path__):
        variants = getattr(importlib.import_module(f"{__name__}.{module.name}"), "VARIANTS", ())
        found += [f"{module.name}:{variant}" for variant in variants] or [module.name]
    return sorted(found)
