"""A few connections, shared by all calls of a client: one pool for threads, one for asyncio.

A call borrows a connection for one round trip, the one used last first, so that a quiet client keeps to one. A
connection is opened by the call that needs it, in the call itself: an error in opening it is that call's error, in
full and at once, and there is no thread to leak or to lose in a fork.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable

from dblock.errors import ClientClosed, Unavailable
from dblock.wire import Wire

IDLE_FOR = 60.0
"""Seconds after which a connection that a burst of calls had opened is closed again."""

_parents: list[Wire] = []
"""Connections of the process that this one was forked from, kept so that nothing closes them."""


class _PoolBase:
    """What both pools count: connections at rest, and all that are open or being opened."""

    def __init__(self, size: int, patience: float) -> None:
        self._size = size
        self._patience = patience
        self._idle: list[Wire] = []
        self._open = 0
        self._closed = False
        self._process = os.getpid()

    def _take_now(self) -> tuple[bool, Wire | None]:
        """Take a connection at rest, or leave to open one; False when neither can be had."""
        if self._closed:
            raise ClientClosed
        self._leave_to_parent()
        if self._idle:
            return True, self._idle.pop()
        if self._open < self._size:
            self._open += 1
            return True, None
        return False, None

    def _give_now(self, wire: Wire) -> Wire | None:
        """Lay a connection to rest for the next call; return one that is to be closed instead."""
        if self._closed or not wire.usable:
            self._open -= 1
            return wire
        now = wire.used_at = time.monotonic()
        self._idle.append(wire)
        if now - self._idle[0].used_at > IDLE_FOR:
            self._open -= 1
            return self._idle.pop(0)
        return None

    def _leave_to_parent(self) -> None:
        """In the child of a fork, forget the parent's connections: they are left open, and never spoken over."""
        if self._process != os.getpid():
            _parents.extend(self._idle)
            self._idle, self._open, self._process = [], 0, os.getpid()

    def _drain(self) -> list[Wire]:
        self._leave_to_parent()
        idle, self._idle = self._idle, []
        self._open -= len(idle)
        return idle

    def _exhausted(self) -> Unavailable:
        return Unavailable(
            f"All {self._size} connections of this client have been busy for {self._patience:g} s. "
            "Is the database slow to answer? A larger pool_size admits more calls at once."
        )


class Pool(_PoolBase):
    """Connections for threads."""

    def __init__(self, connect: Callable[[], Wire], size: int, patience: float) -> None:
        super().__init__(size, patience)
        self._connect = connect
        self._changed = threading.Condition(threading.Lock())

    def take(self) -> Wire:
        """Borrow a connection for one call."""
        with self._changed:
            taken, wire = self._take_now()
            if not taken:
                deadline = time.monotonic() + self._patience
                while not taken:
                    if not self._changed.wait(deadline - time.monotonic()):
                        raise self._exhausted()
                    taken, wire = self._take_now()
        if wire is not None:
            return wire
        try:
            return self._connect()
        except BaseException:
            with self._changed:
                self._open -= 1
                self._changed.notify()
            raise

    def give(self, wire: Wire) -> None:
        """Return what was borrowed; a connection that is not fit for another call is closed."""
        with self._changed:
            surplus = self._give_now(wire)
            self._changed.notify()
        if surplus is not None:
            surplus.close()

    def drop_idle(self) -> None:
        """Close the connections at rest, as when the server they led to has gone."""
        with self._changed:
            wires = self._drain()
            self._changed.notify_all()
        for wire in wires:
            wire.close()

    def close(self) -> None:
        """Close the connections at rest now, and those in use when they come back."""
        self._closed = True
        self.drop_idle()


class AsyncPool(_PoolBase):
    """Connections for asyncio."""

    def __init__(self, connect: Callable[[], Awaitable[Wire]], size: int, patience: float) -> None:
        super().__init__(size, patience)
        self._connect = connect
        self._waiting: list[asyncio.Future[None]] = []

    async def take(self) -> Wire:
        """Borrow a connection for one call."""
        taken, wire = self._take_now()
        deadline = time.monotonic() + self._patience
        while not taken:
            await self._wait(deadline - time.monotonic())
            taken, wire = self._take_now()
        if wire is not None:
            return wire
        try:
            return await self._connect()
        except BaseException:
            self._open -= 1
            self._notify()
            raise

    def give(self, wire: Wire) -> None:
        """Return what was borrowed; a connection that is not fit for another call is closed."""
        surplus = self._give_now(wire)
        self._notify()
        if surplus is not None:
            surplus.close()

    def drop_idle(self) -> None:
        """Close the connections at rest, as when the server they led to has gone."""
        wires = self._drain()
        for wire in wires:
            self._notify()
            wire.close()

    def close(self) -> None:
        """Close the connections at rest now, and those in use when they come back."""
        self._closed = True
        while self._waiting:
            self._notify()
        self.drop_idle()

    async def _wait(self, seconds: float) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await asyncio.wait_for(turn, seconds)
        except asyncio.TimeoutError:
            raise self._exhausted() from None
        except BaseException:
            if turn.done() and not turn.cancelled():
                # Our turn came just as we were cancelled: pass it on.
                self._notify()
            raise
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)

    def _notify(self) -> None:
        while self._waiting:
            turn = self._waiting.pop(0)
            if not turn.done():
                turn.set_result(None)
                return
