"""Waiting for an event in the event loop, for so long at most.

Guarantee: whoever is cancelled meanwhile is cancelled. `asyncio.wait_for` does not promise that before Python 3.12: a
cancellation that comes together with the event passes for the event. A task that goes round for ever would then go on,
and whoever waits for its end, as `asyncio.run` does, would wait for ever.
"""

from __future__ import annotations

import asyncio


async def wait_and_clear(event: asyncio.Event, seconds: float | None) -> None:
    """Return once the event is set or so many seconds have passed; either way it is not set any more."""
    timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        if timer is not None:
            timer.cancel()
    event.clear()
