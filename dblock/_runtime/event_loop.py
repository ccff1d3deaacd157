"""Watch the event loop of an AsyncClient from the client's own threads.

Guarantee: an event loop that is blocked costs no lease. The keep-alive and the listener run in threads, and the watch
is their only link to the loop. It answers three questions:

- Does the loop run? While it does not, it cannot take its turn in a queue, so its waiters send no heartbeat.
- For how long did it not run? The watch logs that once, when the loop runs again.
- Is the loop closed? Then no task can release the leases any more, and the client shuts down by itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from dblock._core import clock
from dblock._core.effects import Call, Row
from dblock._runtime.call_retry import CallRetry
from dblock._runtime.error_mapping import is_overdue
from dblock._runtime.keepalive_runner import KeepAliveRunner
from dblock._runtime.pool import AsyncPool
from dblock._runtime.runner import AsyncRunner, Runner
from dblock.errors import Unavailable

logger = logging.getLogger("dblock")

ASK_EVERY = 0.2
"""Seconds between two requests to the loop, at least."""

BLOCKED_AFTER = 0.5
"""Seconds without a reply after which the loop counts as blocked."""


class LoopWatch:
    """Asks an event loop for a sign that it runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.on_closed: Callable[[], object] = lambda: None
        """Called once, in the thread that finds the loop closed."""
        self._lock = threading.Lock()
        self._asked_at: float | None = None
        """When the loop was asked, while it has not replied."""
        self._ask_at = 0.0

    def look(self) -> None:
        """Ask the loop for a reply, unless a reply is outstanding or the last one is recent. Never waits."""
        if self.loop.is_closed():
            on_closed, self.on_closed = self.on_closed, lambda: None
            on_closed()
            return
        now = clock.now()
        with self._lock:
            if self._asked_at is not None or now < self._ask_at:
                return
            self._asked_at, self._ask_at = now, now + ASK_EVERY
        with contextlib.suppress(RuntimeError):  # closed at this moment
            self.loop.call_soon_threadsafe(self._reply, now)

    def runs(self) -> bool:
        """Return whether the loop has replied, or may still do so in time. Asks it."""
        self.look()
        asked_at = self._asked_at
        return not self.loop.is_closed() and (asked_at is None or clock.now() < asked_at + BLOCKED_AFTER)

    def _reply(self, asked_at: float) -> None:
        self._asked_at = None
        blocked = clock.now() - asked_at
        if blocked >= BLOCKED_AFTER:
            logger.warning(
                "client: the event loop did not run for at least %.1f s. Leases were renewed in that time, but no body "
                "could learn of a loss. Move blocking work into a thread, for example with asyncio.to_thread.",
                blocked,
            )


class _Blocked(Exception):
    """The event loop does not run, so it made no call."""


class LoopCalls:
    """Makes calls over the pool of the event loop, for a thread that waits for the reply."""

    def __init__(self, runner: AsyncRunner, watch: LoopWatch) -> None:
        self._runner = runner
        self._watch = watch

    @property
    def can_lend(self) -> bool:
        """Whether the pool has a connection open, and the loop runs."""
        return self._runner.may_lend and self._watch.runs()

    @property
    def pool(self) -> AsyncPool:
        """The pool. Only the loop may use it."""
        return self._runner._pool

    @property
    def terminated_at(self) -> float:
        """When the server last ended one of its sessions with a message, on the clock of dblock._core.clock."""
        return self._runner.terminated_at

    def warm(self) -> None:
        """Let the loop open a connection if it has none. Do not wait for it."""
        if not self.pool.is_empty():
            return
        warming = self._runner.warm()
        try:
            asyncio.run_coroutine_threadsafe(warming, self._watch.loop)
        except RuntimeError:  # the loop is closed
            warming.close()

    def shrink(self) -> float:
        """Let the loop close connections that have been idle for long. Return the seconds until the next one has."""
        left = self._runner.surplus_in()
        if left > 0:
            return left
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._watch.loop.call_soon_threadsafe(self._runner.shrink)
        return self.pool.idle_for

    def call(self, call: Call, lent: bool) -> Row | None:
        """Make the call in the loop. `lent` opens no connection for it. Raise _Blocked once the loop does not run."""
        if not self._watch.runs():
            raise _Blocked
        calling = self._runner.call(call, lent)
        try:
            future = asyncio.run_coroutine_threadsafe(calling, self._watch.loop)
        except RuntimeError:  # the loop was closed at this moment
            calling.close()
            raise _Blocked from None
        while True:
            try:
                return future.result(ASK_EVERY)
            except concurrent.futures.CancelledError:
                raise _Blocked from None
            except concurrent.futures.TimeoutError:
                if not self._watch.runs():
                    future.cancel()
                    raise _Blocked from None


class LoopKeepAliveRunner(KeepAliveRunner):
    """Performs the calls of the keep-alive's thread. If no connection can be opened, borrows one of the loop's."""

    def __init__(self, *args: Any, loop: LoopCalls, **options: Any) -> None:
        super().__init__(*args, **options)
        self._loop = loop
        if self._home_of_client is not None:
            self._keep_reserve(loop.pool, self._home_of_client)

    def _warm_calls(self) -> None:
        self._loop.warm()

    def _call_without_home(self, call: Call, trouble: CallRetry | None = None) -> Row | None:
        try:
            return super()._call_without_home(call, trouble)
        except Unavailable as error:
            if is_overdue(error.__cause__) or self.is_refusal(error.__cause__) or not self._loop.can_lend:
                raise
            self.opening.failed("runner: could not open a connection, borrowing one of the pool: %s", error)
            try:
                return self._loop.call(call if trouble is None else trouble.call, lent=True)
            except _Blocked:
                raise error from None


class LoopListenerRunner:
    """Performs the calls that the listener's thread makes over the client's pool.

    While the loop is blocked, they go over the keep-alive's connection.
    """

    def __init__(self, loop: LoopCalls, keepalive_runner: Runner) -> None:
        self._loop = loop
        self._keepalive_runner = keepalive_runner

    def perform(self, effect: Any) -> Any:
        """Perform one effect of the listener's flow."""
        if isinstance(effect, Call):
            with contextlib.suppress(_Blocked):
                return self._loop.call(effect, lent=False)
        return self._keepalive_runner.perform(effect)

    @property
    def terminated_at(self) -> float:
        """When the server last ended a session of the loop's pool, on the clock of dblock._core.clock."""
        return self._loop.terminated_at

    def shrink(self) -> float:
        """Close connections that have been idle for long, in the event loop. Return the seconds until the next one."""
        return self._loop.shrink()
