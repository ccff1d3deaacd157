"""What asyncio lacks: a wait for an event with a timeout, and an error that tells users of other loops what to do.

Guarantee: a task that is cancelled during the wait is cancelled. `asyncio.wait_for` does not promise that before Python
3.12: a cancellation that comes together with the event is lost. A task with an endless loop would then continue, and
`asyncio.run`, which waits for its end, would never return.
"""

from __future__ import annotations

import asyncio

from dblock.errors import DblockError


async def wait_and_clear(event: asyncio.Event, seconds: float | None) -> None:
    """Return once the event is set or so many seconds have passed. Clear the event in either case."""
    timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        if timer is not None:
            timer.cancel()
    event.clear()


def not_in_asyncio() -> DblockError:
    """Return the error for a call that no event loop of asyncio runs."""
    return DblockError(
        "An asynchronous client needs asyncio, and no event loop of asyncio runs this call. Under trio, use a Client "
        "in a thread. In tests with anyio, let the fixture anyio_backend return 'asyncio'."
    )
