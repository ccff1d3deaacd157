"""A candidate of an election, for asyncio.

An election object is one candidate: it campaigns for one term at a time. `is_leader` asks no other task and no
database, and is false from the end of the trust window on.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from dblock._core.effects import Flow, Sleep, Wait, drive_async
from dblock._core.options import Seconds, check_timeout
from dblock._runtime.owners import caller
from dblock._runtime.runtime import TaskRuntime
from dblock.errors import DblockError, InvalidArgument
from dblock.lease import AsyncLease
from dblock.lock import AsyncLock
from dblock.recipes.elections.base import ElectionBase, one
from dblock.recipes.elections.flows import Abandon, Acquire, Position
from dblock.recipes.elections.persistence import Body, Campaign, Outcome, Pause, Stopped
from dblock.recipes.elections.records import ElectionOptions, Leader, Vacancy
from dblock.recipes.elections.term import AsyncTerm

logger = logging.getLogger("dblock")

T = TypeVar("T")


class AsyncElection(ElectionBase[AsyncTerm]):
    """One candidate of an election, for asyncio. From `AsyncClient.election`."""

    _runtime: TaskRuntime

    def __init__(self, runtime: TaskRuntime, options: ElectionOptions) -> None:
        super().__init__(runtime, options)
        self._lock: AsyncLock[AsyncLease] = AsyncLock(runtime, options.lock, AsyncLease)
        self._pause: asyncio.Event | None = None

    async def campaign(self, timeout: Seconds | None = None) -> AsyncTerm:
        """Wait until this candidate leads, and return its term. Use the term in an `async with`.

        Raise LockTimeout if the timeout passes first; None waits without end.
        """
        try:
            return await self._campaign(timeout, False)
        except Stopped:
            raise self._stopped() from None

    @contextlib.asynccontextmanager
    async def lead(self, timeout: Seconds | None = None) -> AsyncIterator[AsyncTerm]:
        """Campaign, lead for the body of the `async with`, and end the term when the body has returned."""
        async with await self.campaign(timeout) as term:
            yield term

    async def run(self, function: Callable[[AsyncTerm], Awaitable[T]]) -> T | None:
        """Campaign and call `function` with each term, again after every loss and error.

        Return what the function returns by itself, or None after `stop` and `close`. The function runs in a task, which
        is cancelled when the term must end.
        """
        if not inspect.iscoroutinefunction(function):
            raise InvalidArgument(
                f"The body of election {self.name!a:.80} is not a coroutine function, and would block the event loop. "
                "Use Client.election for it."
            )

        async def perform(effect: Any) -> Any:
            if isinstance(effect, Campaign):
                return await self._campaign(None, effect.stepped_back)
            if isinstance(effect, Body):
                return await self._run_body(function, effect.term)
            assert isinstance(effect, Pause)
            return await self._wait_for_stop(effect.seconds)

        found: T | None = await drive_async(self._persist(), perform)
        return found

    def stop(self) -> None:
        """End `run`: leave the queue, or cancel the body of the present term. Call it in the event loop."""
        super().stop()
        if self._pause is not None:
            self._pause.set()

    async def resign(self, timeout: Seconds | None = None) -> bool:
        """Ask the body to return, and wait until it has. Return whether its term was released.

        False means that there is no term, that the body has not returned before the timeout or the deadline of its
        lease, or that the body itself calls this: its term is then released when it returns.
        """
        term = self._term
        if term is None:
            return False
        term._ask_to_end("resign")
        return await term._wait_for_body(check_timeout(self._lock.name, timeout))

    async def transfer(self, to: str) -> None:
        """Ask the leader to hand over to the candidate with this holder name.

        Any candidate may ask. The call returns when the request is recorded: the leader's body must return first.
        Raise TransferRefused if the named candidate cannot lead next.
        """
        token = await self._run(self._flows.transfer(to))
        term = self._term
        if term is not None and term.token == token:
            term._ask_to_end("transfer")

    async def leader(self) -> Leader | None:
        """Return the present leader, None if there is none."""
        return await self._run(self._flows.leader())

    async def observe(
        self, since: int | Leader | Vacancy | None = None, *, timeout: Seconds | None = None
    ) -> AsyncIterator[Leader | Vacancy]:
        """Yield every beginning of a term as a Leader and every end as a Vacancy, in order, without end.

        With a token, start after the beginning of that term; 0 starts with the first one. With a Leader or Vacancy,
        start after that event. With None, start with the present state. With a timeout, end if no event comes within
        this time.
        """
        position, seconds = Position(since), check_timeout(self._lock.name, timeout)
        while found := await self._run(self._flows.next_events(position, seconds)):
            for event in found:
                position.passed(event)
                yield event

    async def _run(self, flow: Flow[T]) -> T:
        return await drive_async(flow, self._perform)

    async def _perform(self, effect: Any) -> Any:
        if isinstance(effect, Acquire):
            return await self._acquire(effect)
        if isinstance(effect, Abandon):
            return self._abandon(effect.lease)
        return await self._runtime.run(one(effect))

    async def _perform_waiting(self, effect: Any) -> Any:
        """Perform an effect of a candidate that waits for the lock, which `stop` may interrupt."""
        if not isinstance(effect, Wait):
            return await self._perform(effect)
        self._waiter = effect.waiter
        try:
            self._check_stopped()
            await self._perform(effect)
            return self._check_stopped()
        finally:
            self._waiter = None

    async def _acquire(self, effect: Acquire) -> AsyncLease:
        owner = caller()
        try:
            grant = await drive_async(
                self._lock._acquiring(effect.timeout, effect.attempt, owner), self._perform_waiting
            )
            if grant is not None:
                return self._lock._lease(grant, owner)
        except BaseException as error:
            await self._lock._abandon(effect.attempt, error)
            raise
        raise self._lock._timed_out(effect.limit)

    async def _campaign(self, timeout: Seconds | None, stepped_back: bool) -> AsyncTerm:
        self._enter_campaign()
        try:
            self._check_stopped()
            term = AsyncTerm(self, await self._run(self._flows.campaign(timeout, stepped_back)))
            self._term = term
            self._runtime.before_close.append(self._close)
        except BaseException:
            self._campaigning.release()
            raise
        logger.info("election %r: this candidate leads, token %d", self.name, term.token)
        if self._stopping:
            term._ask_to_end("stop")
        return term

    async def _begin(self, term: AsyncTerm) -> None:
        if self._runtime.background is not None:
            self._runtime.background(self._watching(term))
        else:
            term._watcher = asyncio.ensure_future(self._watch(term))
        term._started = True
        if self._options.on_started is not None:
            await _called(self._options.on_started, term)

    async def _finish(self, term: AsyncTerm) -> None:
        term._end_waits()
        if term._watcher is not None:
            term._watcher.cancel()
        self._forget(term)
        logger.info("election %r: the term of token %d is over", self.name, term.token)
        if term._started and self._options.on_stopped is not None:
            try:
                await _called(self._options.on_stopped, term)
            except Exception:
                logger.exception("election %r: on_stopped failed", self.name)

    async def _watch(self, term: AsyncTerm) -> None:
        async def perform(effect: Any) -> Any:
            if isinstance(effect, Sleep):
                return await asyncio.sleep(effect.seconds)
            return await self._perform(effect)

        await drive_async(self._watching(term), perform)

    async def _run_body(self, function: Callable[[AsyncTerm], Awaitable[Any]], term: AsyncTerm) -> Outcome:
        outcome: Outcome | None = None

        async def body() -> None:
            nonlocal outcome
            async with term:
                value = await function(term)
                outcome = Outcome(by_itself=term.ending_reason is None and term.remaining() > 0, value=value)

        task = term._cancelled = asyncio.ensure_future(body())
        if term.ending.is_set():
            task.cancel()
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])  # the term is released when the body has returned
            raise
        finally:
            if task.done() and not term._over.is_set():
                # Cancelled before the body began.
                with contextlib.suppress(DblockError):
                    await term.end()
        if task.cancelled():
            asked = term.ending_reason is not None or term._state.loss is not None
            return outcome or (Outcome() if asked else self._outcome(term, asyncio.CancelledError()))
        error = task.exception()
        if error is None or isinstance(error, Exception):
            return outcome or (Outcome() if error is None else self._outcome(term, error))
        raise error

    async def _wait_for_stop(self, seconds: float) -> None:
        self._pause = asyncio.Event()
        if not self._stopping:
            try:
                await self._runtime.callbacks.wait_and_clear(self._pause, seconds)
            finally:
                self._pause = None

    async def _close(self) -> None:
        """Let the body return before the client is closed."""
        term = self._term
        if term is not None and term._state.ours:
            self._stopping = True
            term._ask_to_end("close")
            if not await term._wait_for_body(None) and term._has_no_body():
                with contextlib.suppress(DblockError):
                    await term.end()


async def _called(callback: Callable[[Any], object], term: AsyncTerm) -> None:
    result = callback(term)
    if inspect.isawaitable(result):
        await result
