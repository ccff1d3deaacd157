"""What a real client does in threads and tasks of its own, done on the test's clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dblock._core.effects import Flow, Sleep
from dblock.errors import DblockError
from dblock.testing.memory.client_clock import MemoryClientClock


class Background:
    """Runs flows of calls and sleeps, from one event of the clock to the next."""

    def __init__(self, client_clock: MemoryClientClock, perform: Callable[[Any], Any]) -> None:
        self._client_clock = client_clock
        self._perform = perform

    def __call__(self, flow: Flow[None]) -> None:
        """Run a flow until it sleeps, and continue it when the clock reaches the end of the sleep."""
        later = self._client_clock.clock.call_later
        if self._client_clock.least_pause:
            later(self._client_clock.least_pause, self, flow)  # a frozen client runs nothing
            return
        try:
            effect = flow.send(None)
            while not isinstance(effect, Sleep):
                try:
                    result = self._perform(effect)
                except DblockError as error:
                    effect = flow.throw(error)
                else:
                    effect = flow.send(result)
        except StopIteration:
            return
        later(effect.seconds, self, flow)
