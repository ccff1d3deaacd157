"""Let a thread that waits read the listener's connection itself.

A notification then reaches its waiter without a switch from the listener's thread, which takes as long as the rest of a
wake-up. The thread that waits first, the reader, polls the connection and passes on what comes for other waiters too.
The listener's thread does what it always does, but watches the connection only for its end.

No wake-up is lost: whenever a waiter sleeps, a reader reads, or the listener's thread does. A reader that leaves while
others wait gives the reading back to the listener's thread. The lock of the connection keeps a reader and an exchange
apart. An exchange passes on what comes before its reply.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import waiting

from dblock._core import clock

if TYPE_CHECKING:
    from dblock._core.listener_flow import ListenerFlow
    from dblock._core.waiters import LocalWaiter
    from dblock._runtime.listener_connection import ListenerConnection

READS_ON_FOR = 0.5
"""Seconds for which the listener's thread leaves the reading to the threads that wait, although none waits now."""


EXCHANGE_TAKES = 0.01
"""Seconds after which a reader looks whether an exchange over the connection is over."""

LONGEST_POLL = 3600.0


class ThreadReader:
    """Which thread of a client reads the listener's connection, and how it is woken."""

    def __init__(self, flow: ListenerFlow, wake_listener: Callable[[], None]) -> None:
        self._flow = flow
        self._wake_listener = wake_listener
        self._lock = threading.Lock()
        self._reader: LocalWaiter | None = None
        """The waiter whose thread reads. An interrupt may leave it here after the end of its wait."""
        self._connection: ListenerConnection | None = None
        """The connection that was read last."""
        self._read_until = -math.inf
        self._poll: Any = None
        self._pipe: tuple[int, int] | None = None
        """Wakes the reader."""

    def reads(self, connection: object) -> bool:
        """Return whether a thread that waits reads this connection, or will when it waits again."""
        return self._connection is connection and (self._has_reader() or clock.now() < self._read_until)

    def is_reader(self, waiter: LocalWaiter) -> bool:
        """Return whether the thread of this waiter reads."""
        return self._reader is waiter

    def wait(self, waiter: LocalWaiter, is_woken: Callable[[], bool], seconds: float) -> bool:
        """Read until the waiter is woken, or for so many seconds. Return False if another thread must read."""
        with self._lock:
            if self._has_reader() or not self._may_read():
                return False
            self._reader = waiter
        try:
            return self._read(is_woken, clock.now() + seconds)
        finally:
            self._read_until = clock.now() + READS_ON_FOR
            self._reader = None
            # Counted after that: a waiter that comes later finds no reader, and reads.
            if self._flow.waiters.count > 1:
                self._read_until = -math.inf
                self._wake_listener()

    def _has_reader(self) -> bool:
        return self._reader is not None and self._flow.waiters.has(self._reader)

    def interrupt(self) -> None:
        """Make the reader look whether it was woken."""
        if self._pipe is not None:
            with contextlib.suppress(BlockingIOError):  # it was interrupted before
                os.write(self._pipe[1], b"!")

    def stop(self) -> None:
        """Stop reading, because the connection is closed from here on."""
        self._connection = None
        self.interrupt()

    def resume(self) -> None:
        """Do nothing: an exchange keeps the reader from reading only as long as it lasts."""

    def drop(self) -> None:
        """Do nothing: the child of a fork has no reader."""

    def _may_read(self) -> bool:
        """Return whether a thread may read the connection now, and prepare for it."""
        connection: Any = self._flow.connection
        if connection is None or not self._flow.listens or not connection.readable_in_loop:
            return False
        if connection is not self._connection:
            if waiting.wait is not getattr(waiting, "wait_c", None) or not hasattr(select, "poll"):
                return False  # gevent or eventlet has patched this process
            try:
                number = connection.fileno()
                self._pipe = self._pipe or _open_pipe()
            except (OSError, psycopg.Error):
                return False
            self._poll = select.poll()
            for handle in (number, self._pipe[0]):
                self._poll.register(handle, select.POLLIN)
            self._connection = connection
            connection.reader = self
        return True

    def _read(self, is_woken: Callable[[], bool], until: float) -> bool:
        connection, poll, pipe = self._connection, self._poll, self._pipe
        assert pipe is not None
        while not is_woken() and (left := until - clock.now()) > 0:
            # Checked after the waiter became the reader: a connection that is closed later interrupts the poll.
            if connection is None or self._connection is not connection or self._flow.closed:
                return False
            for handle, _ in poll.poll(min(left, LONGEST_POLL) * 1000):
                if handle == pipe[0]:
                    with contextlib.suppress(BlockingIOError):
                        os.read(handle, 4096)
                elif not self._read_once(connection, left):
                    return False
        return True

    def _read_once(self, connection: ListenerConnection, left: float) -> bool:
        """Read what has come. Return False if the connection cannot be read any more."""
        held: list[bool] = []
        try:
            # In one step for an interrupt, which would otherwise leave the lock taken.
            held.extend(map(connection.lock.acquire, (False,)))
            if held[0]:
                connection.read_locked()
            elif self._pipe is not None:
                # The exchange that has it passes on what comes, which interrupts this.
                pause = select.poll()
                pause.register(self._pipe[0], select.POLLIN)
                pause.poll(min(left, EXCHANGE_TAKES) * 1000)
        except psycopg.Error:
            self._connection = None
            self._wake_listener()  # its thread gets the same error
            return False
        finally:
            if held and held[0]:
                connection.lock.release()
        return True

    def _close(self) -> None:
        pipe, self._pipe = self._pipe, None
        for handle in pipe or ():
            os.close(handle)

    __del__ = _close


def _open_pipe() -> tuple[int, int]:
    pipe = os.pipe()
    for handle in pipe:
        os.set_blocking(handle, False)
    return pipe
