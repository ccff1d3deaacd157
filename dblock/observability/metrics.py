"""The metrics that come from this process: an observer that counts what its clients do.

It needs no metrics library. Use `dblock.observability.prometheus` for prometheus_client. The HTTP server writes the
same values by itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from dblock._core.observation import ObservedHold, ObservedWait, Observer
from dblock.observability import catalogue
from dblock.observability.store import Counter, Family, Groups, Histogram, family


class MetricsObserver(Observer):
    """Counts the waits, holds, renewals and losses of its clients, and the writes that fences refused in this process.

    One observer may serve several clients.
    """

    def __init__(self) -> None:
        self.groups = Groups()
        self._wait = Histogram(catalogue.ACQUIRE_WAIT)
        self._hold = Histogram(catalogue.HOLD)
        self._handoff = Histogram(catalogue.HANDOFF)
        self._lost = Counter(catalogue.LEASES_LOST)
        self._renewal = Histogram(catalogue.RENEWAL)
        self._margin = Histogram(catalogue.RENEWAL_MARGIN)
        self._refusals = Counter(catalogue.FENCE_REFUSALS)
        self._listeners: dict[str, bool] = {}
        self._lock = threading.Lock()
        _count_refusals(self)

    def wait_ended(self, wait: ObservedWait) -> None:
        """Count a wait."""
        self._wait.observe(wait.seconds, wait.outcome or "error", self.groups.of(wait.locks[0]))
        if wait.handoff is not None:
            self._handoff.observe(wait.handoff)

    def hold_ended(self, hold: ObservedHold) -> None:
        """Count a hold, and its loss if it was lost."""
        group = self.groups.of(hold.lock)
        self._hold.observe(hold.seconds, group)
        if hold.lost is not None:
            self._lost.add(hold.lost, group)

    def renewed(self, seconds: float, margins: Sequence[float]) -> None:
        """Count a renewal, and what was left of each lease."""
        self._renewal.observe(seconds)
        for margin in margins:
            self._margin.observe(margin)

    def listener_changed(self, client: str, up: bool | None) -> None:
        """Remember whether a listener is connected."""
        with self._lock:
            if up is None:
                self._listeners.pop(client, None)
            else:
                self._listeners[client] = up

    def fence_refused(self, resource: str) -> None:
        """Count a write that a fence refused."""
        self._refusals.add(self.groups.of(resource))

    def families(self) -> list[Family]:
        """Return all values as they are now."""
        counted = (*(self._wait, self._hold, self._handoff, self._lost, self._renewal, self._margin, self._refusals),)
        with self._lock:
            up = [] if not self._listeners else [((), float(all(self._listeners.values())))]
        return [*(one.family() for one in counted), family(catalogue.LISTENER_UP, up)]


def _count_refusals(observer: MetricsObserver) -> None:
    """Count refusals for as long as the observer exists."""
    from fenced_store import refusals

    known = weakref.ref(observer)

    def count(error: Any) -> None:
        found = known()
        if found is not None:
            found.fence_refused(error.resource)

    weakref.finalize(observer, refusals.observe(count)).atexit = False
