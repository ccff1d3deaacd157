"""A scheduled function: each call runs the slot that is due, if no other host has it.

Guarantee: the function is called only under a grant of its slot, and its outcome is recorded with the release of that
grant. The database decides which slot is due. This process only assumes that the lease is held inside its trust window.

A failure of the function is an outcome. It is recorded and raised, and the slot is not run again.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from dblock._core.lease_state import LeaseState
from dblock._core.replies import new_attempt
from dblock._core.slots import SKIPPED, Claim, Definition, Skipped, SlotFlows, SlotOutcome, check_definition
from dblock._runtime.owners import caller
from dblock._runtime.runtime import TaskRuntime, ThreadRuntime
from dblock.errors import ClientClosed, DblockError, InvalidArgument, LeaseLost
from dblock.lease import AsyncLease, Lease
from dblock.lock import _may_be_granted
from dblock.recipes.schedules.cron import planner
from dblock.recipes.schedules.run import Run, running

if TYPE_CHECKING:
    import asyncio
    import threading

logger = logging.getLogger("dblock")

P = ParamSpec("P")
R = TypeVar("R")

STAND_BY = 0.3
"""Seconds between two looks at the run of another host, so that its slot is taken over when its runner dies."""

LONGEST_WAIT = 1.0
"""Seconds between two calls at most, so that a request of an operator or a change is noticed."""

WAITING = ("running", "queued")
"""The decisions after which the next claim may find something else before the next slot."""

ERROR_TEXT = 2000
"""Characters of a function's error that are recorded."""


class Slots:
    """The slots of one schedule, for threads."""

    def __init__(self, runtime: ThreadRuntime, definition: Definition) -> None:
        self._runtime = runtime
        self._flows = SlotFlows(runtime.flows, definition)
        self.definition = definition

    def claim(self, *, queue: bool = True) -> tuple[Claim, Run | None]:
        """Ask which slot to run, and return the reply with the run to perform, if there is one."""
        attempt = new_attempt()
        try:
            flow = self._flows.claim(attempt) if queue else self._flows.claim_now(attempt)
            claim = self._runtime.run(flow)
            return claim, _run(self._runtime, self.definition, claim, Lease)
        except BaseException as error:
            if _may_be_granted(error):
                with self._runtime.deferring(f"once:{self.definition.name}", attempt):
                    self._runtime.run_even_if_closed(self._flows.abandon(attempt))
            raise

    def end(self, run: Run, outcome: str, exit_code: int | None = None, error: str | None = None) -> str | None:
        """Report how the run ended, and release its lock. Return None if the lease was lost before."""
        state = run.lease._state
        try:
            return self._runtime.run(self._flows.end(state, outcome, exit_code, error))
        finally:
            if state.settled:
                self._runtime.keepalive.discard(state)
            elif state.over:
                self._runtime.keepalive.abandon(state)

    def outcome(self, slot: datetime) -> SlotOutcome | None:
        """Return what the ledger knows about a slot; None if it is not decided."""
        return self._runtime.run(self._flows.outcome(slot))


class AsyncSlots:
    """The slots of one schedule, for asyncio."""

    def __init__(self, runtime: TaskRuntime, definition: Definition) -> None:
        self._runtime = runtime
        self._flows = SlotFlows(runtime.flows, definition)
        self.definition = definition

    async def claim(self, *, queue: bool = True) -> tuple[Claim, Run | None]:
        """Ask which slot to run, and return the reply with the run to perform, if there is one."""
        attempt = new_attempt()
        try:
            flow = self._flows.claim(attempt) if queue else self._flows.claim_now(attempt)
            claim = await self._runtime.run(flow)
            return claim, _run(self._runtime, self.definition, claim, AsyncLease)
        except BaseException as error:
            if _may_be_granted(error):
                with self._runtime.deferring(f"once:{self.definition.name}", attempt):
                    await self._runtime.run_even_if_closed(self._flows.abandon(attempt))
            raise

    async def end(self, run: Run, outcome: str, exit_code: int | None = None, error: str | None = None) -> str | None:
        """Report how the run ended, and release its lock. Return None if the lease was lost before."""
        state = run.lease._state
        try:
            return await self._runtime.run(self._flows.end(state, outcome, exit_code, error))
        finally:
            if state.settled:
                self._runtime.keepalive.discard(state)
            elif state.over:
                self._runtime.keepalive.abandon(state)

    async def outcome(self, slot: datetime) -> SlotOutcome | None:
        """Return what the ledger knows about a slot; None if it is not decided."""
        return await self._runtime.run(self._flows.outcome(slot))


class Schedule(Generic[P, R]):
    """A scheduled function, from `Client.once`. Call it from every host, as often as you like."""

    def __init__(self, slots: Slots, function: Callable[P, R]) -> None:
        self._slots = slots
        self._function = function
        functools.update_wrapper(self, function)

    @property
    def name(self) -> str:
        """The schedule's name."""
        return self._slots.definition.name

    def __get__(self, instance: object, owner: type | None = None) -> Schedule[..., R]:
        """Bind a scheduled method to its object."""
        return self if instance is None else Schedule(self._slots, _bound(self._function, instance, owner))

    def __repr__(self) -> str:
        return _shown(self, self._function)

    def __call__(self, *args: P.args, **options: P.kwargs) -> R | Skipped:
        """Run the slot that is due, and return the function's result; SKIPPED if there is none for this host.

        With `catch_up="all"` one call runs all slots that are due, and returns the last result.
        """
        result: R | Skipped = SKIPPED
        while True:
            _, run = self._slots.claim()
            if run is None:
                return result
            result = self._perform(run, *args, **options)
            if self._slots.definition.catch_up != "all":
                return result

    def run(self, stop: threading.Event | None = None, *args: P.args, **options: P.kwargs) -> None:
        """Call the function at each of its slots, until `stop` is set or the client is closed.

        Errors are logged and do not end the loop.
        """
        stop = self._slots._runtime.new_event() if stop is None else stop
        while not stop.is_set():
            pause = LONGEST_WAIT
            try:
                claim, run = self._slots.claim()
            except ClientClosed:
                return
            except Exception as error:
                _log_failed_claim(self.name, error)
            else:
                if run is not None:
                    try:
                        self._perform(run, *args, **options)
                    except Exception as error:
                        _log_failed_run(self.name, error)
                    continue
                pause = _pause(self._slots.definition, claim, self._slots._runtime.polls)
            self._slots._runtime.wait_for(stop, pause)

    def _perform(self, run: Run, *args: P.args, **options: P.kwargs) -> R:
        with run.lease:  # releases the lock if the end cannot be reported
            try:
                with running(run):
                    result = self._function(*args, **options)
            except BaseException as error:
                if not run.lost.is_set():
                    with _reporting(run):
                        self._slots.end(run, "failed", None, _described(error))
                raise
            if self._slots.end(run, "succeeded") is None:
                raise _lost(run)
            return result


class AsyncSchedule(Generic[P, R]):
    """A scheduled coroutine function, from `AsyncClient.once`. A run whose lease is lost is cancelled."""

    def __init__(self, slots: AsyncSlots, function: Callable[P, Awaitable[R]]) -> None:
        self._slots = slots
        self._function = function
        functools.update_wrapper(self, function)

    @property
    def name(self) -> str:
        """The schedule's name."""
        return self._slots.definition.name

    def __get__(self, instance: object, owner: type | None = None) -> AsyncSchedule[..., R]:
        """Bind a scheduled method to its object."""
        return self if instance is None else AsyncSchedule(self._slots, _bound(self._function, instance, owner))

    def __repr__(self) -> str:
        return _shown(self, self._function)

    async def __call__(self, *args: P.args, **options: P.kwargs) -> R | Skipped:
        """Run the slot that is due, and return the function's result; SKIPPED if there is none for this host.

        With `catch_up="all"` one call runs all slots that are due, and returns the last result.
        """
        result: R | Skipped = SKIPPED
        while True:
            _, run = await self._slots.claim()
            if run is None:
                return result
            result = await self._perform(run, *args, **options)
            if self._slots.definition.catch_up != "all":
                return result

    async def run(self, stop: asyncio.Event | None = None, *args: P.args, **options: P.kwargs) -> None:
        """Call the function at each of its slots, until `stop` is set or the client is closed.

        Errors are logged and do not end the loop.
        """
        import asyncio

        stop = asyncio.Event() if stop is None else stop
        while not stop.is_set():
            pause = LONGEST_WAIT
            try:
                claim, run = await self._slots.claim()
            except ClientClosed:
                return
            except Exception as error:
                _log_failed_claim(self.name, error)
            else:
                if run is not None:
                    try:
                        await self._perform(run, *args, **options)
                    except Exception as error:
                        _log_failed_run(self.name, error)
                    continue
                pause = _pause(self._slots.definition, claim, self._slots._runtime.polls)
            await self._slots._runtime.wait_for(stop, pause)

    async def _perform(self, run: Run, *args: P.args, **options: P.kwargs) -> R:
        async with run.lease:  # cancels the body if the lease is lost, and releases the lock if the report fails
            try:
                with running(run):
                    result = await self._function(*args, **options)
            except BaseException as error:
                if not run.lost.is_set():
                    with _reporting(run):
                        await self._slots.end(run, "failed", None, _described(error))
                raise
            if await self._slots.end(run, "succeeded") is None:
                raise _lost(run)
            return result


class Decorator:
    """Schedules a function. From `Client.once`."""

    def __init__(self, runtime: ThreadRuntime, name: str, **options: Any) -> None:
        self._slots = Slots(runtime, check_definition(name, planner=planner, **options))

    def __call__(self, function: Callable[P, R]) -> Schedule[P, R]:
        if inspect.iscoroutinefunction(function):
            raise InvalidArgument(
                f"The function of schedule {self._slots.definition.name!a:.80} is a coroutine function. "
                "Use AsyncClient.once for it."
            )
        if not callable(function):
            raise InvalidArgument(f"What schedule {self._slots.definition.name!a:.80} decorates is not a function.")
        return Schedule(self._slots, function)


class AsyncDecorator:
    """Schedules a coroutine function. From `AsyncClient.once`."""

    def __init__(self, runtime: TaskRuntime, name: str, **options: Any) -> None:
        self._slots = AsyncSlots(runtime, check_definition(name, planner=planner, **options))

    def __call__(self, function: Callable[P, Awaitable[R]]) -> AsyncSchedule[P, R]:
        if not inspect.iscoroutinefunction(function):
            raise InvalidArgument(
                f"The function of schedule {self._slots.definition.name!a:.80} is not a coroutine function, and would "
                "block the event loop. Use Client.once for it."
            )
        return AsyncSchedule(self._slots, function)


def slots_of(client: Any, name: str, **options: Any) -> Slots:
    """Return the slots of a schedule, for a caller that runs no function, such as `dblock once`."""
    return Slots(client._runtime, check_definition(name, planner=planner, **options))


def _run(runtime: Any, definition: Definition, claim: Claim, kind: Any) -> Run | None:
    if claim.grant is None:
        return None
    grant = claim.grant
    now = runtime.flows.clock
    state = LeaseState(grant, definition.ttl, keep_alive=definition.keep_alive, now=now, owner=caller())
    logger.debug("schedule %r: slot %s granted, token %d", definition.name, claim.slot, grant.token)
    runtime.track(state)
    assert claim.slot is not None
    return Run(definition.name, claim.slot, claim.number, kind(runtime, state))


def _lost(run: Run) -> LeaseLost:
    """Return the error for a run that has ended after its lease, so that its outcome was not recorded."""
    state = run.lease._state
    if state.loss is not None:
        error: LeaseLost = state.error()
        return error
    return LeaseLost(run.lease.name, "expired", state.last_held, run.token)


def _bound(function: Any, instance: object, owner: type | None) -> Any:
    return function.__get__(instance, owner) if hasattr(function, "__get__") else function


def _shown(schedule: Any, function: Any) -> str:
    return f"<{type(schedule).__name__} {schedule.name!r} of {getattr(function, '__qualname__', repr(function))}>"


def _pause(definition: Definition, claim: Claim, polls: bool = True) -> float:
    """Return how many seconds to wait before the next call of a loop."""
    if not polls and claim.decision not in WAITING:
        return claim.wait
    longest = STAND_BY if claim.decision == "running" and definition.stands_by else LONGEST_WAIT
    return min(claim.wait, longest)


def _log_failed_claim(name: str, error: Exception) -> None:
    logger.warning("schedule %r: the database could not be asked, retrying: %s", name, error)


def _log_failed_run(name: str, error: Exception) -> None:
    logger.error("schedule %r: the run failed", name, exc_info=error)


@contextlib.contextmanager
def _reporting(run: Run) -> Iterator[None]:
    """Log that a failure could not be recorded. The function's own error matters more."""
    try:
        yield
    except DblockError as problem:
        logger.warning("schedule %r: the failure of a run could not be recorded: %s", run.name, problem)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:ERROR_TEXT]
