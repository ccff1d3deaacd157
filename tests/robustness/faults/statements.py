"""End statements early on the server, or hold the rows and tables that they need in another transaction."""

from __future__ import annotations

import random
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import psycopg

from tests.robustness.faults import Fault

if TYPE_CHECKING:
    from tests.robustness.traffic.environment import Environment

LONGEST_TTL = 2.0


class Timeouts(Fault):
    """Set timeouts so short that many statements exceed them, for the whole server or for new sessions."""

    name = "timeouts"
    choices: tuple[tuple[str, str], ...] = (
        ("statement_timeout", "2ms"),
        ("statement_timeout", "8ms"),
        ("lock_timeout", "1ms"),
        ("idle_in_transaction_session_timeout", "1ms"),
        ("idle_session_timeout", "5ms"),
        ("transaction_timeout", "8ms"),
        ("deadlock_timeout", "1ms"),
    )

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        name, value = rng.choice(self.choices)
        scope = rng.choice(["system", "role"])
        with psycopg.connect(env.direct, autocommit=True) as owner:
            # These settings protect this session, whatever applies to the server or the role.
            for one in {name for name, _ in self.choices} - {"deadlock_timeout"}:
                owner.execute(f"SET {one} = 0".encode())
            try:
                self._set(owner, scope, f"SET {name} = '{value}'")
                time.sleep(rng.uniform(0.3, 1.0))
            finally:
                self._set(owner, scope, f"RESET {name}")
        return {"setting": name, "value": value, "scope": scope}

    @staticmethod
    def _set(owner: psycopg.Connection, scope: str, what: str) -> None:
        if scope == "system":
            owner.execute(f"ALTER SYSTEM {what}".encode())
            owner.execute("SELECT pg_reload_conf()")
        else:
            owner.execute(f"ALTER ROLE CURRENT_USER {what}".encode())
            # A role's setting applies to new sessions only.
            owner.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'dblock'"
                " AND pid <> pg_backend_pid()"
            )


class ForeignRows(Fault):
    """Hold the rows of locks in another transaction for a while, on a server that detects deadlocks quickly."""

    name = "foreign-rows"
    effect = "rows"
    settings = {"deadlock_timeout": "1ms"}  # noqa: RUF012
    take = "SELECT FROM dblock.distributed_locks WHERE name = %s FOR UPDATE"

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        seconds = rng.choice([0.05, 0.3, 1.3]) * LONGEST_TTL * rng.uniform(0.8, 1.2)
        with closing(psycopg.connect(env.direct)) as other:
            found = other.execute("SELECT name FROM dblock.distributed_locks ORDER BY name").fetchall()
            other.rollback()
            names = [name for (name,) in rng.sample(found, rng.randint(1, len(found)))] if found else []
            held = 0
            with suppress(psycopg.errors.DeadlockDetected):
                for name in names:
                    other.execute(self.take.encode(), [name])
                    held += 1
            time.sleep(seconds)
            other.rollback()
        return {"rows": held, "seconds": seconds}


class ForeignTable(Fault):
    """Hold a whole dblock table in another transaction for a while, against all access."""

    name = "foreign-table"

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        seconds = rng.choice([0.05, 0.3, 1.3]) * LONGEST_TTL * rng.uniform(0.8, 1.2)
        with closing(psycopg.connect(env.direct)) as other:
            tables = other.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'dblock' ORDER BY 1").fetchall()
            table = "distributed_locks" if rng.random() < 0.5 else rng.choice(tables)[0]
            other.execute(f"LOCK TABLE dblock.{table}".encode())
            time.sleep(seconds)
            other.rollback()
        return {"table": table, "seconds": seconds}
