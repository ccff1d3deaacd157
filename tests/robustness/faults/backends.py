"""Terminate sessions of the traffic, or cancel their statements, on the server."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import psycopg

from tests.robustness.faults import Fault

if TYPE_CHECKING:
    from tests.robustness.traffic.environment import Environment

SESSIONS = "SELECT pid FROM pg_stat_activity WHERE application_name = 'dblock' AND pid <> pg_backend_pid()"
LISTENERS = (
    "SELECT DISTINCT a.pid FROM pg_stat_activity a JOIN pg_locks l USING (pid) WHERE a.application_name = 'dblock'"
    " AND l.locktype = 'advisory' AND l.granted AND a.state = 'idle'"
)
"""Idle sessions that hold an advisory lock: that is presence, and these are the sessions on which clients listen."""


class Backends(Fault):
    """Choose some sessions and terminate them or cancel their statements; the base class of these faults."""

    effect = "sessions"
    every = (0.05, 0.3)
    among = SESSIONS
    action = "pg_terminate_backend"

    def choose(self, found: list[int], rng: random.Random) -> list[int]:
        """Choose among the current sessions."""
        return rng.sample(found, rng.randint(1, min(3, len(found)))) if found else []

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        with psycopg.connect(env.direct, autocommit=True) as owner:
            found = sorted(int(row[0]) for row in owner.execute(self.among.encode()).fetchall())
            chosen = self.choose(found, rng)
            rows = owner.execute(f"SELECT {self.action}(pid) FROM unnest(%s::int[]) pid".encode(), [chosen]).fetchall()
        return {"sessions": sum(row[0] for row in rows)}


class Terminate(Backends):
    """Terminate a few sessions, of any kind."""

    name = "terminate"


class TerminateListeners(Backends):
    """Terminate the sessions that receive wake-ups and hold presence."""

    name = "terminate-listeners"
    among = LISTENERS


class TerminateAll(Backends):
    """Terminate every session at once."""

    name = "terminate-all"
    every = (0.2, 0.6)

    def choose(self, found: list[int], rng: random.Random) -> list[int]:
        return found


class CancelStatements(Backends):
    """Cancel running statements, as a role with the privilege to do so."""

    name = "cancel-statements"
    every = (0.01, 0.05)
    among = f"{SESSIONS} AND state = 'active'"

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        """Look repeatedly until there is a statement to cancel, because statements are brief."""
        with psycopg.connect(env.direct, autocommit=True) as owner:
            for attempt in range(200):
                rows = owner.execute(
                    "SELECT pg_cancel_backend(pid), left(query, 60) FROM pg_stat_activity WHERE application_name ="
                    " 'dblock' AND state = 'active' AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
                ).fetchall()
                if rows:
                    return {"sessions": len(rows), "attempts": attempt + 1, "statement": rows[0][1]}
        return {"sessions": 0}
