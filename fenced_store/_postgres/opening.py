"""Open a connection of an AsyncEngine for a caller that may be cancelled before it is open.

Guarantee: no connection is left to the garbage collector. SQLAlchemy leaves one there, with a warning, if the
cancellation meets it in certain steps: while it checks a new connection, or sets its isolation level.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Imported only where it is needed, because it imports the whole ORM.
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

_closing: set[asyncio.Future[None]] = set()
"""What closes connections in the background. The event loop itself keeps only weak references."""


def in_background(closing: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
    """Close a connection in a task of its own, which ends even if its caller does not wait for it."""
    task = asyncio.ensure_future(closing)
    _closing.add(task)
    task.add_done_callback(_closing.discard)
    return task


async def _nothing() -> None:
    pass


async def opened(engine: AsyncEngine, then: Callable[[], Awaitable[None]] = _nothing) -> AsyncConnection:
    """Open a connection. If the caller is cancelled before that, the connection is closed once it is open.

    `then` is called after such a connection was closed.
    """
    opening = asyncio.ensure_future(engine.connect().start())
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        in_background(_close_unused(opening, then))
        raise


async def _close_unused(opening: asyncio.Future[AsyncConnection], then: Callable[[], Awaitable[None]]) -> None:
    await asyncio.wait([opening])
    if not opening.cancelled() and opening.exception() is None:
        await opening.result().close()
        await then()
