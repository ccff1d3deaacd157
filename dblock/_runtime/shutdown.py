"""How a client ends: close its connections, release its leases, give up its tickets, in that order.

The last messages go over a connection of their own, once no call is under way that could take another lock or ticket.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import NamedTuple

from dblock._core.acquire import LockFlows
from dblock._core.effects import Flow
from dblock._runtime.callbacks import CallbackTimer
from dblock._runtime.keepalive import KeepAlive
from dblock._runtime.listener import Listener
from dblock._runtime.runner import IDLE_POLL, AsyncRunner, Runner
from dblock.errors import DblockError


class ThreadParts(NamedTuple):
    """What a ThreadRuntime has opened. It does not refer to the runtime, which can so be garbage-collected."""

    runner: Runner
    keepalive_runner: Runner
    keepalive: KeepAlive
    listener: Listener
    callbacks: CallbackTimer
    flows: LockFlows


class TaskParts(NamedTuple):
    """What a TaskRuntime has opened. It does not refer to the runtime, which can so be garbage-collected."""

    runner: AsyncRunner
    keepalive_runner: Runner
    keepalive: KeepAlive
    listener: Listener
    flows: LockFlows


def close(parts: ThreadParts) -> None:
    """End a client of threads: when it is closed or garbage-collected, or when the interpreter exits."""
    timings = parts.flows.timings
    parts.keepalive.close()
    parts.callbacks.close()
    parts.listener.close()
    parts.listener.join(timings.listener_ends_within)
    parts.runner.close()
    parts.keepalive_runner.close()
    parts.listener.waiters.wake_all()  # each waiter asks again, and gets ClientClosed
    parts.runner.wait_until_idle(timings.calls_end_within)
    _release_remaining(parts)


async def aclose(parts: TaskParts) -> None:
    """End a client of asyncio while its event loop runs."""
    timings = parts.flows.timings
    parts.keepalive.close()
    parts.listener.close()
    await _ended(parts.listener, within=timings.listener_ends_within)
    parts.runner.close()
    parts.keepalive_runner.close()
    parts.listener.waiters.wake_all()  # each waiter asks again, and gets ClientClosed
    await asyncio.sleep(0)  # a task that was cancelled just before hands its lease to the keep-alive here
    await parts.runner.wait_until_idle(timings.calls_end_within)
    last = AsyncRunner(
        parts.runner.target, parts.runner.schema, 1, timings.give_up_within, prepares=False, timings=timings
    )
    try:
        with contextlib.suppress(DblockError):
            await last.run(_last_flow(parts))
    finally:
        last.close()
    await _ended(parts.keepalive, parts.listener, within=timings.calls_end_within)


async def _ended(*parts: KeepAlive | Listener, within: float) -> None:
    """Wait until the threads of these parts have ended, but no longer than so many seconds."""
    until = time.monotonic() + within
    while any(part.running for part in parts) and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(IDLE_POLL)


def close_without_loop(parts: TaskParts) -> None:
    """End a client of asyncio that was not closed while its event loop ran."""
    timings = parts.flows.timings
    parts.keepalive.close()
    parts.listener.close()
    parts.listener.join(timings.listener_ends_within)
    parts.runner.close()
    parts.keepalive_runner.close()
    # If leases are still held, the event loop is gone: the last messages go over a connection that needs none.
    _release_remaining(parts)


def _release_remaining(parts: ThreadParts | TaskParts) -> None:
    # The keep-alive's target needs no event loop.
    target, timings = parts.keepalive_runner.target, parts.flows.timings
    last = Runner(target, parts.runner.schema, 1, timings.give_up_within, prepares=False, timings=timings)
    with contextlib.suppress(DblockError):
        last.run(_last_flow(parts))
    last.close()


def _last_flow(parts: ThreadParts | TaskParts) -> Flow[None]:
    """Release all leases, and give up the tickets and the presence if the database may know of them."""
    yield from parts.keepalive.let_go()
    if parts.listener.known:
        # A request may still be under way, and its ticket may come after this.
        parts.listener.waiters.left = True
        yield from parts.flows.leave()
