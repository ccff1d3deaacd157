"""Run a transaction again if a statement in it could not lock a table in time, or deadlocked.

Such a transaction is rolled back as a whole, so that it can run again. A statement outside transactions is never
repeated: a CREATE INDEX CONCURRENTLY that was cut leaves an invalid index.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dblock.errors import MigrationBlocked

if TYPE_CHECKING:
    from dblock.recipes.migrations.blockers import Blockers

logger = logging.getLogger("dblock")

REPEATED = {"55P03": "could not lock a table in time", "40P01": "deadlocked"}
"""The SQLSTATEs after which a transaction is run again, and what has happened."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 45.0
"""Seconds between two tries: doubled each time. Ten of them and ten lock timeouts take about five minutes."""


class Retries:
    """Counts the tries of one transaction."""

    def __init__(self, name: str, blockers: Blockers, retries: int) -> None:
        self._name = name
        self._blockers = blockers
        self._retries = retries
        self._tries = 0

    def pause_after(self, state: str, error: BaseException, *, may_repeat: bool = True) -> float:
        """Log the sessions that were in the way, and return the seconds until the next try.

        Raise MigrationBlocked from the error if no try is left, or the transaction must not run again.
        """
        self._tries += 1
        if self._tries > self._retries or not may_repeat:
            raise MigrationBlocked(self._name, REPEATED[state], self._tries, self._blockers.take()) from error
        pause: float = min(FIRST_PAUSE * 2.0 ** (self._tries - 1), LONGEST_PAUSE)
        logger.warning(
            "migration %r %s (try %d of %d), and is run again in %g s. %s",
            *(self._name, REPEATED[state], self._tries, self._retries + 1, pause, self._blockers.described()),
        )
        return pause
