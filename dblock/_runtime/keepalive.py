"""The keep-alive: goes round (see dblock._core.renewal) for all leases of a client.

It has a thread (or task) and a connection of its own, so that neither a busy pool nor a blocked caller can starve it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import threading
from collections import deque

from dblock._core import clock
from dblock._core.acquire import LockFlows
from dblock._core.effects import Flow
from dblock._core.lease_state import LeaseState
from dblock._core.presence import Presence
from dblock._core.renewal import LONGEST_PAUSE, SHORTEST_PAUSE, RenewalSchedule, due_at
from dblock._runtime.asyncio_compat import wait_and_clear
from dblock._runtime.forks import call_after_fork
from dblock._runtime.runner import AsyncRunner, Runner
from dblock.errors import ClientClosed, DblockError

logger = logging.getLogger("dblock")


class _KeepAliveBase:
    """What both kinds of keep-alive know: what is held, what was abandoned, and when there is something to do."""

    def __init__(self, service: LockFlows) -> None:
        self._schedule = RenewalSchedule(service)
        self.reset_after_fork()
        call_after_fork(self)

    def reset_after_fork(self) -> None:
        """In the child of a fork nothing goes round, and there is no lease of ours."""
        self._schedule.forget()
        self._abandoned: list[LeaseState] = []
        self._in_use = False
        self._asleep_until = math.inf
        self._closed = False

    def tied_to(self, presence: Presence) -> list[LeaseState]:
        """Return what is tied to this presence, and not known to be lost."""
        return self._schedule.tied_to(presence)

    def discard(self, state: LeaseState) -> None:
        """Renew it no more."""
        self._schedule.discard(state)

    def letting_go(self) -> Flow[None]:
        """Release all that is still held, and what was abandoned."""
        return self._schedule.let_go(self._abandoned)

    def _seconds_to_sleep(self) -> float | None:
        """Return how long there is nothing to do; None for ever.

        A client that takes and frees locks in quick succession would wake us each time, only for us to find nothing to
        do. So while it is in use we look in once a second, and it wakes us for what is due sooner.
        """
        self._asleep_until = math.inf  # whoever adds a lease while we look for the next one due wakes us
        in_use, self._in_use = self._in_use, False
        due = min(self._schedule.due_at(), clock.now() + LONGEST_PAUSE if self._abandoned or in_use else math.inf)
        self._asleep_until = due
        return None if due == math.inf else min(max(due - clock.now(), 0.0), threading.TIMEOUT_MAX)


class KeepAlive(_KeepAliveBase):
    """Goes round in a thread of its own, from the first lease on."""

    def __init__(self, runner: Runner, service: LockFlows) -> None:
        self._runner = runner
        super().__init__(service)

    def reset_after_fork(self) -> None:
        super().reset_after_fork()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        # May be put to from a finalizer, which may run in the middle of anything.
        self._wake: queue.SimpleQueue[LeaseState | None] = queue.SimpleQueue()

    def add(self, state: LeaseState) -> None:
        """Keep this lease alive from now on."""
        self._schedule.add(state)
        self._in_use = True
        if self._thread is None:
            self._start()
        elif due_at(state) < self._asleep_until:
            self._wake.put(None)

    def abandon(self, state: LeaseState) -> None:
        """Release what nobody has in hand any more. Can be called from a finalizer."""
        self._wake.put(state)

    def tie(self) -> None:
        """Tie the leases to our new presence at once."""
        self._schedule.tie()
        self._wake.put(None)

    def letting_go(self) -> Flow[None]:
        self._collect(block=False)
        self._wake.put(None)  # what was meant for the thread may have been among it
        return super().letting_go()

    def close(self) -> None:
        """Stop going round."""
        self._closed = True
        self._wake.put(None)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._go, name="dblock keep-alive", daemon=True)
                self._thread.start()

    def _go(self) -> None:
        with contextlib.suppress(DblockError):
            # Now, so that the first round does not begin with the opening of a connection.
            self._runner.warm()
            self._schedule.reached()
        while True:
            try:
                self._collect(block=True)
                if self._closed:
                    return
                self._abandoned = self._runner.run(self._schedule.tick(self._abandoned))
            except ClientClosed:
                return
            except Exception:
                logger.exception("the keep-alive met what it did not expect, and goes on")
                threading.Event().wait(SHORTEST_PAUSE)

    def _collect(self, *, block: bool) -> None:
        """Collect what was abandoned; wait until there is something to do, if so wanted."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._wake.get(block, self._seconds_to_sleep() if block else None)
                block = False
                if item is not None:
                    self._schedule.discard(item)
                    self._abandoned.append(item)


class AsyncKeepAlive(_KeepAliveBase):
    """Goes round in a task of its own, from the first lease on."""

    def __init__(self, runner: AsyncRunner, service: LockFlows) -> None:
        self._runner = runner
        super().__init__(service)

    def reset_after_fork(self) -> None:
        super().reset_after_fork()
        self._task: asyncio.Task[None] | None = None
        self._wake: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dropped: deque[LeaseState] = deque()

    def add(self, state: LeaseState) -> None:
        """Keep this lease alive from now on."""
        self._schedule.add(state)
        self._in_use = True
        if self._task is None or self._task.done():
            self._loop = asyncio.get_running_loop()
            self._wake = asyncio.Event()
            self._task = self._loop.create_task(self._go(self._wake), name="dblock keep-alive")
        elif self._wake is not None and due_at(state) < self._asleep_until:
            self._wake.set()

    def abandon(self, state: LeaseState) -> None:
        """Release what nobody has in hand any more. Can be called from a finalizer, in any thread."""
        self._dropped.append(state)
        if self._loop is not None and self._wake is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._wake.set)

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """What runs for it in the event loop."""
        return {self._task} if self._task is not None else set()

    def close(self) -> None:
        """Stop going round."""
        self._closed = True
        if self._task is not None and self._loop is not None and not self._loop.is_closed():
            self._task.cancel()

    def tie(self) -> None:
        """Tie the leases to our new presence at once."""
        self._schedule.tie()
        if self._wake is not None:
            self._wake.set()

    def letting_go(self) -> Flow[None]:
        self._collect()
        return super().letting_go()

    def _collect(self) -> None:
        while self._dropped:
            state = self._dropped.popleft()
            self._schedule.discard(state)
            self._abandoned.append(state)
        self._abandoned = self._schedule.releasable(self._abandoned)

    async def _go(self, wake: asyncio.Event) -> None:
        with contextlib.suppress(DblockError):
            # Now, so that the first round does not begin with the opening of a connection.
            await self._runner.warm()
            self._schedule.reached()
        while not self._closed:
            try:
                await wait_and_clear(wake, self._seconds_to_sleep())
                self._collect()
                self._abandoned = await self._runner.run(self._schedule.tick(self._abandoned))
            except ClientClosed:
                return
            except Exception:
                logger.exception("the keep-alive met what it did not expect, and goes on")
                await asyncio.sleep(SHORTEST_PAUSE)
