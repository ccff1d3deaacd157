"""The requests of this server that wait for a lock.

Guarantee: a request that ends without a reply leaves no grant and no ticket that its client does not know. If the
client disconnects, a private attempt is given up at once. A resumable attempt (with a ticket or an Idempotency-Key)
keeps its position for the ticket's ttl. When the server stops, every waiter gets a ticket, and a request that tries
once gets the reply of the database.

A client whose connection broke may repeat its request before this server has noticed. The newer request takes over,
and the older one ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from dblock._core.options import LockOptions
from dblock._core.replies import Grant
from dblock.errors import DatabaseError, DblockError
from dblock.server.database import Database
from dblock.server.problems import Problem
from dblock.server.settings import Limits

ENDED_WITHIN = 1.0
"""Seconds that the server waits for its requests when it stops."""


class Disconnected(Exception):
    """The client has disconnected, so no reply can be delivered."""


class _Wait:
    """One request that waits."""

    def __init__(self, work: asyncio.Task[Grant | None], private: bool) -> None:
        self.work = work
        self.private = private
        """Whether no client can name its attempt before this request is answered."""
        self.superseded = False
        self.cleanup_deferred = False


class Waits:
    """The requests that wait, by their attempts."""

    def __init__(self, database: Database, limits: Limits, stopping: asyncio.Event) -> None:
        self._database = database
        self._limits = limits
        self._stopping = stopping
        self._waits: dict[str, _Wait] = {}

    @property
    def count(self) -> int:
        """How many requests wait."""
        return len(self._waits)

    async def acquire(
        self,
        options: LockOptions,
        seconds: float,
        attempt: str,
        resumed: bool,
        gone: Callable[[], Awaitable[None]],
    ) -> Grant | Literal["held", "queued", "requeued"]:
        """Acquire the lock for a request, in at most so many seconds. With 0 seconds, try once.

        `resumed` means that another request may have had the attempt before. `gone` returns when the client has
        disconnected, and then Disconnected is raised. The result `queued` means that the attempt has a ticket that
        keeps its position, `requeued` that its earlier position was lost, and `held` that it has no ticket, because the
        request does not wait.
        """
        flows = self._database.flows
        await self._supersede(attempt)
        if self.count >= self._limits.waiters:
            raise Problem(
                429,
                "too-many-waiters",
                "Too many requests wait at this server",
                f"This server lets {self._limits.waiters} requests wait at a time.",
                "Try again later, or at another server.",
                {"Retry-After": "1"},
            )
        if not resumed:
            flows.private.add(attempt)
        # Straight into the queue, so that a request that waits always has a ticket when it ends.
        flow = flows.acquire(options, seconds, attempt, crowded=seconds > 0)
        wait = _Wait(asyncio.ensure_future(self._database.run(flow)), not resumed)
        self._waits[attempt] = wait
        try:
            grant = await self._outcome(wait, attempt, options, gone, queues=seconds > 0)
        except DatabaseError:
            self._defer_cleanup(wait, options.name, attempt)
            raise
        finally:
            if self._waits.get(attempt) is wait:
                del self._waits[attempt]
            if not wait.work.done():
                wait.work.cancel()
            if not wait.cleanup_deferred:
                flows.private.discard(attempt)
            requeued = resumed and attempt in flows.requeued
            flows.requeued.discard(attempt)
        if grant is not None:
            return grant
        if seconds == 0:
            return "held"
        return "requeued" if requeued else "queued"

    async def _outcome(
        self, wait: _Wait, attempt: str, options: LockOptions, gone: Callable[[], Awaitable[None]], queues: bool
    ) -> Grant | None:
        """Return the grant of a wait, None if the attempt has a ticket instead or was refused."""
        left = asyncio.ensure_future(gone())
        # A try has no ticket to reply with. If it were cancelled, its reply could deny a lock that was granted.
        stopped: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if queues:
            stopped = asyncio.ensure_future(self._stopping.wait())
        try:
            events: set[asyncio.Future[Any]] = {wait.work, left, stopped}
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
            if wait.superseded:
                await _ended(wait.work)
                raise _superseded()
            if wait.work.done():
                return wait.work.result()
            if stopped.done():
                # The client gets the ticket in the reply, so the ticket must stay.
                self._database.flows.private.discard(attempt)
            grant = await _ended(wait.work)
            if stopped.done() and not left.done():
                return grant
            await self._give_back(wait, options.name, attempt)
            raise Disconnected
        except asyncio.CancelledError:
            await _ended(wait.work)
            await self._give_back(wait, options.name, attempt)
            raise
        finally:
            left.cancel()
            stopped.cancel()

    async def _give_back(self, wait: _Wait, name: str, attempt: str) -> None:
        """Give up the ticket or grant of a private attempt whose client has disconnected."""
        if not wait.private:
            return
        try:
            await self._database.run_last(self._database.flows.abandon(name, attempt))
        except DblockError:
            self._defer_cleanup(wait, name, attempt)

    def _defer_cleanup(self, wait: _Wait, name: str, attempt: str) -> None:
        """Give up the ticket or grant of a private attempt later, because the database does not reply."""
        if wait.private:
            # Also if its ticket was parked: no client was told of it.
            self._database.flows.private.add(attempt)
            wait.cleanup_deferred = True
            self._database.runtime.defer_cleanup(name, attempt)

    async def _supersede(self, attempt: str) -> None:
        """End the older requests with the same attempt. While one of them ends, another may arrive."""
        while (older := self._waits.pop(attempt, None)) is not None:
            older.superseded = True
            await _ended(older.work)

    async def ended(self) -> None:
        """Wait until no request waits any more, because the server stops."""
        until = asyncio.get_running_loop().time() + ENDED_WITHIN
        while self._waits and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def _ended(work: asyncio.Task[Grant | None]) -> Grant | None:
    """Cancel a wait and return its grant if it has one already."""
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError, DblockError):
        return await asyncio.shield(work)
    return None


def _superseded() -> Problem:
    return Problem(
        409,
        "superseded",
        "A newer request took over",
        "Another request with the same Idempotency-Key or ticket arrived while this one waited.",
        "Use the reply to the newer request.",
    )
