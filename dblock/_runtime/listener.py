"""The listener of a client of threads: one connection for all its waiters, with a thread of its own.

It starts with the first lease or wait. What it says and decides is in dblock._runtime.listening; here is how it waits.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from dblock._core import clock
from dblock._core.effects import Call, Flow, Row, drive
from dblock._core.presence import Presence
from dblock._runtime import listening
from dblock._runtime.connection import RawConnection
from dblock._runtime.listening import FIRST_PAUSE, Listening
from dblock._runtime.wakeups import ThreadWaiter
from dblock.errors import ClientClosed, DatabaseError, DblockError

if TYPE_CHECKING:
    from dblock._runtime.runner import Runner

logger = logging.getLogger("dblock")

LONGEST_SLEEP = 3600.0

T = TypeVar("T")


class Listener(Listening):
    """Listens in a thread of its own."""

    def __init__(self, runner: Runner, keepalive_runner: Runner, *args: Any) -> None:
        self._runner = runner
        self._keepalive_runner = keepalive_runner
        super().__init__(*args)

    def _reset(self) -> None:
        super()._reset()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._connected: tuple[RawConnection, Presence | None] | Exception | None = None
        """What came of an attempt to connect."""
        self._timers: list[threading.Timer] = []
        self._bell: socket.socket | None = None

    def start(self) -> None:
        """Listen from now on."""
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self._closed:
                    ring, self._bell = socket.socketpair()
                    ring.setblocking(False)
                    self._bell.setblocking(False)
                    self._thread = threading.Thread(
                        target=self._go, args=(ring, self._bell), name="dblock listener", daemon=True
                    )
                    self._thread.start()

    def join_queue(self, name: str, attempt: str) -> ThreadWaiter:
        """Register a waiter for the calling thread."""
        self.start()
        waiter = ThreadWaiter(self.waiters, name, attempt)
        self.waiters.add(waiter)
        return waiter

    @property
    def started(self) -> bool:
        """Whether the database may know of us."""
        return self._thread is not None

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        for timer in self._timers:
            timer.cancel()
        self._wake()

    def join(self, timeout: float) -> None:
        """Wait until the connection is closed."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _wake(self) -> None:
        bell = self._bell
        if bell is not None:
            with contextlib.suppress(OSError):  # it has rung more often than it was heard, or is gone
                bell.send(b"!")

    def _give_up_in(self, seconds: float) -> None:
        self._timers = [timer for timer in self._timers if timer.is_alive()]
        timer = threading.Timer(seconds, self._give_up)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _go(self, ring: socket.socket, bell: socket.socket) -> None:
        try:
            while not self._closed:
                try:
                    self._turn(ring)
                except ClientClosed:
                    break
                except Exception:
                    logger.exception("the listener met what it did not expect, and goes on")
                    threading.Event().wait(FIRST_PAUSE)
        finally:
            if isinstance(self._connected, tuple):
                self._connected[0].close()
            self._hang_up()
            ring.close()
            bell.close()

    def _turn(self, ring: socket.socket) -> None:
        """Do what is due; then wait for a notification, or for what is due next."""
        self._excuse()
        self._take_connection()
        if self._raw is None and clock.now() >= self._retry_at:
            # Apart, because it may take its time and there are those to look after meanwhile.
            self._retry_at = math.inf
            threading.Thread(target=self._connect, name="dblock connecting", daemon=True).start()
        self._look_at_the_clock()
        if self._sleep_for() <= 0:
            self._look_in()
            self._pay()
        self._wait(ring)

    def _excuse(self) -> None:
        with contextlib.suppress(DblockError):
            for presence in list(self._doubtful):
                self._keepalive_runner.run(self._excusing(presence))

    def _connect(self) -> None:
        """Open a connection and greet the server over it; the listener takes it from there."""
        raw: RawConnection | None = None
        try:
            raw = RawConnection(self._target.connect(), prepares=False)
            self._connected = (raw, self._say(raw, self._greeting(raw)))
            if self._closed:
                raw.close()
        except Exception as error:
            if raw is not None:
                raw.close()
            self._connected = error
        self._wake()

    def _take_connection(self) -> None:
        connected, self._connected = self._connected, None
        if isinstance(connected, tuple):
            self._came_up(*connected)
        elif connected is not None:
            self._could_not_connect(connected)

    def _pay(self) -> None:
        if clock.now() >= self.waiters.cleanup_due_at():
            with contextlib.suppress(DatabaseError):
                self._runner.run(self.waiters.run_cleanup())

    def _look_in(self) -> None:
        raw = self._raw
        if raw is not None:
            try:
                listened = self._listens
                self._say(raw, self._listening())
                self._say(raw, self._beating())
                self._looked(None)
                if self._listens and not listened:
                    self._runner.run(self._probing())
            except psycopg.Error as error:
                self._failed(raw, error)
            except DblockError as error:
                if isinstance(error, ClientClosed):
                    raise
                logger.info("notifications could not be tried: %s", error)
        elif clock.now() >= self.waiters.due_at():
            try:
                self._runner.run(self.waiters.check(math.inf))
                self._looked(None)
            except ClientClosed:
                raise
            except DblockError as error:
                self._looked(error)

    def _say(self, raw: RawConnection, steps: Flow[T]) -> T:
        """Perform the steps over this connection."""

        def perform(call: Call) -> Row | None:
            row: Row | None = raw.connection.wait(raw.exchange(call, min(call.within, listening.ANSWER_WITHIN)))
            return row

        return drive(steps, perform)

    def _wait(self, ring: socket.socket) -> None:
        raw = self._raw
        handles = [ring.fileno()]
        if raw is not None:
            try:
                handles.append(raw.connection.pgconn.socket)
            except psycopg.Error as error:
                self._failed(raw, error)
                return
        wait = _readable(handles)
        until = clock.now() + self._sleep_for()
        while True:
            ready = wait(max(until - clock.now(), 0.0))
            if raw is None or handles[1] not in ready:
                break
            # Straight back to waiting, so that whoever was woken can go on.
            try:
                self._read(raw)
            except psycopg.Error as error:
                self._failed(raw, error)
                break
        if handles[0] in ready:
            with contextlib.suppress(BlockingIOError):
                ring.recv(4096)


def _readable(handles: list[int]) -> Callable[[float], list[int]]:
    """Return what waits until one of them can be read, or for so many seconds, and returns those that can."""
    if not hasattr(select, "poll"):
        return lambda seconds: select.select(handles, [], [], min(seconds, LONGEST_SLEEP))[0]
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    return lambda seconds: [handle for handle, _ in poll.poll(min(seconds, LONGEST_SLEEP) * 1000)]
