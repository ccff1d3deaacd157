"""How a client ends: its connections are closed, what it holds is released, its places in line are given up.

In that order. What there is to say is said over a last connection, when no call is under way any more that could take
another lock or another place.
"""

from __future__ import annotations

import asyncio
import contextlib

from dblock._core.acquire import LockFlows
from dblock._core.effects import GIVE_UP_WITHIN
from dblock._runtime.callbacks import CallbackTimer
from dblock._runtime.keepalive import AsyncKeepAlive, KeepAlive
from dblock._runtime.listener import AsyncListener, Listener
from dblock._runtime.runner import AsyncRunner, Runner
from dblock.errors import DblockError

LISTENER_ENDS_WITHIN = 0.5
CALLS_END_WITHIN = 1.0


def shut(
    runner: Runner,
    keepalive_runner: Runner,
    keeper: KeepAlive,
    watch: CallbackTimer,
    listener: Listener,
    service: LockFlows,
) -> None:
    """End a client of threads: when it is closed, goes out of use, or the interpreter ends."""
    keeper.close()
    watch.close()
    listener.close()
    listener.join(LISTENER_ENDS_WITHIN)
    runner.close()
    keepalive_runner.close()
    listener.waiters.wake_all()  # whoever waits asks, and is told that the client is closed
    if listener.started:
        runner.wait_until_idle(CALLS_END_WITHIN)
    _release_remaining(runner, keeper, listener, service)


async def aclose(
    runner: AsyncRunner,
    keepalive_runner: AsyncRunner,
    keeper: AsyncKeepAlive,
    listener: AsyncListener,
    service: LockFlows,
) -> None:
    """End a client of asyncio while its event loop runs."""
    keeper.close()
    listener.close()
    runner.close()
    keepalive_runner.close()
    listener.waiters.wake_all()  # whoever waits asks, and is told that the client is closed
    if listener.started:
        await runner.wait_until_idle(CALLS_END_WITHIN)
    last = AsyncRunner(runner.target, runner.schema, 1, GIVE_UP_WITHIN, prepares=False)
    try:
        with contextlib.suppress(DblockError):
            await last.run(keeper.let_go())
            if listener.started:
                await last.run(service.leave())
    finally:
        last.close()
    # They were told to end; a loop that stops right after this should not find them half ended.
    if tasks := keeper.tasks | listener.tasks:
        await asyncio.wait(tasks, timeout=CALLS_END_WITHIN)


def shut_async(
    runner: AsyncRunner,
    keepalive_runner: AsyncRunner,
    keeper: AsyncKeepAlive,
    listener: AsyncListener,
    service: LockFlows,
) -> None:
    """End a client of asyncio that nobody has ended while its event loop ran."""
    keeper.close()
    runner.close()
    keepalive_runner.close()
    listener.close()
    # If anything is held still, the event loop is gone; what is left to say goes over a connection without one.
    _release_remaining(runner, keeper, listener, service)


def _release_remaining(
    runner: Runner | AsyncRunner,
    keeper: KeepAlive | AsyncKeepAlive,
    listener: Listener | AsyncListener,
    service: LockFlows,
) -> None:
    last = Runner(runner.target, runner.schema, 1, GIVE_UP_WITHIN, prepares=False)
    with contextlib.suppress(DblockError):
        last.run(keeper.let_go())
        if listener.started:
            last.run(service.leave())
    last.close()
