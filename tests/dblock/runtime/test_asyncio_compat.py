"""Whoever waits for an event and is cancelled leaves, however near the event is."""

from __future__ import annotations

import asyncio
import time

import pytest

from dblock._runtime.asyncio_compat import wait_and_clear


@pytest.mark.parametrize("turns", range(5))
async def test_cancelled_loop_ends_though_its_event_is_set(turns: int) -> None:
    event, rounds = asyncio.Event(), 0

    async def go_round() -> None:
        nonlocal rounds
        while True:
            await wait_and_clear(event, 60)
            rounds += 1

    task = asyncio.ensure_future(go_round())
    await asyncio.sleep(0)
    event.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=5)
    assert done, f"it goes on after {rounds} rounds"
    assert task.cancelled()


@pytest.mark.parametrize("seconds", [0.0, 0.05])
async def test_the_wait_ends_by_itself_and_leaves_nothing_set(seconds: float) -> None:
    event, began = asyncio.Event(), time.monotonic()
    await wait_and_clear(event, seconds)
    assert time.monotonic() - began >= seconds * 0.9
    assert not event.is_set()


async def test_an_event_that_comes_in_time_is_not_set_again_later() -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    await wait_and_clear(event, 0.05)
    await asyncio.sleep(0.1)
    assert not event.is_set()
