"""The database in memory with what the recipes keep in it."""

from __future__ import annotations

from typing import Any

from dblock.testing.database.deadlocks import DeadlockStore
from dblock.testing.database.elections.store import Elections
from dblock.testing.database.schedules.store import Schedules


class RecipeStore(DeadlockStore):
    """One database with one dblock in it: locks of every kind, elections and schedules."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.elections = Elections(self)
        self.schedules = Schedules(self)
