"""The listener of a client of asyncio: one connection for all its waiters, with a task of its own.

It starts with the first lease or wait. What it says and decides is in dblock._runtime.listening; here is how it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from dblock._core import clock
from dblock._core.effects import Call, Flow, Row, drive_async
from dblock._runtime import listening
from dblock._runtime.asyncio_compat import wait_and_clear
from dblock._runtime.connection import RawConnection
from dblock._runtime.listening import FIRST_PAUSE, Listening
from dblock._runtime.wakeups import TaskWaiter
from dblock.errors import ClientClosed, DatabaseError, DblockError

if TYPE_CHECKING:
    from dblock._runtime.runner import AsyncRunner

logger = logging.getLogger("dblock")

T = TypeVar("T")


class AsyncListener(Listening):
    """Listens in a task of its own."""

    def __init__(self, runner: AsyncRunner, keepalive_runner: AsyncRunner, *args: Any) -> None:
        self._runner = runner
        self._keepalive_runner = keepalive_runner
        super().__init__(*args)

    def _reset(self) -> None:
        super()._reset()
        self._task: asyncio.Task[None] | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._ring: asyncio.Event | None = None

    def start(self) -> None:
        """Listen from now on."""
        if (self._task is None or self._task.done()) and not self._closed:
            if self._task is not None:
                if self._connecting is not None:
                    self._connecting.cancel()
                self._begin_again()
            self._ring = asyncio.Event()
            self._task = asyncio.get_running_loop().create_task(self._go(self._ring), name="dblock listener")

    def join_queue(self, name: str, attempt: str) -> TaskWaiter:
        """Register a waiter for the running task."""
        self.start()
        waiter = TaskWaiter(self.waiters, name, attempt)
        self.waiters.add(waiter)
        return waiter

    @property
    def started(self) -> bool:
        """Whether the database may know of us."""
        return self._task is not None

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """What runs for it in the event loop."""
        return {task for task in (self._task, self._connecting) if task is not None}

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        task = self._task
        if task is not None and not task.get_loop().is_closed():
            task.cancel()
            if self._connecting is not None:
                self._connecting.cancel()
        self._hang_up()

    def _hang_up(self) -> None:
        task = self._task
        if self._raw is not None and task is not None and not task.get_loop().is_closed():
            # Before its number is another's.
            task.get_loop().remove_reader(self._raw.connection.pgconn.socket)
        super()._hang_up()

    def _wake(self) -> None:
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
        if self._raw is None and clock.now() >= self._retry_at:
            # Apart, because it may take its time and there are those to look after meanwhile.
            self._retry_at = math.inf
            self._connecting = asyncio.get_running_loop().create_task(self._connect(), name="dblock connecting")
        self._look_at_the_clock()
        if self._sleep_for() <= 0:
            await self._look_in()
            await self._pay()
        await self._wait(ring)

    async def _excuse(self) -> None:
        with contextlib.suppress(DblockError):
            for presence in list(self._doubtful):
                await self._keepalive_runner.run(self._excusing(presence))

    async def _connect(self) -> None:
        raw: RawConnection | None = None
        try:
            raw = RawConnection(await self._target.connect_async(), prepares=False)
            self._came_up(raw, await self._say(raw, self._greeting(raw)))
        except Exception as error:
            if raw is not None:
                raw.close()
            self._could_not_connect(error)
        except BaseException:
            if raw is not None:
                raw.close()
            if self._connecting is asyncio.current_task():
                self._retry_at = -math.inf  # the listener itself may go on
                self._wake()
            raise
        self._wake()

    async def _pay(self) -> None:
        if clock.now() >= self.waiters.cleanup_due_at():
            with contextlib.suppress(DatabaseError):
                await self._runner.run(self.waiters.run_cleanup())

    async def _look_in(self) -> None:
        raw = self._raw
        if raw is not None:
            try:
                listened = self._listens
                await self._say(raw, self._listening())
                await self._say(raw, self._beating())
                self._looked(None)
                if self._listens and not listened:
                    await self._runner.run(self._probing())
            except psycopg.Error as error:
                self._failed(raw, error)
            except DblockError as error:
                if isinstance(error, ClientClosed):
                    raise
                logger.info("notifications could not be tried: %s", error)
        elif clock.now() >= self.waiters.due_at():
            try:
                await self._runner.run(self.waiters.check(math.inf))
                self._looked(None)
            except ClientClosed:
                raise
            except DblockError as error:
                self._looked(error)

    async def _say(self, raw: RawConnection, steps: Flow[T]) -> T:
        """Perform the steps over this connection."""

        async def perform(call: Call) -> Row | None:
            row: Row | None = await raw.connection.wait(raw.exchange(call, min(call.within, listening.ANSWER_WITHIN)))
            return row

        return await drive_async(steps, perform)

    async def _wait(self, ring: asyncio.Event) -> None:
        raw = self._raw
        seconds = self._sleep_for()
        loop = asyncio.get_running_loop()
        handle: int | None = None
        if raw is not None:
            try:
                handle = raw.connection.pgconn.socket
            except psycopg.Error as error:
                self._failed(raw, error)
                return
        came = False

        def readable() -> None:
            nonlocal came
            came = True
            ring.set()

        if handle is not None:
            loop.add_reader(handle, readable)
        try:
            await wait_and_clear(ring, None if seconds == math.inf else seconds)
        finally:
            if handle is not None:
                loop.remove_reader(handle)
        if raw is not None and came:
            try:
                self._read(raw)
            except psycopg.Error as error:
                self._failed(raw, error)
