"""What the live screen knows: what was seen, what happened, and what its user wants to see of it.

Nothing here asks, reads keys or draws. The selection is of a lock and not of a line: it stays with its lock when the
order changes, and goes to the neighbour when its lock is gone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from dblock.admin.inspect import LockState
from dblock.cli.graph.waits import fitting
from dblock.cli.watch.changes import Happening, Happenings, Look, Opened, refused_by, told_by

ORDERS = ("name", "time left", "waiting", "hand-offs")
WINDOW = 10.0
"""Seconds over which hand-offs are counted."""
KEPT = 500
"""How many happenings are remembered."""
LATE = 1.5
"""Seconds beyond the interval after which an answer is said to be missing."""


class Seen:
    """The state of the screen."""

    def __init__(self, first: Look, *, database: str, interval: float, pattern: str = "*") -> None:
        self.database = database
        self.interval = interval
        self.pattern = pattern
        self.order = 0
        self.reverse = False
        self.filter = ""
        self.typing = False
        """Whether the filter is being typed."""
        self.opened: str | None = None
        self.detail: Opened | None = None
        """What is known of the opened lock, and since when."""
        self.detail_at = first.at
        self.scrolled = 0
        """How many lines of the opened lock, or of the help, are above the window."""
        self.helping = False
        self.paused_at: float | None = None
        self.trouble: str | None = None
        """Why the last look failed."""
        self.look = first
        fits = fitting(pattern)
        self._happenings = Happenings(first, fits)
        self.happened: deque[Happening] = deque(maxlen=KEPT)
        """The newest first."""
        self.handed_over: Counter[str] = Counter()
        self.refused = 0
        self._began = first.at
        self._recent: deque[float] = deque()
        self._selected: str | None = None
        self._row = 0
        earlier = [told for one in first.history if fits(one.name) and (told := told_by(one))]
        earlier += [refused_by(one) for one in first.refusals or []]
        for one in sorted(earlier, key=lambda told: told.at):
            self.happened.appendleft(one)

    def take(self, look: Look) -> None:
        """Take in a look; while paused, only of a lock that was opened meanwhile."""
        self.trouble = None
        is_new = self.detail is None or self.detail.name != self.opened
        if look.opened is not None and look.opened.name == self.opened and (is_new or self.paused_at is None):
            self.detail, self.detail_at = look.opened, look.at
        if self.paused_at is not None:
            return
        self.look = look
        for one in self._happenings.follow(look):
            self.happened.appendleft(one)
            if one.kind == "handed_over":
                self.handed_over[one.name] += 1
                self._recent.append(look.at)
            elif one.kind == "refused":
                self.refused += 1

    def fail(self, trouble: str) -> None:
        """Take in that a look has failed."""
        self.trouble = " ".join(trouble.split())

    def now(self, now: float) -> float:
        """Return the moment that is shown: while paused, the one when that began."""
        return now if self.paused_at is None else self.paused_at

    def age(self, now: float) -> float:
        """Return how old what is shown is, in seconds."""
        return max(0.0, self.now(now) - self.look.at)

    def is_late(self, now: float) -> bool:
        """Tell whether the database fails to answer."""
        return self.trouble is not None or (self.paused_at is None and self.age(now) > self.interval + LATE)

    def rate(self, now: float) -> float:
        """Return how many hand-offs there were in a second, of late."""
        now = self.now(now)
        while self._recent and self._recent[0] <= now - WINDOW:
            self._recent.popleft()
        return len(self._recent) / max(1.0, min(WINDOW, now - self._began))

    def left(self, lock: LockState, now: float) -> float:
        """Return how many seconds are left to a lock's holder, as far as is known."""
        return max(0.0, lock.remaining - self.age(now))

    def rows(self) -> list[LockState]:
        """Return the locks that are to be shown, in order."""
        fits = self._filtering()
        locks = [lock for lock in self.look.locks if fits(lock.name)]
        keys: dict[str, Callable[[LockState], Any]] = {
            "name": lambda lock: 0,
            "time left": lambda lock: lock.remaining,
            "waiting": lambda lock: -lock.waiting,
            "hand-offs": lambda lock: -self.handed_over[lock.name],
        }
        key = keys[ORDERS[self.order]]
        return sorted(locks, key=lambda lock: (key(lock), lock.name), reverse=self.reverse)

    def _filtering(self) -> Callable[[str], object]:
        """Return the test for names: what was typed is a part of the name, in which * and ? stand for others."""
        return fitting(f"*{self.filter}*", ignore_case=True) if self.filter else lambda name: True

    def selected(self, rows: list[LockState]) -> int:
        """Return the row that is selected, -1 where there is none; what was selected by name is found again."""
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
        """Open the lock that is selected."""
        rows = self.rows()
        if rows:
            self.opened = self._selected = rows[self.selected(rows)].name
            self.scrolled = 0

    def pause(self, now: float) -> None:
        """Stand still, or go on."""
        self.paused_at = now if self.paused_at is None else None
