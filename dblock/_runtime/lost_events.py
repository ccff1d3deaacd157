"""The loss of a lease as an event, which a thread or a task can wait for.

The event reads the lease's state, so it reports a loss at once, whether or not anything waits for it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from datetime import datetime

from dblock._core.holds import HeldState
from dblock._core.lease_state import LeaseState, Reason
from dblock._core.options import Seconds, check_seconds
from dblock._runtime.callbacks import AsyncCallbackTimer


class _LostEventBase:
    """An event that is set when the lease is lost."""

    def __init__(self, state: LeaseState | HeldState) -> None:
        self._state = state

    def is_set(self) -> bool:
        """Return whether the lease is lost at this very moment."""
        return self._state.lost() is not None

    @property
    def reason(self) -> Reason | None:
        """Why the lease was lost; None if it was not."""
        loss = self._state.lost()
        return loss.reason if loss else None

    @property
    def last_held(self) -> datetime:
        """The last moment at which the lease was known to be held, by this machine's wall clock."""
        return self._state.last_held

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.reason or 'not set'}>"


class LostEvent(_LostEventBase):
    """The loss of a lease, as an event that a thread can wait for."""

    def __init__(self, state: LeaseState | HeldState, new_event: Callable[[], threading.Event]) -> None:
        super().__init__(state)
        self._new_event = new_event

    def wait(self, timeout: Seconds | None = None) -> bool:
        """Wait until the lease is lost and return True. Return False if the timeout or a release comes first."""
        give_up = math.inf if timeout is None else self._state.now() + check_seconds("timeout", timeout)
        ended = self._new_event()
        cancel = self._state.at_end(ended.set)
        try:
            while not self.is_set() and not self._state.over:
                now = self._state.now()
                if now >= give_up:
                    return False
                ended.wait(max(min(self._state.trusted_until, give_up) - now, 0.0))
            return self.is_set()
        finally:
            cancel()


class AsyncLostEvent(_LostEventBase):
    """The loss of a lease, as an event that a task can wait for."""

    def __init__(self, state: LeaseState | HeldState, callbacks: AsyncCallbackTimer) -> None:
        super().__init__(state)
        self._callbacks = callbacks

    async def wait(self) -> bool:
        """Wait until the lease is lost and return True. Return False if it is released first."""
        import asyncio

        ended = asyncio.Event()
        cancel = self._state.at_end(lambda: self._callbacks.in_loop(ended.set))
        try:
            while not self.is_set() and not self._state.over:
                await self._callbacks.wait_and_clear(ended, max(self._state.trusted_until - self._state.now(), 0.001))
            return self.is_set()
        finally:
            cancel()
