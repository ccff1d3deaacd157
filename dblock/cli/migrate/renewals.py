"""Renew the lease of a run, but not while its command is stopped.

A command that was stopped (SIGSTOP) may hold a transaction with locks on tables, and would keep the lease for ever if
it were renewed. Without renewals the lease expires, the command is ended, and another replica takes over.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from dblock._core import clock
from dblock.errors import DblockError, LeaseLost
from dblock.lease import Lease

TICK = 0.2
"""Seconds between two looks at the command."""


class Renewals:
    """A thread that renews a lease for as long as the body of the `with` runs."""

    def __init__(self, lease: Lease, has_stopped: Callable[[], bool]) -> None:
        self._lease = lease
        self._has_stopped = has_stopped
        self._wake = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._renew, name="dblock-migration-renewals", daemon=True)
        self._stopped_at = -math.inf

    @property
    def was_stopped(self) -> bool:
        """Whether a process of the command was seen stopped within the last ttl."""
        return clock.now() - self._stopped_at < self._lease.ttl

    def check(self) -> None:
        """Ask the database now, because the lease may have been lost."""
        self._wake.set()

    def __enter__(self) -> Renewals:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        self._wake.set()
        self._thread.join()

    def _renew(self) -> None:
        due = clock.now() + self._lease.ttl / 3
        while not self._over and self._lease.remaining():
            asked = self._wake.wait(TICK)
            self._wake.clear()
            if self._has_stopped():
                self._stopped_at = clock.now()
                continue
            if self._over or not (asked or clock.now() >= due):
                continue
            try:
                self._lease.renew()
                due = clock.now() + self._lease.ttl / 3
            except LeaseLost:
                return
            except DblockError:
                due = clock.now() + min(self._lease.ttl / 10, 1.0)
