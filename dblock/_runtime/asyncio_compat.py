"""Wait for an event in the event loop, with a timeout.

Guarantee: a task that is cancelled during the wait is cancelled. `asyncio.wait_for` does not promise that before Python
3.12: a cancellation that comes together with the event is lost. A task with an endless loop would then continue, and
`asyncio.run`, which waits for its end, would never return.
"""

from __future__ import annotations

import asyncio


async def wait_and_clear(event: asyncio.Event, seconds: float | None) -> None:
    """Return once the event is set or so many seconds have passed. Clear the event in either case."""
    timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        if timer is not None:
            timer.cancel()
    event.clear()
