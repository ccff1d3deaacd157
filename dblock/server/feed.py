"""One snapshot of the locks a second, shared by every stream of this server.

Guarantee: the feed queries the database once per interval, for any number of browsers, and not at all while no browser
watches. If the database does not reply within an interval, the last snapshot stays, with its age and the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from dblock.errors import DblockError, Unavailable
from dblock.server.database import Database

logger = logging.getLogger("dblock")

INTERVAL = 1.0
"""Seconds between two snapshots."""

MOST_LOCKS = 1000


@dataclass(frozen=True)
class Snapshot:
    """The locks at one moment."""

    number: int = 0
    """The number of this attempt to take a snapshot, counted in this process."""
    locks: list[dict[str, Any]] = field(default_factory=list)
    """The rows of list_locks(), each with its waiters in order under `queue`, the seconds since its grant under
    `held_for`, and `alive` and `session` of its presence."""
    taken_at: float | None = None
    """When the locks were read, on the monotonic clock. None if they were never read."""
    error: DblockError | None = None
    """Why the last attempt to read the locks failed. None if it succeeded."""
    more: bool = False
    """Whether there are more locks than a snapshot has."""

    @property
    def age(self) -> float | None:
        """Seconds since the locks were read."""
        return None if self.taken_at is None else time.monotonic() - self.taken_at


class Feed:
    """Takes snapshots while a stream is open."""

    def __init__(self, database: Database, stopping: asyncio.Event, interval: float = INTERVAL) -> None:
        self._database = database
        self._stopping = stopping
        self._interval = interval
        self._arrived = asyncio.Event()
        self._reading = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._tried_at = float("-inf")
        self.latest = Snapshot()
        self.watchers = 0
        """How many streams wait for snapshots."""
        self.streams = 0
        """How many streams are open, those that have not begun to wait included."""

    async def snapshots(self) -> AsyncGenerator[Snapshot, None]:
        """Yield the latest snapshot and then each new one, until the server stops. A slow reader skips some."""
        self.watchers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._take_snapshots())
        try:
            seen = self.latest.number if self._is_old() else self.latest.number - 1
            while not self._stopping.is_set():
                if self.latest.number > seen:
                    seen = self.latest.number
                    yield self.latest
                else:
                    await self._arrived.wait()
        finally:
            self.watchers -= 1

    async def current(self) -> Snapshot:
        """Return a snapshot that is not older than the interval: the shared one if there is one."""
        async with self._reading:
            just_failed = self.latest.error is not None and time.monotonic() - self._tried_at < self._interval
            if self._is_old() and not just_failed:
                await self._take_one()
            return self.latest

    async def close(self) -> None:
        """Stop taking snapshots, and end the streams."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._wake()

    def _is_old(self) -> bool:
        age = self.latest.age
        return age is None or age > 2 * self._interval

    async def _take_snapshots(self) -> None:
        next_at = time.monotonic()
        while self.watchers and not self._stopping.is_set():
            await self._take_one()
            # From the plan, not from now: a slow reply must not slow the feed down.
            next_at = max(next_at + self._interval, time.monotonic())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), next_at - time.monotonic())
        self._wake()

    async def _take_one(self) -> None:
        began = time.monotonic()
        reading = asyncio.ensure_future(
            self._database.read(
                "list_locks('%', NULL, false, $1) AS l", str(MOST_LOCKS + 1), extra=_EXTRA, where=_PRESENCE
            )
        )
        try:
            while not (await asyncio.wait([reading], timeout=self._interval))[0]:
                if self.latest.taken_at is not None:
                    self._failed(Unavailable("The database has not replied yet."))
            locks = reading.result()
            self._publish(Snapshot(self.latest.number + 1, locks[:MOST_LOCKS], began, more=len(locks) > MOST_LOCKS))
        except DblockError as error:
            self._failed(error)
        except Exception as error:
            # Without a snapshot the streams would wait for good, and show what is old as current.
            logger.exception("feed: unexpected error, no snapshot")
            self._failed(Unavailable(f"The server met an unexpected {type(error).__name__}."))
        finally:
            self._tried_at = time.monotonic()
            reading.cancel()

    def _failed(self, error: DblockError) -> None:
        last = self.latest
        self._publish(Snapshot(last.number + 1, last.locks, last.taken_at, error, last.more))

    def _publish(self, snapshot: Snapshot) -> None:
        self.latest = snapshot
        self._wake()

    def _wake(self) -> None:
        """Wake every stream. Each waits for the event that was current when it began to wait."""
        arrived, self._arrived = self._arrived, asyncio.Event()
        arrived.set()


def lock_columns(waiters: int) -> tuple[str, str]:
    """Return the extra columns for a read of list_locks() AS l, and the join with the presence.

    The same statement returns the first waiters of each lock.
    """
    extra = (
        "date_part('epoch', clock_timestamp()) - date_part('epoch', granted_at) AS held_for,"
        " (SELECT coalesce(json_agg(to_jsonb(w) - 'name' ORDER BY w.position), '[]')"
        f" FROM {{schema}}.list_waiters(l.name, {waiters}) AS w WHERE l.waiting > 0) AS queue"
    )
    return extra, "LEFT JOIN {schema}.list_presence() AS p USING (name, token)"


_EXTRA, _PRESENCE = lock_columns(100)
