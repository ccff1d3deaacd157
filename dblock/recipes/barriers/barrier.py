"""A barrier: parties wait at it until all of them are there, and continue together."""

from __future__ import annotations

from typing import Any

from dblock._core.options import Seconds
from dblock._core.replies import new_attempt
from dblock._runtime.runtime import TaskRuntime, ThreadRuntime
from dblock.errors import WaitTimeout
from dblock.recipes.barriers.flows import BarrierFlows, check_size, check_wait, must_leave


class _BarrierBase:
    """What both kinds of barrier share."""

    def __init__(self, runtime: ThreadRuntime | TaskRuntime, name: str, parties: int) -> None:
        self._runtime: Any = runtime
        self._name = name
        self._parties = check_size("barrier", name, parties)
        self._flows = BarrierFlows(runtime.flows, runtime.schema, name, parties)

    @property
    def name(self) -> str:
        """The barrier's name."""
        return self._name

    @property
    def parties(self) -> int:
        """How many parties must wait for the barrier to trip."""
        return self._parties

    def _result(self, number: int | None, timeout: float | None) -> int:
        if number is None:
            raise WaitTimeout("barrier", self.name, timeout or 0.0)
        return number

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}, {self.parties} parties>"


class Barrier(_BarrierBase):
    """A barrier for threads, from `Client.barrier`. Threads may share it: each `wait` is a party of its own."""

    _runtime: ThreadRuntime

    def wait(self, timeout: Seconds | None = None) -> int:
        """Wait until all parties wait at the barrier, and return this party's number, from 0 to parties - 1.

        The barrier can be used again at once, for the next generation. Raise WaitTimeout if the timeout passes first;
        None waits without end. The party has left the barrier then, and does not count.
        """
        seconds = check_wait("barrier", self.name, timeout)
        attempt = new_attempt()
        try:
            number = self._runtime.run(self._flows.wait(attempt, seconds))
        except BaseException as error:
            if must_leave(error):
                self._leave(attempt)
            raise
        return self._result(number, seconds)

    def _leave(self, attempt: str) -> None:
        """Leave the barrier, because the caller of this attempt gets an error instead of a number."""
        with self._runtime.deferring(self._flows.key, attempt):
            self._runtime.run_even_if_closed(self._flows.leave(attempt))


class AsyncBarrier(_BarrierBase):
    """A barrier for asyncio, from `AsyncClient.barrier`. Tasks may share it: each `wait` is a party of its own."""

    _runtime: TaskRuntime

    async def wait(self, timeout: Seconds | None = None) -> int:
        """Wait until all parties wait at the barrier, and return this party's number, from 0 to parties - 1.

        The barrier can be used again at once, for the next generation. Raise WaitTimeout if the timeout passes first;
        None waits without end. The party has left the barrier then, and does not count.
        """
        seconds = check_wait("barrier", self.name, timeout)
        attempt = new_attempt()
        try:
            number = await self._runtime.run(self._flows.wait(attempt, seconds))
        except BaseException as error:
            if must_leave(error):
                await self._leave(attempt)
            raise
        return self._result(number, seconds)

    async def _leave(self, attempt: str) -> None:
        """Leave the barrier, because the caller of this attempt gets an error instead of a number."""
        with self._runtime.deferring(self._flows.key, attempt):
            await self._runtime.run_even_if_closed(self._flows.leave(attempt))
