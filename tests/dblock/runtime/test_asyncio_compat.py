"""A task that is cancelled while it waits for an event ends, even if the event is set at the same time."""

from __future__ import annotations

import asyncio
import time

import pytest

from dblock._runtime.asyncio_compat import wait_and_clear


@pytest.mark.parametrize("turns", range(5))
async def test_cancelled_loop_ends_though_its_event_is_set(turns: int) -> None:
    event, rounds = asyncio.Event(), 0

    async def wait_in_a_loop() -> None:
        nonlocal rounds
        while True:
            await wait_and_clear(event, 60)
            rounds += 1

    task = asyncio.ensure_future(wait_in_a_loop())
    await asyncio.sleep(0)
    event.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=5)
    assert done, f"the task still runs after {rounds} rounds"
    assert task.cancelled()


@pytest.mark.parametrize("seconds", [0.0, 0.05])
async def test_wait_ends_after_its_timeout_and_leaves_the_event_clear(seconds: float) -> None:
    event, began = asyncio.Event(), time.monotonic()
    await wait_and_clear(event, seconds)
    assert time.monotonic() - began >= seconds * 0.9
    assert not event.is_set()


async def test_timer_does_not_set_the_event_after_the_wait_has_ended() -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    await wait_and_clear(event, 0.05)
    await asyncio.sleep(0.1)
    assert not event.is_set()
