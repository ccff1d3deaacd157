"""Which sessions keep the run's sessions from a table: seen while they wait, because afterwards no trace is left."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import psycopg

from dblock.errors import DblockError

if TYPE_CHECKING:
    from dblock._runtime.target import Target

logger = logging.getLogger("dblock")

MOST = 5
STATEMENT_LENGTH = 200

QUERY = f"""
    SELECT DISTINCT ON (b.pid) b.pid, extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, a.backend_start)),
           a.application_name, left(a.query, {STATEMENT_LENGTH})
    FROM pg_stat_activity AS m CROSS JOIN LATERAL unnest(pg_blocking_pids(m.pid)) AS b (pid)
    LEFT JOIN pg_stat_activity AS a ON a.pid = b.pid
    WHERE m.application_name = %s AND m.datname = current_database()
    ORDER BY b.pid LIMIT {MOST}
"""


class Blockers:
    """Looks for blockers in a thread with a connection of its own, until it is stopped."""

    def __init__(self, target: Target, mark: str, interval: float) -> None:
        self._target = target
        self._mark = mark
        self._interval = interval
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dblock-blockers", daemon=True)
        self._seen: list[str] = []

    def start(self) -> None:
        """Start to look for blockers."""
        self._thread.start()

    def stop(self) -> None:
        """Stop looking, and close the connection."""
        self._over.set()
        self._thread.join()

    def take(self) -> list[str]:
        """Return the blockers that were seen last, and forget them."""
        seen, self._seen = self._seen, []
        return seen

    def described(self) -> str:
        """Return a sentence about the blockers that were seen last, and forget them."""
        seen = self.take()
        return f"Blocked by {'; '.join(seen)}" if seen else "No blocker was seen."

    def _watch(self) -> None:
        connection: psycopg.Connection[Any] | None = None
        while not self._over.wait(self._interval):
            try:
                connection = connection or self._connected()
                rows = connection.execute(QUERY, [self._mark]).fetchall()
            except (psycopg.Error, DblockError) as error:
                logger.debug("migration: could not look for blockers: %s", error)
                connection = None
                continue
            if rows:
                self._seen = [described(*row) for row in rows]
        if connection is not None:
            connection.close()

    def _connected(self) -> psycopg.Connection[Any]:
        connection = self._target.connect()
        # A pooler gives the server's session, with all that was prepared in it, to other clients.
        connection.prepare_threshold = None
        return connection


def described(pid: int, age: object, application: str | None, statement: str | None) -> str:
    """Describe one blocker in a line."""
    if age is None:
        return f"pid {pid} (a prepared transaction, or a session that this role may not see)"
    return f"pid {pid}, for {float(str(age)):.1f} s, application {application or ''!r}: {(statement or '').strip()}"
