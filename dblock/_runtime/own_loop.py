"""Run a coroutine in an event loop of its own, which ends with it: in any thread, also while Python exits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _OwnLoop(asyncio.SelectorEventLoop):
    """A loop with one task. psycopg cannot use the loop that asyncio.run makes on Windows."""

    async def getaddrinfo(self, *args: Any, **options: Any) -> Any:
        """Look an address up in this thread, because another one cannot be started while Python exits."""
        return socket.getaddrinfo(*args, **options)


def run_in_own_loop(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run the coroutine that `make` returns, and return its result."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(make)
    # A client that is garbage-collected in its event loop: no other loop can run in that thread.
    from concurrent.futures import ThreadPoolExecutor  # not above, because it cannot be imported while Python exits

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_run, make).result()


def _run(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    loop = _OwnLoop()
    try:
        return loop.run_until_complete(make())
    finally:
        loop.close()
