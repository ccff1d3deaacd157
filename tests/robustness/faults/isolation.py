"""Make the server's transactions stricter by default, which must change nothing."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import psycopg

from tests.robustness.faults import Fault

if TYPE_CHECKING:
    from tests.robustness.traffic.environment import Environment


class StricterIsolation(Fault):
    """Make REPEATABLE READ or SERIALIZABLE the default of every session, those that are open included."""

    name = "isolation"

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        level = rng.choice(["repeatable read", "serializable"])
        with psycopg.connect(env.direct, autocommit=True) as owner:
            owner.execute(f"ALTER SYSTEM SET default_transaction_isolation = '{level}'".encode())
            owner.execute("SELECT pg_reload_conf()")
        return {"level": level}
