"""A clock that a test moves.

Everything that waits in memory waits on this clock: leases expire, callbacks are called, waiters are woken and
renewals are sent when the clock reaches their moment. Real time has no influence, so freezegun and time-machine have
none either.

A blocking wait of a `MemoryClient` moves the clock itself, from one event to the next, until the wait is over. With
`Clock(auto=False)` it blocks its thread instead, until another thread releases the lock or moves the clock. A task of
an `AsyncMemoryClient` never moves the clock: call `async_tick` or `until`.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, TypeVar

from dblock._core.options import Seconds, brief, check_seconds
from dblock.errors import InvalidArgument

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

START = datetime(2026, 1, 1, tzinfo=timezone.utc)
MOST_EVENTS = 2_000
"""How many events a wait without a timeout lets pass before it is an error."""

MOST_PARTS = 10_000
"""How many timed waits in a row one call may make before it is an error. Each ends, but together they may not."""

ROUNDS = 10
"""The event loop is at rest after so many turns in which no task calls a client."""

MOST_ROUNDS = 1_000
"""How many turns to wait for that rest at most, if tasks call clients again and again."""


class WaitsForever(RuntimeError):
    """A wait on the test's clock has no timeout, and nothing that happens on that clock ends it."""


class Timer:
    """A function to be called at a moment of the clock."""

    __slots__ = ("args", "at", "function", "order")

    def __init__(self, at: float, order: int, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.at = at
        self.order = order
        self.function: Callable[..., object] | None = function
        self.args = args

    def cancel(self) -> None:
        """Do not call the function."""
        self.function = None

    def __lt__(self, other: Timer) -> bool:
        return (self.at, self.order) < (other.at, other.order)


class Clock:
    """The time of a test. Clients that share a clock see the same moment."""

    def __init__(self, start: datetime = START, *, auto: bool = True) -> None:
        """Begin at a moment, by default the first second of 2026 in UTC. `auto` says whether waits move the clock."""
        if not isinstance(start, datetime) or start.tzinfo is None:
            raise InvalidArgument(f"A clock starts at a datetime with a time zone; got {brief(start)}.")
        self.auto = auto
        self.activity = 0
        """How many calls all clients have made, so that `async_tick` sees whether tasks still call them."""
        self.lock = threading.RLock()
        """Guards everything that is counted on this clock."""
        self.changed = threading.Condition(self.lock)
        """Notified of each change, if waits do not move the clock."""
        self._start = start.timestamp()
        self._now = 0.0
        self._timers: list[Timer] = []
        self._soon: deque[Callable[[], object]] = deque()
        self._before_next: list[Callable[[], object]] = []
        self._order = 0

    def __call__(self) -> float:
        """Return the seconds since the clock's start. Compare them with `lease.trusted_until`."""
        return self._now

    def calendar(self, moment: float) -> float:
        """Return a moment of this clock in seconds since 1970."""
        return self._start + moment

    def epoch(self) -> float:
        """Return the present moment in seconds since 1970, as the database in memory sees it."""
        return self._start + self._now

    def now(self) -> datetime:
        """Return the present moment of the database in memory, in UTC."""
        return datetime.fromtimestamp(self._start, timezone.utc) + timedelta(seconds=self._now)

    def tick(self, seconds: Seconds = 0.0) -> None:
        """Move the clock forward. Everything that is due on the way happens at its moment, in order.

        Tasks that are woken run when the caller next awaits something. See `async_tick`.
        """
        with self.changed:
            until = self._now + _forward(seconds)
            while self._next() <= until:
                self._step()
            self._now = max(self._now, until)
            self.changed.notify_all()

    async def async_tick(self, seconds: Seconds = 0.0) -> None:
        """Move the clock forward, and let the tasks that are woken on the way run at their moment."""
        until = self._now + _forward(seconds)
        await self._rest()
        while self._next() <= until:
            self._step()
            await self._rest()
        self._now = max(self._now, until)

    async def until(self, awaitable: Awaitable[T]) -> T:
        """Move the clock from one event to the next until the awaitable is done, and return its result."""
        import asyncio

        waiting = asyncio.ensure_future(awaitable)
        try:
            for _ in range(MOST_PARTS):
                await self._rest()
                if waiting.done():
                    return await waiting
                if self._next() == math.inf:
                    break
                self._step()
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait([waiting])
        raise waits_forever()

    async def moving(self, awaitable: Awaitable[T]) -> T:
        """Await this in the calling task, and move the clock from one event to the next until it is done."""
        import asyncio

        done = asyncio.get_running_loop().create_future()
        mover = asyncio.ensure_future(self.until(done))
        try:
            return await awaitable
        finally:
            if not done.done():
                done.set_result(None)
            await asyncio.wait([mover])
            mover.exception()

    # For the clients in memory.

    def call_later(self, seconds: float, function: Callable[..., object], *args: Any) -> Timer:
        """Call a function so many seconds from now, when the clock gets there."""
        self._order += 1
        timer = Timer(self._now + seconds, self._order, function, args)
        heapq.heappush(self._timers, timer)
        return timer

    @property
    def is_due(self) -> bool:
        """Whether a function is due at this moment."""
        return bool(self._soon or (self._timers and self._timers[0].at <= self._now))

    @property
    def is_busy(self) -> bool:
        """Whether something is due at this moment, or threads wait for the end of a call."""
        timers = self._timers
        return bool(self._soon or not self.auto or (timers and timers[0].at <= self._now))

    def call_before_next(self, function: Callable[[], object]) -> None:
        """Call a function before the next event is looked for. It may add an event."""
        self._before_next.append(function)

    def run_due(self) -> None:
        """Call the functions that are due at this moment."""
        while self._next() <= self._now:
            self._step()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call a function when the clock is next used. Safe to call from a finalizer, in the middle of anything."""
        self._soon.append(function)

    def pass_unnoticed(self, seconds: float) -> None:
        """Move the clock by the duration of a call. Events that become due happen after the call."""
        self._now += seconds

    def wait(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Wait until `is_over` returns True, or for so many seconds."""
        with self.changed:
            until = self._now + seconds
            if not self.auto:
                self.changed.wait_for(lambda: is_over() or self._now >= until)
                return
            events = 0
            while not is_over() and self._now < until:
                if self._next() <= until and self._timers:
                    self._step()
                elif until < math.inf:
                    self._now = until
                else:
                    raise waits_forever()
                events += 1
                if events > MOST_EVENTS and until == math.inf:
                    raise waits_forever()

    def _next(self) -> float:
        """Return the moment of the next event."""
        timers = self._timers
        while self._before_next:
            self._before_next.pop()()
        while self._soon:
            self._soon.popleft()()
        while timers and timers[0].function is None:
            heapq.heappop(timers)
        return timers[0].at if timers else math.inf

    def _step(self) -> None:
        """Move to the next event, and let it happen."""
        timer = heapq.heappop(self._timers)
        if timer.function is not None:
            self._now = max(self._now, timer.at)
            timer.function(*timer.args)

    async def _rest(self) -> None:
        """Let other tasks run until none of them calls a client any more."""
        import asyncio

        for _ in range(MOST_ROUNDS // ROUNDS):
            before = self.activity
            self.run_due()
            for _ in range(ROUNDS):
                await asyncio.sleep(0)
            if self.activity == before:
                return

    def __repr__(self) -> str:
        return f"<Clock {self.now().isoformat(timespec='milliseconds')}>"


class ClockEvent(threading.Event):
    """An event whose wait passes on a test's clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._waits = 0

    def set(self) -> None:
        """Set the event, and let the threads look that wait on the clock."""
        super().set()
        if not self._clock.auto:
            with self._clock.changed:
                self._clock.changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, or for so many seconds of the clock."""
        self._waits += 1
        if self._waits > MOST_PARTS:
            raise waits_forever()
        self._clock.wait(self.is_set, math.inf if timeout is None else timeout)
        return self.is_set()


async def wait_and_clear(clock: Clock, event: asyncio.Event, seconds: float) -> None:
    """Return once the event is set or the clock has moved by so many seconds. Clear the event in either case."""
    timer = clock.call_later(seconds, event.set) if seconds < math.inf else None
    try:
        await event.wait()
    finally:
        if timer is not None:
            timer.cancel()
    event.clear()


def _forward(seconds: Seconds) -> float:
    found = check_seconds("tick", seconds)
    if not 0 <= found < math.inf:
        raise InvalidArgument(f"A clock moves forward, by 0 s or more; got {found:g} s.")
    return found


def waits_forever() -> WaitsForever:
    """Return the error for a wait that nothing ends."""
    return WaitsForever(
        "This wait has no timeout, and nothing on the test's clock ends it: the holder renews its lease for ever, or "
        "there is no event left. Give the wait a timeout, release the lock, or let the lease expire."
    )
