"""The event that a lease was lost: to look at, or to wait for."""

from __future__ import annotations

import math
import threading
from datetime import datetime

from dblock._core import clock
from dblock._core.lease_state import LeaseState, Reason
from dblock._core.options import Seconds, check_seconds
from dblock._runtime.callbacks import AsyncCallbackTimer


class LostEventBase:
    """An event that is set when the lease is lost."""

    def __init__(self, state: LeaseState) -> None:
        self._state = state

    def is_set(self) -> bool:
        """Tell whether the lease is lost, as of this very moment."""
        return self._state.lost() is not None

    @property
    def reason(self) -> Reason | None:
        """Why it was lost; None if it was not."""
        loss = self._state.lost()
        return loss.reason if loss else None

    @property
    def last_held(self) -> datetime:
        """The last moment at which it was known to be held, by this machine's wall clock."""
        return self._state.last_held

    def __repr__(self) -> str:
        return f"<Lost {self.reason or 'not'}>"


class LostEvent(LostEventBase):
    """An event that a thread can wait for."""

    def wait(self, timeout: Seconds | None = None) -> bool:
        """Wait until the lease is lost: True. False when the timeout passes, or the lease is released, first."""
        give_up = math.inf if timeout is None else clock.now() + check_seconds("timeout", timeout)
        ended = threading.Event()
        forget = self._state.at_end(ended.set)
        try:
            while not self.is_set() and not self._state.over:
                now = clock.now()
                if now >= give_up:
                    return False
                ended.wait(max(min(self._state.trusted_until, give_up) - now, 0.0))
            return self.is_set()
        finally:
            forget()


class AsyncLostEvent(LostEventBase):
    """An event that a task can wait for."""

    def __init__(self, state: LeaseState, watch: AsyncCallbackTimer) -> None:
        super().__init__(state)
        self._callbacks = watch

    async def wait(self) -> bool:
        """Wait until the lease is lost: True. False when it is released first."""
        import asyncio

        from dblock._runtime.asyncio_compat import wait_and_clear

        ended = asyncio.Event()
        forget = self._state.at_end(lambda: self._callbacks.in_loop(ended.set))
        try:
            while not self.is_set() and not self._state.over:
                await wait_and_clear(ended, max(self._state.trusted_until - clock.now(), 0.001))
            return self.is_set()
        finally:
            forget()
