"""The database server: the store, its disk and its standbys. It may crash or be restarted, and a standby be promoted.

A planned restart forgets nothing, but no presence from before it counts afterwards. A crash forgets what was not
flushed: asynchronous commits. A promotion forgets what the standby had not received, synchronous commits included.
After a promotion another standby may be promoted that never received anything from the first one, or the old primary,
which was only frozen, may return. Both forget all that was committed in between.

All nodes have the same clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dblock._core.listener_failures import ServerState
from dblock.testing.database.fence import Fence
from dblock.testing.database.recipes import RecipeStore
from dblock.testing.database.tables import Tables
from tests.robustness.simulation.world import World

T = TypeVar("T")

MINTED_AHEAD = 32
"""How many tokens the disk records before they are minted. A crash skips those."""


class Database:
    """One server."""

    def __init__(self, world: World, store: RecipeStore, fence: Fence, mortal: bool) -> None:
        self.world = world
        self.store = store
        self.fence = fence
        self.up = True
        self.state = ServerState.UNKNOWN
        """What it replies to new connections. While that is unknown, it accepts them if it is up.

        A server that shuts down may be up, and let its sessions continue until they end: a smart shutdown.
        """
        self.mortal = mortal
        """Whether it may crash or be replaced. Then the contents of each disk matter."""
        self.caller: object = None
        """The process whose statement is executed."""
        self.promoted_at = -1.0
        self._flushed = store.tables.copy()
        self._received = store.tables.copy()
        self._starts = store.incarnation
        self._sibling: Tables | None = None
        """The contents of a standby that has received nothing since the last promotion."""
        self._frozen: tuple[Tables, int] | None = None
        """The contents and the start of the server before the last promotion."""

    @property
    def accepts(self) -> bool:
        """Whether it accepts new connections."""
        return self.up and self.state is ServerState.UNKNOWN

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

    def restart(self) -> None:
        """End all sessions and start again, as an administrator plans it: everything is on disk."""
        self.flush()
        self._start_again()

    def crash(self) -> None:
        """Forget what was not flushed, and end all sessions."""
        sequence = max(self._flushed.sequence, self.store.tables.sequence)
        self.store.tables = self._flushed.copy()
        self.store.tables.sequence = sequence + self.world.random.randrange(MINTED_AHEAD)
        self._sibling = self._frozen = None
        self._start_without_unlogged()

    def promote(self) -> None:
        """Continue with the standby."""
        self._frozen = self.store.tables.copy(), self.store.incarnation
        self._sibling = self._received.copy()
        self._continue_with(self._received)

    @property
    def was_promoted(self) -> bool:
        """Whether there is a standby that has received nothing since a promotion, and a server that was replaced."""
        return self._sibling is not None

    def promote_sibling(self) -> None:
        """Continue with a standby that has received nothing since the last promotion."""
        assert self._sibling is not None
        self._continue_with(self._sibling)

    def flip_back(self) -> None:
        """Continue with the server that was replaced, which was only frozen."""
        assert self._frozen is not None
        tables, start = self._frozen
        self._continue_with(tables)
        self.store.incarnation = start

    def _continue_with(self, tables: Tables) -> None:
        self.store.tables = tables.copy()
        self.promoted_at = self.world.now
        self._start_without_unlogged()
        self.flush()

    def _start_without_unlogged(self) -> None:
        self.store.marks.clear()
        self.store.queues.clear()
        self._start_again()

    def _start_again(self) -> None:
        self._starts += 1
        self.store.incarnation = self._starts
        self.store.sessions.clear()
