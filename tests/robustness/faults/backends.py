"""Sessions of the traffic that the server ends, and statements of theirs that it cancels."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import psycopg

from tests.robustness.faults import Fault

if TYPE_CHECKING:
    from tests.robustness.traffic.stage import Stage

SESSIONS = "SELECT pid FROM pg_stat_activity WHERE application_name = 'dblock' AND pid <> pg_backend_pid()"
LISTENERS = (
    "SELECT DISTINCT a.pid FROM pg_stat_activity a JOIN pg_locks l USING (pid) WHERE a.application_name = 'dblock'"
    " AND l.locktype = 'advisory' AND l.granted AND a.state = 'idle'"
)
"""Those that hold a mark while they do nothing: presence, and that is what clients listen on."""


class Backends(Fault):
    """The base of these: some sessions are chosen, and the server is told what to do with them."""

    effect = "sessions"
    every = (0.05, 0.3)
    among = SESSIONS
    action = "pg_terminate_backend"

    def choose(self, found: list[int], dice: random.Random) -> list[int]:
        """Choose among the sessions that there are."""
        return dice.sample(found, dice.randint(1, min(3, len(found)))) if found else []

    def strike(self, stage: Stage, dice: random.Random) -> dict[str, object]:
        with psycopg.connect(stage.direct, autocommit=True) as owner:
            found = sorted(int(row[0]) for row in owner.execute(self.among.encode()).fetchall())
            chosen = self.choose(found, dice)
            told = owner.execute(f"SELECT {self.action}(pid) FROM unnest(%s::int[]) pid".encode(), [chosen]).fetchall()
        return {"sessions": sum(row[0] for row in told)}


class Terminate(Backends):
    """A few sessions are ended, whichever they are."""

    name = "terminate"


class TerminateListeners(Backends):
    """Sessions are ended by which clients are woken, and seen to be there."""

    name = "terminate-listeners"
    among = LISTENERS


class TerminateAll(Backends):
    """Every session is ended at once."""

    name = "terminate-all"
    every = (0.2, 0.6)

    def choose(self, found: list[int], dice: random.Random) -> list[int]:
        return found


class CancelStatements(Backends):
    """Statements that are under way are cancelled, by somebody who has the right to."""

    name = "cancel-statements"
    every = (0.01, 0.05)
    among = f"{SESSIONS} AND state = 'active'"

    def strike(self, stage: Stage, dice: random.Random) -> dict[str, object]:
        """Look again and again until there is something to cancel: statements are brief."""
        with psycopg.connect(stage.direct, autocommit=True) as owner:
            for look in range(200):
                told = owner.execute(
                    "SELECT pg_cancel_backend(pid), left(query, 60) FROM pg_stat_activity WHERE application_name ="
                    " 'dblock' AND state = 'active' AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
                ).fetchall()
                if told:
                    return {"sessions": len(told), "looks": look + 1, "statement": told[0][1]}
        return {"sessions": 0}
