"""Time, randomness and the order of events in one simulated run.

There is one clock, one queue of events, and one source of random numbers that starts from the seed. Nothing here uses
real time or starts a thread, so a seed gives the same story each time.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from typing import Any


class Violation(Exception):
    """Something that must hold does not."""

    def __init__(self, check: str, what: str) -> None:
        self.check = check
        """The check that found it."""
        super().__init__(f"{check}: {what}")


class BodyFailed(Exception):
    """What a body raises that is meant to fail."""


class World:
    """The queue of events, and the story so far."""

    def __init__(self, seed: int, tracing: bool = False) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.tracing = tracing
        self.story: list[str] = []
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = 0
        self._names = 0

    def after(self, seconds: float, act: Callable[..., object], *args: Any) -> None:
        """Call a function so many seconds from now."""
        self._order += 1
        heapq.heappush(self._queue, (self.now + seconds, self._order, act, args))

    def run(self, until: float, each: Callable[[], object]) -> None:
        """Let time pass until that moment, or until the queue is empty. Call `each` after every step."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, act, args = heapq.heappop(queue)
            self.steps += 1
            act(*args)
            each()
        self.now = max(self.now, until)

    def name(self) -> str:
        """Return a new name for an attempt, a client or a presence: a UUID to Postgres."""
        self._names += 1
        return f"{self._names:032x}"

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.random.random() < probability

    def say(self, who: str, what: str) -> None:
        """Add a line to the story. Check `tracing` first, because composing a line takes time."""
        self.story.append(f"{self.now:10.4f}  {who:<12} {what}")

    def digest(self) -> str:
        """Return a short hash of the story, to compare two stories."""
        return hashlib.sha256("\n".join(self.story).encode()).hexdigest()[:16]


def short(name: str | None) -> str:
    """Return a name as the story shows it."""
    return "-" if name is None else f"#{int(name, 16)}"
