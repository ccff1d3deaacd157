"""The listener: one connection of a client for all its waiters, with a thread (or task) of its own.

It starts with the first lease or wait. What it says and decides is in dblock.listening; here is how it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import select
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from dblock import clock, listening
from dblock.calls import Call, Steps
from dblock.errors import ClientClosed, DblockError
from dblock.line import TaskSeating, ThreadSeating
from dblock.listening import FIRST_PAUSE, Listening
from dblock.wire import Wire

if TYPE_CHECKING:
    from dblock.runner import AsyncRunner, Runner

logger = logging.getLogger("dblock")

LONGEST_SLEEP = 3600.0

T = TypeVar("T")


class Listener(Listening):
    """Listens in a thread of its own."""

    def __init__(self, runner: Runner, keepers: Runner, *args: Any) -> None:
        self._runner = runner
        self._keepers = keepers
        super().__init__(*args)

    def _reset(self) -> None:
        super()._reset()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
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

    def place(self, name: str, attempt: str) -> ThreadSeating:
        """Make a place in line for the calling thread."""
        self.start()
        place = ThreadSeating(self.line, name, attempt)
        self.line.add(place)
        return place

    @property
    def started(self) -> bool:
        """Whether the database may know of us."""
        return self._thread is not None

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        for timer in self._timers:
            timer.cancel()
        self._hurry()

    def join(self, timeout: float) -> None:
        """Wait until the connection is closed."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _hurry(self) -> None:
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
            self._hang_up()
            ring.close()
            bell.close()

    def _turn(self, ring: socket.socket) -> None:
        """Do what is due; then wait for a notification, or for what is due next."""
        self._excuse()
        if self._wire is None and clock.now() >= self._retry_at:
            self._connect()
        self._look_at_the_clock()
        if self._sleep_for() <= 0:
            self._look_in()
        self._wait(ring)

    def _excuse(self) -> None:
        with contextlib.suppress(DblockError):
            for presence in list(self._doubtful):
                self._keepers.run(self._excusing(presence))

    def _connect(self) -> None:
        try:
            connection = self._target.connect()
        except (psycopg.Error, DblockError, OSError) as error:
            self._could_not_connect(error)
            return
        wire = Wire(connection, prepares=False)
        try:
            presence = self._say(wire, self._greeting(wire))
        except psycopg.Error as error:
            wire.close()
            self._could_not_connect(error)
            return
        self._came_up(wire, presence)

    def _look_in(self) -> None:
        wire = self._wire
        if wire is not None:
            try:
                listened = self._listens
                self._say(wire, self._listening())
                self._say(wire, self._beating())
                self._looked(None)
                if self._listens and not listened:
                    self._runner.run(self._probing())
            except psycopg.Error as error:
                self._failed(wire, error)
            except DblockError as error:
                if isinstance(error, ClientClosed):
                    raise
                logger.info("notifications could not be tried: %s", error)
        elif clock.now() >= self.line.due_at():
            try:
                self._runner.run(self.line.look(math.inf))
                self._looked(None)
            except ClientClosed:
                raise
            except DblockError as error:
                self._looked(error)

    def _say(self, wire: Wire, steps: Steps[T]) -> T:
        """Perform the steps over this connection."""
        try:
            step = next(steps)
            while True:
                assert isinstance(step, Call)
                try:
                    row = wire.connection.wait(wire.exchange(step, min(step.within, listening.ANSWER_WITHIN)))
                except BaseException as error:
                    steps.throw(error)
                    raise
                step = steps.send(row)
        except StopIteration as done:
            result: T = done.value
            return result

    def _wait(self, ring: socket.socket) -> None:
        wire = self._wire
        handles = [ring.fileno()] if wire is None else [ring.fileno(), wire.connection.pgconn.socket]
        wait = _readable(handles)
        until = clock.now() + self._sleep_for()
        while True:
            ready = wait(max(until - clock.now(), 0.0))
            if wire is None or handles[1] not in ready:
                break
            # Straight back to waiting, so that whoever was woken can go on.
            try:
                self._read(wire)
            except psycopg.Error as error:
                self._failed(wire, error)
                break
        if handles[0] in ready:
            with contextlib.suppress(BlockingIOError):
                ring.recv(4096)


class AsyncListener(Listening):
    """Listens in a task of its own."""

    def __init__(self, runner: AsyncRunner, keepers: AsyncRunner, *args: Any) -> None:
        self._runner = runner
        self._keepers = keepers
        super().__init__(*args)

    def _reset(self) -> None:
        super()._reset()
        self._task: asyncio.Task[None] | None = None
        self._ring: asyncio.Event | None = None

    def start(self) -> None:
        """Listen from now on."""
        if (self._task is None or self._task.done()) and not self._closed:
            self._ring = asyncio.Event()
            self._task = asyncio.get_running_loop().create_task(self._go(self._ring), name="dblock listener")

    def place(self, name: str, attempt: str) -> TaskSeating:
        """Make a place in line for the running task."""
        self.start()
        place = TaskSeating(self.line, name, attempt)
        self.line.add(place)
        return place

    @property
    def started(self) -> bool:
        """Whether the database may know of us."""
        return self._task is not None

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        task = self._task
        if task is not None and not task.get_loop().is_closed():
            task.cancel()
        self._hang_up()

    def _hang_up(self) -> None:
        task = self._task
        if self._wire is not None and task is not None and not task.get_loop().is_closed():
            # Before its number is another's.
            task.get_loop().remove_reader(self._wire.connection.pgconn.socket)
        super()._hang_up()

    def _hurry(self) -> None:
        if self._ring is not None:
            self._ring.set()

    def _give_up_in(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._give_up)

    async def _go(self, ring: asyncio.Event) -> None:
        try:
            while not self._closed:
                try:
                    await self._turn(ring)
                except ClientClosed:
                    break
                except Exception:
                    logger.exception("the listener met what it did not expect, and goes on")
                    await asyncio.sleep(FIRST_PAUSE)
        finally:
            self._hang_up()

    async def _turn(self, ring: asyncio.Event) -> None:
        """Do what is due; then wait for a notification, or for what is due next."""
        await self._excuse()
        if self._wire is None and clock.now() >= self._retry_at:
            await self._connect()
        self._look_at_the_clock()
        if self._sleep_for() <= 0:
            await self._look_in()
        await self._wait(ring)

    async def _excuse(self) -> None:
        with contextlib.suppress(DblockError):
            for presence in list(self._doubtful):
                await self._keepers.run(self._excusing(presence))

    async def _connect(self) -> None:
        try:
            connection = await self._target.connect_async()
        except (psycopg.Error, DblockError, OSError) as error:
            self._could_not_connect(error)
            return
        wire = Wire(connection, prepares=False)
        try:
            presence = await self._say(wire, self._greeting(wire))
        except psycopg.Error as error:
            wire.close()
            self._could_not_connect(error)
            return
        except BaseException:
            wire.close()
            raise
        self._came_up(wire, presence)

    async def _look_in(self) -> None:
        wire = self._wire
        if wire is not None:
            try:
                listened = self._listens
                await self._say(wire, self._listening())
                await self._say(wire, self._beating())
                self._looked(None)
                if self._listens and not listened:
                    await self._runner.run(self._probing())
            except psycopg.Error as error:
                self._failed(wire, error)
            except DblockError as error:
                if isinstance(error, ClientClosed):
                    raise
                logger.info("notifications could not be tried: %s", error)
        elif clock.now() >= self.line.due_at():
            try:
                await self._runner.run(self.line.look(math.inf))
                self._looked(None)
            except ClientClosed:
                raise
            except DblockError as error:
                self._looked(error)

    async def _say(self, wire: Wire, steps: Steps[T]) -> T:
        """Perform the steps over this connection."""
        try:
            step = next(steps)
            while True:
                assert isinstance(step, Call)
                try:
                    row = await wire.connection.wait(wire.exchange(step, min(step.within, listening.ANSWER_WITHIN)))
                except BaseException as error:
                    steps.throw(error)
                    raise
                step = steps.send(row)
        except StopIteration as done:
            result: T = done.value
            return result

    async def _wait(self, ring: asyncio.Event) -> None:
        wire = self._wire
        seconds = self._sleep_for()
        loop = asyncio.get_running_loop()
        handle = wire.connection.pgconn.socket if wire is not None else None
        came = False

        def readable() -> None:
            nonlocal came
            came = True
            ring.set()

        if handle is not None:
            loop.add_reader(handle, readable)
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ring.wait(), None if seconds == math.inf else seconds)
        finally:
            if handle is not None:
                loop.remove_reader(handle)
        ring.clear()
        if wire is not None and came:
            try:
                self._read(wire)
            except psycopg.Error as error:
                self._failed(wire, error)


def _readable(handles: list[int]) -> Callable[[float], list[int]]:
    """Return what waits until one of them can be read, or for so many seconds, and returns those that can."""
    if not hasattr(select, "poll"):
        return lambda seconds: select.select(handles, [], [], min(seconds, LONGEST_SLEEP))[0]
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    return lambda seconds: [handle for handle, _ in poll.poll(min(seconds, LONGEST_SLEEP) * 1000)]
