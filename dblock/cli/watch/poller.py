"""Looks at the database again and again, in a thread of its own, so that nobody else waits for it.

Guarantee: a look ends. One that is not answered within PATIENCE is cut off at its socket, and the next begins with a
new connection. While the database is away the looks go on failing, each saying why, and succeed again afterwards.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from dblock._core.schema_version import check_name
from dblock._runtime.error_mapping import translated
from dblock._runtime.socket_timeout import bounded
from dblock.admin.inspect import LockState, Overview
from dblock.admin.schema import status_of
from dblock.cli.watch.changes import Look, Opened, Refusal, doubtful
from dblock.errors import DblockError

if TYPE_CHECKING:
    import psycopg

    from dblock._runtime.target import Target

PATIENCE = 5.0
"""Seconds that a look may take."""
MOST = 5000
"""How many locks are looked at."""
FENCES = "fenced_store"


class Looking:
    """Looks at one database; the answers are for one reader."""

    def __init__(self, target: Target, schema: str, pattern: str, interval: float) -> None:
        self._target = target
        self._schema = check_name(schema)
        self._pattern = pattern
        self._interval = interval
        self._connection: psycopg.Connection[Any] | None = None
        self._sees_fences = False
        self._last: Look | None = None
        self._sooner = threading.Event()
        self._ending = False
        self.answers: queue.SimpleQueue[Look | DblockError] = queue.SimpleQueue()
        self.opened: str | None = None
        """The lock that is looked at closely."""

    def look(self) -> Look:
        """Look once, now; or raise what is in the way."""
        try:
            with translated(self._schema):
                return self._look()
        except BaseException:
            self.close()
            raise

    def begin(self, tell: Callable[[], object]) -> None:
        """Go on looking; `tell` is called when there is an answer."""
        threading.Thread(target=self._go_on, args=(tell,), name="dblock watch", daemon=True).start()

    def open(self, name: str | None) -> None:
        """Look closely at a lock from now on, or at none; at once."""
        if name != self.opened:
            self.opened = name
            self._sooner.set()

    def end(self) -> None:
        """Look no more; a look that is under way is left to itself."""
        self._ending = True
        self._sooner.set()

    def close(self) -> None:
        """Give the connection up."""
        if self._connection is not None:
            with contextlib.suppress(Exception):
                self._connection.close()
            self._connection = None

    def _go_on(self, tell: Callable[[], object]) -> None:
        while True:
            self._sooner.wait(self._interval)
            if self._ending:
                self.close()
                return
            self._sooner.clear()
            try:
                answer: Look | DblockError = self.look()
            except DblockError as error:
                answer = error
            except Exception as error:
                answer = DblockError(f"this should not happen: {type(error).__name__}: {error}")
            self.answers.put(answer)
            tell()

    def _look(self) -> Look:
        if self._connection is None:
            self._connection = self._target.connect()
            with bounded(self._connection, PATIENCE):
                status_of(self._connection, self._schema).check()
                self._sees_fences = _may_see_fences(self._connection)
        connection = self._connection
        overview = Overview(connection, self._schema)
        with bounded(connection, PATIENCE):
            locks = overview.locks(self._pattern, limit=MOST + 1)
            more, locks = len(locks) > MOST, locks[:MOST]
            gone = self._gone(overview, locks)
            history = overview.history(limit=100)
            refusals = _refusals(connection) if self._sees_fences else None
            opened = self._opened(overview, self.opened)
        now = datetime.now().astimezone()
        self._last = Look(time.monotonic(), now, locks, more, gone, history, refusals, opened)
        return self._last

    def _gone(self, overview: Overview, locks: list[LockState]) -> dict[str, LockState]:
        if self._last is None:
            return {}
        names = doubtful(self._last, locks, time.monotonic())
        return {lock.name: lock for name in names for lock in overview.locks(name=name, include_free=True, limit=1)}

    def _opened(self, overview: Overview, name: str | None) -> Opened | None:
        if name is None:
            return None
        found = overview.locks(name=name, include_free=True, limit=1)
        return Opened(name, found[0] if found else None, overview.waiters(name), overview.history(name, limit=50))


def _may_see_fences(connection: psycopg.Connection[Any]) -> bool:
    row = connection.execute(
        "SELECT has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')"
        " FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relname = 'rejections'",
        [FENCES],
    ).fetchone()
    return bool(row and row[0])


def _refusals(connection: psycopg.Connection[Any]) -> list[Refusal]:
    """Return the latest refusals, the newest first."""
    found = connection.execute(
        "SELECT id, rejected_at, resource, offered_token, stored_token, rejected, refused"
        " FROM fenced_store.rejections ORDER BY id DESC LIMIT 100"
    ).fetchall()
    return [Refusal(*row) for row in found]
