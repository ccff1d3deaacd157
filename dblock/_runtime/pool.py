"""A few connections, shared by all calls of a client: one pool for threads, one for asyncio.

A call borrows a connection for one round trip, the one used last first, so that a quiet client keeps to one. While they
are in use, calls wait in line, and a connection that comes back is handed to the first: nobody is overtaken. A round
trip is short and a connection dear, so another is opened only when a call has waited for a while, or there has been a
line for as long.

A connection is opened by the call that needs it, in the call itself: an error in opening it is that call's error, in
full and at once, and there is no thread to leak or to lose in a fork.

How many are open is not counted but known: each has a place, which lives as long as somebody has it in hand. A caller
that an interrupt throws out in the middle of anything drops its place with the rest, and no count goes wrong.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from dblock._runtime.connection import RawConnection
from dblock._runtime.forks import call_after_fork
from dblock.errors import ClientClosed, Unavailable

IDLE_FOR = 60.0
"""Seconds after which a connection that a burst of calls had opened is closed again."""


GROW_AFTER = 0.2
"""Seconds that a call waits for a connection in use before it opens another."""


class Place:
    """The right to one open connection."""


Handed = RawConnection | Place
"""What a call gets from the pool: a connection, or the right to open one."""


class _ThreadTurn:
    """A place in line, for a thread: what was handed to it, once the event is set."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.handed: Handed | None = None

    def give(self, handed: Handed | None) -> bool:
        self.handed = handed
        self.came.set()
        return True


class _TaskTurn:
    """A place in line, for a task."""

    def __init__(self) -> None:
        self.came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.handed: Handed | None = None

    def give(self, handed: Handed | None) -> bool:
        if self.came.done():
            return False  # its task was cancelled
        self.handed = handed
        self.came.set_result(None)
        return True


Turn = TypeVar("Turn", _ThreadTurn, _TaskTurn)


class _PoolBase(Generic[Turn]):
    """Connections at rest, the places of all that are open or being opened, and who waits. Not safe for threads."""

    def __init__(self, size: int, patience: float) -> None:
        self._size = size
        self._patience = patience
        self._idle: list[RawConnection] = []
        self._places: weakref.WeakSet[Place] = weakref.WeakSet()
        self._line: deque[Turn] = deque()
        self._line_since = math.inf
        """Since when there has been a line without a break."""
        self._closed = False
        call_after_fork(self)

    @property
    def in_use(self) -> bool:
        """Whether any connection is open or being opened; once the pool is closed, whether anybody still has one."""
        return bool(self._places)

    def _take_now(self, borrows: bool) -> Handed | None:
        """Take a connection at rest, or a place to open one; None when neither can be had, or others wait already."""
        self._check_open()
        if self._idle and not self._line:
            return self._idle.pop()
        if not self._places or (not borrows and time.monotonic() - self._line_since >= GROW_AFTER):
            return self._grow()
        return None

    def _grow(self) -> Place | None:
        return self._new_place() if len(self._places) < self._size else None

    def _line_up(self, turn: Turn) -> None:
        if not self._line:
            self._line_since = time.monotonic()
        self._line.append(turn)

    def _new_place(self) -> Place:
        place = Place()
        self._places.add(place)
        return place

    def _give_now(self, raw: RawConnection) -> RawConnection | None:
        """Hand a connection to the first in line, or lay it to rest; return one that is to be closed instead."""
        if self._closed or not raw.usable:
            self._pass_place(raw)
            return raw
        while self._line:
            if self._line.popleft().give(raw):
                return None
        self._line_since = math.inf
        now = raw.used_at = time.monotonic()
        self._idle.append(raw)
        if now - self._idle[0].used_at > IDLE_FOR:
            return self._vacate(self._idle.pop(0))
        return None

    def _pass_place(self, raw: RawConnection | None = None) -> None:
        """Let the first in line open a connection in the place of one that is gone, or could not be opened."""
        if raw is not None:
            self._vacate(raw)
        while self._line and len(self._places) < self._size:
            place = self._new_place()
            if self._line.popleft().give(place):
                return
            self._places.discard(place)

    def _vacate(self, raw: RawConnection) -> RawConnection:
        if raw.place is not None:
            self._places.discard(raw.place)
        return raw

    def reset_after_fork(self) -> None:
        """In the child of a fork, forget the parent's connections. psycopg closes none that another process opened."""
        self._idle = []
        self._places.clear()
        self._line.clear()
        self._line_since = math.inf

    def _shut(self) -> None:
        """Take no more calls; those who wait in line are told so."""
        self._closed = True
        while self._line:
            self._line.popleft().give(None)

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed

    def _drain(self) -> list[RawConnection]:
        idle, self._idle = self._idle, []
        for raw in idle:
            self._pass_place(raw)
        return idle

    def _exhausted(self, patience: float) -> Unavailable:
        return Unavailable(
            f"All {self._size} connections of this client have been busy for {patience:g} s. "
            "Is the database slow to answer? A larger pool_size admits more calls at once."
        )


class Pool(_PoolBase[_ThreadTurn]):
    """Connections for threads."""

    def __init__(self, connect: Callable[[], RawConnection], size: int, patience: float) -> None:
        super().__init__(size, patience)
        self._connect = connect
        # Reentrant, because a client that goes out of use may be closed by a collection in the middle of anything.
        self._lock = threading.RLock()

    def reset_after_fork(self) -> None:
        super().reset_after_fork()
        self._lock = threading.RLock()

    def take(self, lent_within: float | None = None) -> RawConnection:
        """Borrow a connection for one call.

        For a call of another pool's, which could open none, it has to come within so many seconds: none is opened for
        it beside those that there are.
        """
        turn: _ThreadTurn | None = None
        with self._lock:
            handed = self._take_now(lent_within is not None)
            if handed is None:
                turn = _ThreadTurn()
                self._line_up(turn)
        if turn is not None:
            handed = self._wait(turn, lent_within)
        if handed is None:
            raise ClientClosed
        if not isinstance(handed, Place):
            return handed
        try:
            raw = self._connect()
        except BaseException:
            with self._lock:
                self._places.discard(handed)
                self._pass_place()
            raise
        raw.place = handed
        return raw

    def _wait(self, turn: _ThreadTurn, lent_within: float | None) -> Handed | None:
        patience = self._patience if lent_within is None else min(lent_within, self._patience)
        try:
            if turn.came.wait(min(GROW_AFTER, patience)):
                return turn.handed
            with self._lock:
                place = self._grow() if turn in self._line and lent_within is None else None
                if place is not None:
                    self._line.remove(turn)
                    return place
            if turn.came.wait(max(patience - GROW_AFTER, 0.0)):
                return turn.handed
        except BaseException:
            if not self._leave_line(turn):
                self._pass_on(turn.handed)  # it had come already: it goes to the next
            raise
        if not self._leave_line(turn):
            return turn.handed  # it came at the last moment
        raise self._exhausted(patience)

    def _pass_on(self, handed: Handed | None) -> None:
        if isinstance(handed, Place):
            with self._lock:
                self._places.discard(handed)
                self._pass_place()
        elif handed is not None:
            self.give(handed)

    def _leave_line(self, turn: _ThreadTurn) -> bool:
        with self._lock:
            if turn in self._line:
                self._line.remove(turn)
                return True
        return False

    def give(self, raw: RawConnection) -> None:
        """Return what was borrowed; a connection that is not fit for another call is closed."""
        with self._lock:
            surplus = self._give_now(raw)
        if surplus is not None:
            surplus.close()

    def drop_idle(self) -> None:
        """Close the connections at rest, as when the server they led to has gone."""
        with self._lock:
            wires = self._drain()
        for raw in wires:
            raw.close()

    def close(self) -> None:
        """Close the connections at rest now, and those in use when they come back."""
        with self._lock:
            self._shut()
        self.drop_idle()


class AsyncPool(_PoolBase[_TaskTurn]):
    """Connections for asyncio."""

    def __init__(self, connect: Callable[[], Awaitable[RawConnection]], size: int, patience: float) -> None:
        super().__init__(size, patience)
        self._connect = connect

    async def take(self, lent_within: float | None = None) -> RawConnection:
        """Borrow a connection for one call; see Pool.take."""
        handed = self._take_now(lent_within is not None) or await self._wait(lent_within)
        if handed is None:
            raise ClientClosed
        if not isinstance(handed, Place):
            return handed
        try:
            raw = await self._connect()
        except BaseException:
            self._places.discard(handed)
            self._pass_place()
            raise
        raw.place = handed
        return raw

    async def _wait(self, lent_within: float | None) -> Handed | None:
        patience = self._patience if lent_within is None else min(lent_within, self._patience)
        turn = _TaskTurn()
        self._line_up(turn)
        try:
            # Not wait_for, which may time out and lose a turn that came at the same moment.
            await asyncio.wait([turn.came], timeout=min(GROW_AFTER, patience))
            if not turn.came.done():
                place = self._grow() if lent_within is None else None
                if place is not None:
                    self._line.remove(turn)
                    return place
                await asyncio.wait([turn.came], timeout=max(patience - GROW_AFTER, 0.0))
        except BaseException:
            if not turn.came.done():
                self._line.remove(turn)
            elif isinstance(turn.handed, Place):
                self._places.discard(turn.handed)
                self._pass_place()
            elif turn.handed is not None:
                self.give(turn.handed)  # it had come already: it goes to the next
            raise
        if turn.came.done():
            return turn.handed
        self._line.remove(turn)
        raise self._exhausted(patience)

    def give(self, raw: RawConnection) -> None:
        """Return what was borrowed; a connection that is not fit for another call is closed."""
        surplus = self._give_now(raw)
        if surplus is not None:
            surplus.close()

    def drop_idle(self) -> None:
        """Close the connections at rest, as when the server they led to has gone."""
        for raw in self._drain():
            raw.close()

    def close(self) -> None:
        """Close the connections at rest now, and those in use when they come back."""
        self._shut()
        self.drop_idle()
