"""An observer of an election in a simulated process: the shipped flow reads the log, across every fault.

Now and then it starts again from what it saw last, as a program does that was restarted.
"""

from __future__ import annotations

from typing import Any

from dblock._core.effects import Flow, Sleep
from dblock.errors import DatabaseError
from dblock.recipes.elections.flows import ElectionFlows, Position
from dblock.recipes.elections.records import ElectionOptions, Leader, Vacancy
from tests.robustness.simulation.client import Client
from tests.robustness.simulation.process import Cancelled, Task

RESTARTS = 0.1
"""The share of events after which an observer starts again."""


class Observer:
    """A thread that observes an election."""

    def __init__(self, client: Client, name: str, options: ElectionOptions, since: int | None) -> None:
        self.client = client
        self.thread = name
        self.since = since
        self.seen: list[Leader | Vacancy] = []
        self.done = False
        self.hurries = False
        """Whether it pauses until it is asked to look for the last time."""
        self._flows = ElectionFlows(client.flows, "dblock", options)
        self._position = Position(since)
        self._task = Task(client, self._going(), self._ended)

    def cancel(self) -> None:
        """Do nothing: an observer is restarted at other moments."""

    def look_again(self) -> None:
        """Read the log once more."""
        self.done = False
        self._task = Task(self.client, self._look(), self._ended)

    def _ended(self, result: Any) -> None:
        if isinstance(result, BaseException) and not isinstance(result, Cancelled):
            raise result
        self.done = True

    def _going(self) -> Flow[None]:
        while not self.hurries:
            yield from self._look()

    def _look(self) -> Flow[None]:
        world = self.client.world
        try:
            found = yield from self._flows.next_events(self._position, world.random.choice([0.3, 1.0]))
        except DatabaseError:
            yield Sleep(0.1)
            return
        for event in found:
            self._position.passed(event)
            self.seen.append(event)
            if world.tracing:
                world.say(self.thread, f"sees {event}")
            if world.chance(RESTARTS):
                since = event.token if isinstance(event, Leader) and world.chance(0.5) else event
                self._position = Position(since)
