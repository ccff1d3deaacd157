"""Wait until something holds: the one way to wait for what happens in another thread, task, process or session.

PATIENCE is long enough for a machine that stands still for seconds. It claims nothing about speed: a test that says how
soon something happens belongs to the second stage, and uses tests/support/machine.py.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 60.0
PAUSE = 0.01

What = str | Callable[[], str]
"""Names the condition. A function can add what it finds at the time of the failure."""


def eventually(holds: Callable[[], Any], what: What = "the condition", within: float = PATIENCE) -> Any:
    """Return the first true value of `holds`, or fail."""
    gives_up = time.monotonic() + within
    while not (found := holds()):
        assert time.monotonic() < gives_up, _failure(what, within)
        time.sleep(PAUSE)
    return found


async def eventually_async(holds: Callable[[], Any], what: What = "the condition", within: float = PATIENCE) -> Any:
    """Return the first true value of `holds`, which may be a coroutine function, or fail."""
    gives_up = time.monotonic() + within
    while True:
        found = holds()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < gives_up, _failure(what, within)
        await asyncio.sleep(PAUSE)


def _failure(what: What, within: float) -> str:
    return f"not within {within:g} s: {what if isinstance(what, str) else what()}"
