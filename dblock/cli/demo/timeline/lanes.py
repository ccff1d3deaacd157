"""The story of `dblock demo` as a timeline: events become lanes, one for each worker, to be drawn as text or as SVG.

This knows no database, no terminal and no file. What it makes has everything at its time and in no place yet; where
things go is a matter of who draws them. Text in it is another's until it was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dblock.cli.demo.events import Event

WAITING, HELD, FROZEN, ASLEEP = "waiting", "held", "frozen", "asleep"
"""What a bar shows: in line; the lock is held; held by a process that is frozen; frozen when its lease is over."""

MARKS = {
    "tried": "has to wait",
    "renewed": "renews",
    "read": "reads {}",
    "stored": "writes {}",
    "corrupted": "writes {}",
    "refused": "writes {}: refused",
    "killed": "kill -9",
}
"""The kinds of events that have a mark in the lane, and what is written beside it."""

LEGEND = {
    HELD: "holds the lock, under this token",
    FROZEN: "frozen, holding the lock",
    ASLEEP: "frozen, its lease is over",
    WAITING: "waits in line",
    "tried": "asks, and is told who has it",
    "read": "reads the balance",
    "stored": "writes, stored",
    "corrupted": "writes, and undoes a deposit",
    "refused": "writes, refused by the fence",
    "renewed": "renews its lease",
    "killed": "killed",
}
"""What each kind of bar and mark means, in the order in which they are explained."""


@dataclass
class Bar:
    """A stretch of time in which a worker was in one state."""

    start: float
    end: float
    state: str
    token: int | None = None


@dataclass(frozen=True)
class Mark:
    """A moment at which a worker did something, or something was done to it."""

    at: float
    kind: str
    label: str


@dataclass
class Lane:
    """One worker, along the time."""

    name: str
    bars: list[Bar] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


@dataclass
class Panel:
    """One act: its lanes, and what it came to."""

    title: str
    start: float
    end: float
    lanes: list[Lane]
    sums: str = ""
    good: bool | None = None
    """Whether the books add up; None where none were kept."""

    def part(self, at: float) -> float:
        """Return how much of the panel's time has passed at a moment, from 0 to 1."""
        return min(max((at - self.start) / ((self.end - self.start) or 1.0), 0.0), 1.0)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Return round moments within the panel, at most so many, and how they are written."""
        for step in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0):
            first = -(-self.start // step)
            found: list[float] = []
            while (at := round((first + len(found)) * step, 3)) <= self.end:
                found.append(at)
            if len(found) <= max(most, 2):
                return [(at, f"{at:.1f}" if step < 1 else f"{at:.0f}") for at in found]
        return []


def panels(events: Sequence[Event]) -> list[Panel]:
    """Make a panel of each act, in order."""
    acts: dict[str, list[Event]] = {}
    for event in events:
        acts.setdefault(event.act, []).append(event)
    return [_panel(title, told) for title, told in acts.items() if any(event.who for event in told)]


def states(drawn: Sequence[Panel]) -> list[str]:
    """Return the kinds of bars and marks that occur, in the order of the legend."""
    lanes = [lane for panel in drawn for lane in panel.lanes]
    found = {bar.state for lane in lanes for bar in lane.bars} | {mark.kind for lane in lanes for mark in lane.marks}
    return [kind for kind in LEGEND if kind in found]


def _panel(title: str, events: Sequence[Event]) -> Panel:
    lived = [event for event in events if event.who and event.kind != "here"]
    start, end = min(event.at for event in lived), max(event.at for event in lived)
    lanes: dict[str, Lane] = {}
    for name in sorted({event.who for event in events if event.who}):
        lanes[name] = _lane(name, [event for event in lived if event.who == name], end)
    # A little longer, so that what happens last is not on the edge.
    panel = Panel(title, start, end + (end - start) / 40, list(lanes.values()))
    for event in events:
        if event.kind == "sums":
            panel.sums, panel.good = event.text, event.amount == event.due
    return panel


def _lane(name: str, events: Sequence[Event], end: float) -> Lane:
    lane = Lane(name)
    state: str | None = None
    since, token = 0.0, None

    def turn(at: float, into: str | None) -> None:
        nonlocal state, since
        if state is not None and at > since:
            lane.bars.append(Bar(since, at, state, token if state in (HELD, FROZEN) else None))
        state, since = into, at

    for event in sorted(events, key=lambda one: one.at):
        if event.kind == "waits":
            turn(event.at, WAITING)
        elif event.kind == "held":
            turn(event.at, HELD)
            token = event.token
        elif event.kind == "frozen":
            turn(event.at, FROZEN if state == HELD else ASLEEP)
        elif event.kind == "expired":
            turn(event.at, ASLEEP if state == FROZEN else None)
        elif event.kind in ("woken", "released", "killed"):
            turn(event.at, None)
        if event.kind in MARKS:
            label = MARKS[event.kind].format("" if event.amount is None else event.amount).strip()
            lane.marks.append(Mark(event.at, event.kind, label))
    turn(end, None)
    return lane
