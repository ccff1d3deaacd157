"""One snapshot of the locks a second, shared by every stream of this server.

Guarantee: however many browsers watch, the database is asked once per interval, and not at all while none does. If the
database is away, the last snapshot stays, with its age and the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from dblock.errors import DblockError
from dblock.server.database import Database

INTERVAL = 1.0
"""Seconds between two snapshots."""

MOST_LOCKS = 1000


@dataclass(frozen=True)
class Snapshot:
    """The locks at one moment."""

    number: int = 0
    """Counts the attempts to take a snapshot in this process."""
    locks: list[dict[str, Any]] = field(default_factory=list)
    """The rows of list_locks(), each with its waiters in order under `queue`."""
    taken_at: float | None = None
    """When the locks were read, on the monotonic clock. None if they never were."""
    error: DblockError | None = None
    """Why the locks could not be read again since."""

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
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self.latest = Snapshot()
        self.watchers = 0
        """How many streams are open."""

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yield the latest snapshot and then each new one, until the server stops. A slow reader skips some."""
        self.watchers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._take_snapshots())
        try:
            seen = self.latest.number if self._is_old() else self.latest.number - 1
            while not self._stopping.is_set():
                async with self._changed:
                    while self.latest.number <= seen and not self._stopping.is_set():
                        await self._changed.wait()
                if self._stopping.is_set():
                    return
                seen = self.latest.number
                yield self.latest
        finally:
            self.watchers -= 1

    async def current(self) -> Snapshot:
        """Return a snapshot that is not older than the interval: the shared one if there is one."""
        if self._is_old():
            await self._take_one()
        return self.latest

    async def close(self) -> None:
        """Stop taking snapshots, and end the streams."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        async with self._changed:
            self._changed.notify_all()

    def _is_old(self) -> bool:
        age = self.latest.age
        return age is None or age > 2 * self._interval

    async def _take_snapshots(self) -> None:
        next_at = time.monotonic()
        while self.watchers:
            await self._take_one()
            # From the plan, not from now: a slow reply must not slow the feed down.
            next_at = max(next_at + self._interval, time.monotonic())
            await asyncio.sleep(next_at - time.monotonic())

    async def _take_one(self) -> None:
        number = self.latest.number + 1
        began = time.monotonic()
        try:
            locks = await self._database.read("list_locks('%', NULL, false, $1) AS l", str(MOST_LOCKS), extra=_QUEUE)
            self.latest = Snapshot(number, locks, began)
        except DblockError as error:
            self.latest = Snapshot(number, self.latest.locks, self.latest.taken_at, error)
        async with self._changed:
            self._changed.notify_all()


_QUEUE = (
    "(SELECT coalesce(json_agg(to_jsonb(w) - 'name' ORDER BY w.position), '[]')"
    " FROM {schema}.list_waiters(l.name, 100) AS w WHERE l.waiting > 0) AS queue"
)
"""The first waiters of each lock that has some, in the same statement."""
