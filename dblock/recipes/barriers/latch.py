"""A latch: waiters wait until it was counted down often enough. Once open, it stays open."""

from __future__ import annotations

from typing import Any

from dblock._core.options import Seconds
from dblock._core.replies import new_attempt
from dblock._runtime.runtime import TaskRuntime, ThreadRuntime
from dblock.errors import WaitTimeout
from dblock.recipes.barriers.flows import LatchFlows, check_size, check_wait, must_leave


class _LatchBase:
    """What both kinds of latch share."""

    def __init__(self, runtime: ThreadRuntime | TaskRuntime, name: str, count: int) -> None:
        self._runtime: Any = runtime
        self._name = name
        self._count = check_size("latch", name, count)
        self._flows = LatchFlows(runtime.flows, runtime.schema, name, count)

    @property
    def name(self) -> str:
        """The latch's name."""
        return self._name

    @property
    def count(self) -> int:
        """How much must be counted down for the latch to open."""
        return self._count

    def _check(self, result: int | None, timeout: float | None) -> None:
        if result is None:
            raise WaitTimeout("latch", self.name, timeout or 0.0)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}, count {self.count}>"


class Latch(_LatchBase):
    """A latch for threads, from `Client.latch`."""

    _runtime: ThreadRuntime

    def count_down(self, by: int = 1) -> int:
        """Count the latch down, and return what remains: 0 if the latch is open.

        Each call counts once, even if a reply is lost. If the database is away for 30 seconds, raise the error of the
        last try: the call may have counted.
        """
        return self._runtime.run(self._flows.count_down(new_attempt(), by))

    def remaining(self) -> int:
        """Return what remains to be counted down: 0 if the latch is open."""
        return self._runtime.run(self._flows.remaining())

    def wait(self, timeout: Seconds | None = None) -> None:
        """Wait until the latch is open. Raise WaitTimeout if the timeout passes first; None waits without end."""
        seconds = check_wait("latch", self.name, timeout)
        attempt = new_attempt()
        try:
            result = self._runtime.run(self._flows.wait(attempt, seconds))
        except BaseException as error:
            if must_leave(error):
                self._leave(attempt)
            raise
        self._check(result, seconds)

    def _leave(self, attempt: str) -> None:
        with self._runtime.deferring(self._flows.key, attempt):
            self._runtime.run_even_if_closed(self._flows.abandon(attempt))


class AsyncLatch(_LatchBase):
    """A latch for asyncio, from `AsyncClient.latch`."""

    _runtime: TaskRuntime

    async def count_down(self, by: int = 1) -> int:
        """Count the latch down, and return what remains: 0 if the latch is open.

        Each call counts once, even if a reply is lost. If the database is away for 30 seconds, raise the error of the
        last try: the call may have counted.
        """
        return await self._runtime.run(self._flows.count_down(new_attempt(), by))

    async def remaining(self) -> int:
        """Return what remains to be counted down: 0 if the latch is open."""
        return await self._runtime.run(self._flows.remaining())

    async def wait(self, timeout: Seconds | None = None) -> None:
        """Wait until the latch is open. Raise WaitTimeout if the timeout passes first; None waits without end."""
        seconds = check_wait("latch", self.name, timeout)
        attempt = new_attempt()
        try:
            result = await self._runtime.run(self._flows.wait(attempt, seconds))
        except BaseException as error:
            if must_leave(error):
                await self._leave(attempt)
            raise
        self._check(result, seconds)

    async def _leave(self, attempt: str) -> None:
        with self._runtime.deferring(self._flows.key, attempt):
            await self._runtime.run_even_if_closed(self._flows.abandon(attempt))
