"""The database in memory with what the recipes keep in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dblock.testing.database.barriers.store import Barriers
from dblock.testing.database.deadlocks import DeadlockStore
from dblock.testing.database.elections.store import Elections
from dblock.testing.database.schedules.store import Schedules


class RecipeStore(DeadlockStore):
    """One database with one dblock in it: locks of every kind, elections, schedules, barriers and latches."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.elections = Elections(self)
        self.schedules = Schedules(self)
        self.barriers = Barriers(self)

    # Waiters at barriers and latches leave as those of locks do, and count as tickets.

    def abandon(self, name: str, attempt: str, only_ticket: bool = False) -> bool:
        left = self.barriers.leave([attempt])
        return super().abandon(name, attempt, only_ticket) or left

    def leave_queue(self, client: str, presence: str | None = None, keep: frozenset[str] = frozenset()) -> None:
        super().leave_queue(client, presence, keep)
        self.barriers.leave_queue(client, keep)

    def heartbeat(self, client: str, names: Iterable[str]) -> tuple[int, list[tuple[str, float, bool]]]:
        places, firsts = super().heartbeat(client, names)
        waiting = list(self.barriers.heartbeat(client))
        over = [(attempt, 0.0, False) for attempt, is_over in waiting if is_over]
        return places + len(waiting), over + firsts
