"""The event that a lease was lost: to look at, or to wait for."""

from __future__ import annotations

import contextlib
import threading
from datetime import datetime

from dblock import clock
from dblock.hold import Hold, Reason
from dblock.terms import Seconds, check_seconds


class Lost:
    """An event that is set when the lease is lost."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold

    def is_set(self) -> bool:
        """Tell whether the lease is lost, as of this very moment."""
        return self._hold.lost() is not None

    @property
    def reason(self) -> Reason | None:
        """Why it was lost; None if it was not."""
        loss = self._hold.lost()
        return loss.reason if loss else None

    @property
    def last_held(self) -> datetime:
        """The last moment at which it was known to be held, by this machine's wall clock."""
        return self._hold.last_held

    def __repr__(self) -> str:
        return f"<Lost {self.reason or 'not'}>"


class ThreadLost(Lost):
    """An event that a thread can wait for."""

    def wait(self, timeout: Seconds | None = None) -> bool:
        """Wait until the lease is lost: True. False when the timeout passes, or the lease is released, first."""
        ended = threading.Event()
        self._hold.at_end(ended.set)
        give_up = None if timeout is None else clock.now() + check_seconds("timeout", timeout)
        while not self.is_set() and not self._hold.over:
            left = self._hold.trusted_until - clock.now()
            if give_up is not None:
                if clock.now() >= give_up:
                    return False
                left = min(left, give_up - clock.now())
            ended.wait(max(left, 0.0))
        return self.is_set()


class TaskLost(Lost):
    """An event that a task can wait for."""

    async def wait(self) -> bool:
        """Wait until the lease is lost: True. False when it is released first."""
        import asyncio

        ended = asyncio.Event()
        self._hold.at_end(ended.set)
        while not self.is_set() and not self._hold.over:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ended.wait(), max(self._hold.trusted_until - clock.now(), 0.001))
        return self.is_set()
