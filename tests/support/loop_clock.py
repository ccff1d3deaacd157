"""The clock of an event loop, for tests of what is due later."""

from __future__ import annotations

import asyncio


def pass_time(seconds: float) -> None:
    """Move the clock of the running loop ahead: what is due within this time is due now."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]
