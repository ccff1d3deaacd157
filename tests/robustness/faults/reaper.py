"""Run the reaper: not a fault, but it deletes rows while the traffic runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg

from tests.robustness.faults import Fault

if TYPE_CHECKING:
    from tests.robustness.traffic.environment import Environment


class Reap(Fault):
    """Delete every lock that is free at this moment."""

    name = "reap"
    effect = "gone"
    every = (0.01, 0.05)
    afterwards = 4.0

    @contextmanager
    def set_up(self, env: Environment) -> Iterator[None]:
        """Let workloads pause that would otherwise leave no lock free."""
        env.options["pause"] = 2.0
        yield

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        with psycopg.connect(env.direct, autocommit=True) as owner:
            row = owner.execute("SELECT dblock.reap('0 seconds')").fetchone()
        return {"gone": row[0] if row else 0}
