"""An observer that records every event."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from dblock.observability import ObservedHold, ObservedWait, Observer


class Recorder(Observer):
    """Keeps the ended waits and holds, and the names of all events in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.waits: list[ObservedWait] = []
        self.holds: list[ObservedHold] = []
        self.margins: list[float] = []
        self.renewals: list[float] = []
        self.listeners: list[bool | None] = []
        self.threads: dict[str, int] = {}

    def _note(self, event: str) -> None:
        self.events.append(event)
        self.threads[event] = threading.get_ident()

    def wait_began(self, wait: ObservedWait) -> None:
        self._note("wait_began")
        assert wait.outcome is None

    def wait_ended(self, wait: ObservedWait) -> None:
        self._note("wait_ended")
        self.waits.append(wait)

    def hold_began(self, hold: ObservedHold) -> None:
        self._note("hold_began")

    def hold_ended(self, hold: ObservedHold) -> None:
        self._note("hold_ended")
        self.holds.append(hold)

    def renewed(self, seconds: float, margins: Sequence[float]) -> None:
        self.renewals.append(seconds)
        self.margins.extend(margins)

    def listener_changed(self, client: str, up: bool | None) -> None:
        self.listeners.append(up)

    @property
    def outcomes(self) -> list[str | None]:
        """The outcomes of the waits, in order."""
        return [wait.outcome for wait in self.waits]

    @property
    def losses(self) -> list[str | None]:
        """For each hold the reason of its loss, None if it was released."""
        return [hold.lost for hold in self.holds]
