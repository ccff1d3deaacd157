"""The state of the live screen: the last snapshot, the changes so far, and the user's view of them.

Nothing here queries, reads keys or draws. The user selects a lock, not a row: the selection follows its lock when the
order changes, and moves to the neighbour when its lock is gone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from dblock.admin.graph.waits import name_matcher
from dblock.admin.inspect import LockState
from dblock.cli.watch.changes import Change, ChangeTracker, LockDetail, Snapshot, change_from_event, change_from_refusal

ORDERS = ("name", "time left", "waiting", "hand-offs")
WINDOW = 10.0
"""Seconds over which the rate of hand-offs is computed."""
MAX_CHANGES = 500
"""The number of changes to keep, at most."""
LATE_AFTER = 1.5
"""Seconds beyond the interval after which the screen reports that the database does not reply."""


class ScreenState:
    """The state of the screen."""

    def __init__(self, first: Snapshot, *, database: str, interval: float, pattern: str = "*") -> None:
        self.database = database
        self.interval = interval
        self.pattern = pattern
        self.order = 0
        self.reverse = False
        self.filter = ""
        self.typing = False
        """Whether the filter is being typed."""
        self.opened: str | None = None
        self.detail: LockDetail | None = None
        """The details of the opened lock; `detail_at` is when they were read."""
        self.detail_at = first.at
        self.scrolled = 0
        """The number of lines of the opened lock, or of the help, that are scrolled out at the top."""
        self.show_help = False
        self.paused_at: float | None = None
        self.error: str | None = None
        """Why the last poll failed; None if it succeeded."""
        self.snapshot = first
        matches = name_matcher(pattern)
        self._tracker = ChangeTracker(first, matches)
        self.changes: deque[Change] = deque(maxlen=MAX_CHANGES)
        """The newest first."""
        self.handed_over: Counter[str] = Counter()
        self.refused = 0
        self._started_at = first.at
        self._recent: deque[float] = deque()
        self._selected: str | None = None
        self._row = 0
        earlier = [change for event in first.history if matches(event.name) and (change := change_from_event(event))]
        earlier += [change_from_refusal(event) for event in first.refusals or []]
        for event in sorted(earlier, key=lambda change: change.at):
            self.changes.appendleft(event)

    def update(self, snapshot: Snapshot) -> None:
        """Show the next snapshot. While paused, take only the details of a lock that was opened since."""
        self.error = None
        is_new = self.detail is None or self.detail.name != self.opened
        if snapshot.opened is not None and snapshot.opened.name == self.opened and (is_new or self.paused_at is None):
            self.detail, self.detail_at = snapshot.opened, snapshot.at
        if self.paused_at is not None:
            return
        self.snapshot = snapshot
        for event in self._tracker.update(snapshot):
            self.changes.appendleft(event)
            if event.kind == "handed_over":
                self.handed_over[event.name] += 1
                self._recent.append(snapshot.at)
            elif event.kind == "refused":
                self.refused += 1

    def record_failure(self, error: str) -> None:
        """Record why a poll failed."""
        self.error = " ".join(error.split())

    def now(self, now: float) -> float:
        """Return the moment that the screen shows: the start of the pause, or now."""
        return now if self.paused_at is None else self.paused_at

    def age(self, now: float) -> float:
        """Return the age of the snapshot in seconds."""
        return max(0.0, self.now(now) - self.snapshot.at)

    def is_late(self, now: float) -> bool:
        """Return whether the last poll failed or its reply is overdue."""
        return self.error is not None or (self.paused_at is None and self.age(now) > self.interval + LATE_AFTER)

    def rate(self, now: float) -> float:
        """Return the recent number of hand-offs per second."""
        now = self.now(now)
        while self._recent and self._recent[0] <= now - WINDOW:
            self._recent.popleft()
        return len(self._recent) / max(1.0, min(WINDOW, now - self._started_at))

    def left(self, lock: LockState, now: float) -> float:
        """Return the seconds until a lock's deadline, as far as the snapshot tells."""
        return max(0.0, lock.remaining - self.age(now))

    def rows(self) -> list[LockState]:
        """Return the locks to show, in order."""
        matches = self._name_filter()
        locks = [lock for lock in self.snapshot.locks if matches(lock.name)]
        keys: dict[str, Callable[[LockState], Any]] = {
            "name": lambda lock: 0,
            "time left": lambda lock: lock.remaining,
            "waiting": lambda lock: -lock.waiting,
            "hand-offs": lambda lock: -self.handed_over[lock.name],
        }
        key = keys[ORDERS[self.order]]
        return sorted(locks, key=lambda lock: (key(lock), lock.name), reverse=self.reverse)

    def _name_filter(self) -> Callable[[str], object]:
        """Return the test for names: the typed text must be part of the name, with * and ? as wildcards."""
        return name_matcher(f"*{self.filter}*", ignore_case=True) if self.filter else lambda name: True

    def selected(self, rows: list[LockState]) -> int:
        """Return the selected row, found by the lock's name; -1 if there are no rows."""
        if not rows:
            return -1
        for number, lock in enumerate(rows):
            if lock.name == self._selected:
                self._row = number
                return number
        self._row = min(self._row, len(rows) - 1)
        return self._row

    def move(self, by: int) -> None:
        """Move the selection."""
        rows = self.rows()
        if rows:
            self._row = max(0, min(len(rows) - 1, self.selected(rows) + by))
            self._selected = rows[self._row].name

    def open(self) -> None:
        """Open the selected lock."""
        rows = self.rows()
        if rows:
            self.opened = self._selected = rows[self.selected(rows)].name
            self.scrolled = 0

    def pause(self, now: float) -> None:
        """Pause, or continue after a pause."""
        self.paused_at = now if self.paused_at is None else None
