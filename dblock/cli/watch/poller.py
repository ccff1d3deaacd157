"""Poll the database from a separate thread, so that the screen never waits for it.

Guarantee: every poll ends. If the database does not reply within POLL_TIMEOUT, the socket is shut down and the next
poll opens a new connection. While the database is away each poll fails with its reason; afterwards polls succeed again.
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
from dblock.cli.watch.changes import LockDetail, Refusal, Snapshot, possibly_expired
from dblock.errors import DblockError

if TYPE_CHECKING:
    import psycopg

    from dblock._runtime.target import Target

POLL_TIMEOUT = 5.0
"""Seconds that a poll may take."""
MAX_LOCKS = 5000
"""The number of locks in a snapshot, at most."""
FENCES = "fenced_store"


class Poller:
    """Polls one database, for one reader of the results."""

    def __init__(self, target: Target, schema: str, pattern: str, interval: float) -> None:
        self._target = target
        self._schema = check_name(schema)
        self._pattern = pattern
        self._interval = interval
        self._connection: psycopg.Connection[Any] | None = None
        self._sees_fences = False
        self._last: Snapshot | None = None
        self._wake = threading.Event()
        self._stopping = False
        self.results: queue.SimpleQueue[Snapshot | DblockError] = queue.SimpleQueue()
        self.opened: str | None = None
        """The lock whose queue and history each snapshot includes."""

    def poll(self) -> Snapshot:
        """Poll once, now, and return the snapshot; raise if the database cannot be read."""
        try:
            with translated(self._schema):
                return self._take_snapshot()
        except BaseException:
            self.close()
            raise

    def start(self, on_result: Callable[[], object]) -> None:
        """Start polling in the background; `on_result` is called after each result."""
        threading.Thread(target=self._run, args=(on_result,), name="dblock watch", daemon=True).start()

    def open(self, name: str | None) -> None:
        """Include this lock's queue and history from now on, or none, and poll at once."""
        if name != self.opened:
            self.opened = name
            self._wake.set()

    def stop(self) -> None:
        """Stop polling, without waiting for a poll that is under way."""
        self._stopping = True
        self._wake.set()

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            with contextlib.suppress(Exception):
                self._connection.close()
            self._connection = None

    def _run(self, on_result: Callable[[], object]) -> None:
        while True:
            self._wake.wait(self._interval)
            if self._stopping:
                self.close()
                return
            self._wake.clear()
            try:
                result: Snapshot | DblockError = self.poll()
            except DblockError as error:
                result = error
            except Exception as error:
                result = DblockError(f"Unexpected error, a bug: {type(error).__name__}: {error}")
            self.results.put(result)
            on_result()

    def _take_snapshot(self) -> Snapshot:
        if self._connection is None:
            self._connection = self._target.connect()
            with bounded(self._connection, POLL_TIMEOUT):
                status_of(self._connection, self._schema).check()
                self._sees_fences = _may_see_fences(self._connection)
        connection = self._connection
        overview = Overview(connection, self._schema)
        with bounded(connection, POLL_TIMEOUT):
            locks = overview.locks(self._pattern, limit=MAX_LOCKS + 1)
            more, locks = len(locks) > MAX_LOCKS, locks[:MAX_LOCKS]
            gone = self._ended_locks(overview, locks)
            history = overview.history(limit=100)
            refusals = _refusals(connection) if self._sees_fences else None
            opened = self._detail(overview, self.opened)
        now = datetime.now().astimezone()
        self._last = Snapshot(time.monotonic(), now, locks, more, gone, history, refusals, opened)
        return self._last

    def _ended_locks(self, overview: Overview, locks: list[LockState]) -> dict[str, LockState]:
        if self._last is None:
            return {}
        names = possibly_expired(self._last, locks, time.monotonic())
        return {lock.name: lock for name in names for lock in overview.locks(name=name, include_free=True, limit=1)}

    def _detail(self, overview: Overview, name: str | None) -> LockDetail | None:
        if name is None:
            return None
        found = overview.locks(name=name, include_free=True)
        shares = [lock for lock in found[1:] if lock.state != "free"]
        lock = found[0] if found else None
        return LockDetail(name, lock, overview.waiters(name), overview.history(name, limit=50), shares)


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
