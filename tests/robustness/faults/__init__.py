"""Faults: what is done to the processes, the network and the server while the traffic goes on.

Each is a class with a name. `setting` makes what it needs on the stage before the traffic starts; `strike` does it
once, and returns when it is over and the traffic can go on. A fault says which checkers cannot be asked after it, and
why; and where it cannot be done on this machine, what is missing: it is then skipped with that reason, and does not
count as passed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.robustness.traffic.stage import Stage


class CannotBeDone(Exception):
    """What a fault needs is not there; the reason to skip it."""


class Fault:
    """Nothing happens; the base of all others."""

    name = "none"
    settings: Mapping[str, str] = {}
    """Settings of the server that it takes."""
    excuses: Mapping[str, str] = {}
    """The checkers that cannot be asked, by name, with the reason."""
    effect = ""
    """Which of the figures that a strike returns says whether it did anything, if one does; at 0 it was in vain."""
    every = (0.2, 0.6)
    """Seconds between two strikes."""
    afterwards = 2.0
    """Seconds for which the traffic goes on after the last strike: a fault that it does not recover from would show."""

    @classmethod
    def missing(cls) -> str | None:
        """Say what it needs and this machine does not have, if anything."""
        return None

    @contextmanager
    def setting(self, stage: Stage) -> Iterator[None]:
        """Make what it needs, on a stage that the traffic has not entered yet."""
        yield

    def strike(self, stage: Stage, dice: random.Random) -> dict[str, object]:
        """Do it once; the result is what to write down of it."""
        return {}

    def recover(self, stage: Stage) -> None:
        """Let the traffic go on after the last strike, and do meanwhile what an operator would."""
        time.sleep(self.afterwards)


def all_faults() -> dict[str, type[Fault]]:
    """Return every fault by its name."""
    import importlib
    import pkgutil

    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    found: dict[str, type[Fault]] = {}
    pending = [Fault]
    while pending:
        one = pending.pop()
        if "name" in vars(one):  # the base of a family has none
            found[one.name] = one
        pending += one.__subclasses__()
    return found
