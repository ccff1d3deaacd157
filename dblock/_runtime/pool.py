"""A few connections, shared by all calls of a client: one pool for threads, one for asyncio.

A call borrows a connection for one round trip. The pool lends the connection that was used last, so that a quiet client
keeps to one. While all connections are in use, calls wait in a queue, and a connection that is returned goes to the
first call in the queue. dblock._runtime.pool_demand decides when the pool opens another connection.

The call that needs a connection opens it. An error in opening it is that call's error, in full and at once, and there
is no thread to leak or to lose in a fork.

The pool does not count its connections. Each one has a slot, which lives as long as an object refers to it. A caller
that an interrupt throws out, in the middle of anything, drops its slot with the rest, so the number of slots stays
right.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from dblock._core.timings import Timings, chosen
from dblock._runtime.connection import RawConnection
from dblock._runtime.forks import call_after_fork
from dblock._runtime.pool_demand import GROW_AFTER, Demand
from dblock._runtime.pool_turns import Handed, Slot, TaskTurn, ThreadTurn
from dblock.errors import ClientClosed, Unavailable


class Returns(Protocol):
    """Takes back a connection that was borrowed."""

    def give(self, raw: RawConnection) -> None:
        """Return the connection."""


Turn = TypeVar("Turn", ThreadTurn, TaskTurn)


class _PoolBase(Generic[Turn]):
    """Idle connections, the slots of all that are open or being opened, and the queue. Not safe for threads."""

    def __init__(self, size: int, patience: float, timings: Timings | None) -> None:
        self._size = size
        self._patience = patience
        self.idle_for = chosen(timings).idle_for
        """Seconds after which an idle connection that a burst of calls had opened is closed."""
        self._idle: list[RawConnection] = []
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._queue: deque[Turn] = deque()
        self._demand = Demand()
        self._closed = False
        self.may_be_empty: Callable[[], bool] = lambda: False
        """Whether the last connection may be closed too when it has been idle for long."""
        call_after_fork(self)

    @property
    def in_use(self) -> bool:
        """Whether a connection is open or being opened; once the pool is closed, whether a call still has one."""
        return bool(self._slots)

    @property
    def has_idle(self) -> bool:
        """Whether a connection is open that no call uses."""
        return bool(self._idle)

    def is_empty(self) -> bool:
        """Return whether no connection is open or being opened."""
        return not self._idle and not self._slots

    def surplus_in(self) -> float:
        """Return the seconds until a connection has been idle for long; never, if all must stay. Any thread may ask."""
        idle = self._idle[:]
        if not idle or (len(idle) == 1 and not self.may_be_empty()):
            return math.inf
        return max(min(raw.used_at for raw in idle) + self.idle_for - time.monotonic(), 0.0)

    def _take_now(self, borrows: bool) -> Handed | None:
        """Take an idle connection, or a slot to open one. None if there is neither, or if other calls wait already."""
        self._check_open()
        if self._idle and not self._queue:
            return self._idle.pop()
        if not self._slots:
            return self._new_slot()
        return None if borrows else self._grow()

    def _grow(self) -> Slot | None:
        """Return a slot for another connection if it is needed and the pool may have it."""
        if len(self._slots) < self._size and self._demand.is_unmet(time.monotonic()):
            return self._new_slot()
        return None

    def _enqueue(self, turn: Turn) -> None:
        self._queue.append(turn)
        self._demand.waits(len(self._queue), time.monotonic())

    def _new_slot(self) -> Slot:
        slot = Slot()
        self._slots.add(slot)
        return slot

    def _give_now(self, raw: RawConnection) -> RawConnection | None:
        """Hand a connection to the first call in the queue, or keep it idle. Return a connection to close, if any."""
        if self._closed or not raw.usable:
            self._pass_slot(raw)
            return raw
        now = raw.used_at = time.monotonic()
        self._demand.returned(now)
        while self._queue:
            if self._queue.popleft().give(raw):
                return None
        self._demand.over()
        self._idle.append(raw)
        if now - self._idle[0].used_at > self.idle_for:
            return self._vacate(self._idle.pop(0))
        return None

    def _surplus(self) -> list[RawConnection]:
        """Take out the connections that have been idle for long, except one if one must stay."""
        candidates = self._idle if self.may_be_empty() else self._idle[:-1]
        idle_since = time.monotonic() - self.idle_for
        surplus = [raw for raw in candidates if raw.used_at <= idle_since]
        self._idle = [raw for raw in self._idle if raw not in surplus]
        return [self._vacate(raw) for raw in surplus]

    def _pass_slot(self, raw: RawConnection | None = None) -> None:
        """Let the first call in the queue open a connection instead of one that is gone or could not be opened."""
        if raw is not None:
            self._vacate(raw)
        while len(self._slots) < self._size:
            turn = next((turn for turn in self._queue if turn.opens), None)
            if turn is None:
                return
            self._queue.remove(turn)
            slot = self._new_slot()
            if turn.give(slot):
                return
            self._slots.discard(slot)

    def _vacate(self, raw: RawConnection) -> RawConnection:
        if raw.slot is not None:
            self._slots.discard(raw.slot)
        return raw

    def reset_after_fork(self) -> None:
        """Forget the parent's connections. psycopg closes no connection that another process opened."""
        self._idle = []
        self._slots.clear()
        self._queue.clear()
        self._demand.reset()

    def _refuse_calls(self) -> None:
        """Refuse further calls, and those in the queue."""
        self._closed = True
        while self._queue:
            self._queue.popleft().give(None)

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed

    def _drain(self) -> list[RawConnection]:
        idle, self._idle = self._idle, []
        for raw in idle:
            self._pass_slot(raw)
        return idle

    def _exhausted(self, patience: float) -> Unavailable:
        return Unavailable(
            f"All {self._size} connections of this client have been busy for {patience:g} s. "
            "Is the database slow to reply? A larger pool_size admits more calls at once."
        )


class Pool(_PoolBase[ThreadTurn]):
    """Connections for threads."""

    def __init__(
        self, connect: Callable[[], RawConnection], size: int, patience: float, timings: Timings | None = None
    ) -> None:
        super().__init__(size, patience, timings)
        self._connect = connect
        # Reentrant, because the garbage collector may close a client in the middle of anything.
        self._lock = threading.RLock()

    def reset_after_fork(self) -> None:
        super().reset_after_fork()
        self._lock = threading.RLock()

    def take(self, lent_within: float | None = None) -> RawConnection:
        """Borrow a connection for one call.

        A call of another pool that could open no connection passes `lent_within`: it waits for so many seconds at most,
        and this pool opens no further connection for it.
        """
        turn: ThreadTurn | None = None
        with self._lock:
            handed = self._take_now(lent_within is not None)
            if handed is None:
                turn = ThreadTurn(opens=lent_within is None)
                self._enqueue(turn)
        if turn is not None:
            handed = self._wait(turn, lent_within)
        if handed is None:
            raise ClientClosed
        if not isinstance(handed, Slot):
            return handed
        try:
            raw = self._connect()
        except BaseException:
            with self._lock:
                self._slots.discard(handed)
                self._pass_slot()
            raise
        raw.slot = handed
        return raw

    def _wait(self, turn: ThreadTurn, lent_within: float | None) -> Handed | None:
        patience = self._patience if lent_within is None else min(lent_within, self._patience)
        until = time.monotonic() + patience
        try:
            while (left := until - time.monotonic()) > 0:
                if turn.came.wait(min(GROW_AFTER, left)):
                    return turn.handed
                with self._lock:
                    slot = self._grow() if turn in self._queue and lent_within is None else None
                    if slot is not None:
                        self._queue.remove(turn)
                        return slot
        except BaseException:
            if not self._leave_queue(turn):
                self._pass_on(turn.handed)  # it had come already, so it goes to the next call
            raise
        if not self._leave_queue(turn):
            return turn.handed  # it came at the last moment
        raise self._exhausted(patience)

    def _pass_on(self, handed: Handed | None) -> None:
        if isinstance(handed, Slot):
            with self._lock:
                self._slots.discard(handed)
                self._pass_slot()
        elif handed is not None:
            self.give(handed)

    def _leave_queue(self, turn: ThreadTurn) -> bool:
        with self._lock:
            if turn in self._queue:
                self._queue.remove(turn)
                return True
        return False

    def give(self, raw: RawConnection) -> None:
        """Return a borrowed connection. If it cannot be used again, close it."""
        with self._lock:
            surplus = self._give_now(raw)
        if surplus is not None:
            surplus.close()

    def take_idle(self) -> RawConnection | None:
        """Borrow a connection that no call uses or waits for; None if there is none."""
        with self._lock:
            return self._idle.pop() if self._idle and not self._queue and not self._closed else None

    def cede_idle(self) -> RawConnection | None:
        """Give up a connection that no call uses or waits for, to another pool; None if there is none."""
        with self._lock:
            raw = self.take_idle()
            return None if raw is None else self._vacate(raw)

    def adopt(self, raw: RawConnection) -> None:
        """Keep a connection that another pool gave up, or close it if this one is closed."""
        with self._lock:
            raw.slot = self._new_slot()
        self.give(raw)

    def shrink(self) -> float:
        """Close the connections that have been idle for long, except one if one must stay.

        Return the seconds until the next one has.
        """
        if not self.surplus_in():
            with self._lock:
                surplus = self._surplus()
            for raw in surplus:
                raw.close()
        return self.surplus_in()

    def drop_idle(self) -> None:
        """Close the idle connections, as when their server has gone."""
        with self._lock:
            idle = self._drain()
        for raw in idle:
            raw.close()

    def close(self) -> None:
        """Close the idle connections now, and those in use when they are returned."""
        with self._lock:
            self._refuse_calls()
        self.drop_idle()


class AsyncPool(_PoolBase[TaskTurn]):
    """Connections for asyncio."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[RawConnection]],
        size: int,
        patience: float,
        timings: Timings | None = None,
    ) -> None:
        super().__init__(size, patience, timings)
        self._connect = connect
        self._shrinking: asyncio.TimerHandle | None = None

    async def take(self, lent_within: float | None = None) -> RawConnection:
        """Borrow a connection for one call; see Pool.take."""
        handed = self._take_now(lent_within is not None) or await self._wait(lent_within)
        if handed is None:
            raise ClientClosed
        if not isinstance(handed, Slot):
            return handed
        try:
            raw = await self._connect()
        except BaseException:
            self._slots.discard(handed)
            self._pass_slot()
            raise
        raw.slot = handed
        return raw

    async def _wait(self, lent_within: float | None) -> Handed | None:
        patience = self._patience if lent_within is None else min(lent_within, self._patience)
        turn = TaskTurn(opens=lent_within is None)
        self._enqueue(turn)
        try:
            until = time.monotonic() + patience
            while not turn.came.done() and (left := until - time.monotonic()) > 0:
                # Not wait_for, which may time out and lose a turn that came at the same moment.
                await asyncio.wait([turn.came], timeout=min(GROW_AFTER, left))
                slot = self._grow() if lent_within is None and not turn.came.done() else None
                if slot is not None:
                    self._queue.remove(turn)
                    return slot
        except BaseException:
            if not turn.came.done():
                self._queue.remove(turn)
            elif isinstance(turn.handed, Slot):
                self._slots.discard(turn.handed)
                self._pass_slot()
            elif turn.handed is not None:
                self.give(turn.handed)  # it had come already, so it goes to the next call
            raise
        if turn.came.done():
            return turn.handed
        self._queue.remove(turn)
        raise self._exhausted(patience)

    def give(self, raw: RawConnection) -> None:
        """Return a borrowed connection. If it cannot be used again, close it."""
        surplus = self._give_now(raw)
        if surplus is not None:
            surplus.close()
        if len(self._idle) > 1 and self._shrinking is None:
            with contextlib.suppress(RuntimeError):  # no event loop runs any more
                self._shrinking = asyncio.get_running_loop().call_later(self.idle_for * 1.1, self.shrink)

    def shrink(self) -> None:
        """Close the connections that have been idle for long, except one if one must stay. Look again for others."""
        if self._shrinking is not None:
            self._shrinking.cancel()
            self._shrinking = None
        for raw in self._surplus():
            raw.close()
        if len(self._idle) > 1:
            self._shrinking = asyncio.get_running_loop().call_later(self.idle_for * 1.1, self.shrink)

    def drop_idle(self) -> None:
        """Close the idle connections, as when their server has gone."""
        for raw in self._drain():
            raw.close()

    def close(self) -> None:
        """Close the idle connections now, and those in use when they are returned."""
        if self._shrinking is not None:
            self._shrinking.cancel()
        self._refuse_calls()
        self.drop_idle()
