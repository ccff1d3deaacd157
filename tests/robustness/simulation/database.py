"""The database server: the store, its disk and its standby. It may crash, and the standby may be promoted.

A crash forgets what was not flushed: asynchronous commits. A promotion forgets what the standby had not received,
synchronous commits included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tests.robustness.simulation.fence import Fence
from tests.robustness.simulation.store import Store
from tests.robustness.simulation.world import World

T = TypeVar("T")

MINTED_AHEAD = 32
"""How many tokens the disk records before they are minted. A crash skips those."""


class Database:
    """One server."""

    def __init__(self, world: World, store: Store, fence: Fence, mortal: bool) -> None:
        self.world = world
        self.store = store
        self.fence = fence
        self.up = True
        self.mortal = mortal
        """Whether it may crash or be replaced. Then the contents of each disk matter."""
        self.promoted_at = -1.0
        self._flushed = store.tables.copy()
        self._received = store.tables.copy()

    def call(self, session: int | None, act: Callable[[], T]) -> T:
        """Run a function in one transaction."""
        store = self.store
        store.session, store.durable = session, False
        try:
            return act()
        finally:
            if store.durable and self.mortal:
                self.flush()
            store.session, store.durable = None, False

    def flush(self) -> None:
        """Write all commits to the disk."""
        self._flushed = self.store.tables.copy()

    def replicate(self) -> None:
        """Send the contents of the disk to the standby."""
        self._received = self._flushed.copy()

    def crash(self) -> None:
        """Forget what was not flushed, and end all sessions."""
        sequence = max(self._flushed.sequence, self.store.tables.sequence)
        self.store.tables = self._flushed.copy()
        self.store.tables.sequence = sequence + self.world.random.randrange(MINTED_AHEAD)
        self._restart()

    def promote(self) -> None:
        """Continue with the standby, on a timeline of its own."""
        self.store.tables = self._received.copy()
        self.store.timeline += 1
        self.promoted_at = self.world.now
        self._restart()
        self.flush()

    def _restart(self) -> None:
        self.store.incarnation += 1
        self.store.marks.clear()
        self.store.queues.clear()
        self.store.sessions.clear()
