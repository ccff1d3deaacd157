"""Turn the events of `dblock demo` into a timeline: one lane for each worker, to be drawn as text or as SVG.

Nothing here uses a database, a terminal or a file. Bars and marks have times but no positions: the modules that draw
them decide on those, and escape the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dblock.cli.demo.events import Event

WAITING, HELD, FROZEN, ASLEEP = "waiting", "held", "frozen", "asleep"
"""The states of a bar: in the queue; holding the lock; holding it while frozen; frozen after its lease has ended."""

MARKS = {
    "tried": "has to wait",
    "renewed": "renews",
    "read": "reads {}",
    "stored": "writes {}",
    "corrupted": "writes {}",
    "refused": "writes {}: refused",
    "killed": "kill -9",
}
"""The kinds of events that have a mark in the lane, and the mark's label."""

LEGEND = {
    HELD: "holds the lock (number of the grant)",
    FROZEN: "frozen, holding the lock",
    ASLEEP: "frozen, its lease has expired",
    WAITING: "waits in the queue",
    "tried": "tries once, does not get it",
    "read": "reads the balance",
    "stored": "writes, stored",
    "corrupted": "writes, and undoes a deposit",
    "refused": "writes, refused by the fence",
    "renewed": "renews its lease",
    "killed": "killed",
}
"""The meaning of each bar and mark, in the order of the legend."""


@dataclass
class Bar:
    """A span of time in which a worker was in one state."""

    start: float
    end: float
    state: str
    grant: int | None = None
    """The number of the grant in this story. A token is too long for a bar."""


@dataclass(frozen=True)
class Mark:
    """A moment at which something happened to a worker or by it."""

    at: float
    kind: str
    label: str


@dataclass
class Lane:
    """One worker's bars and marks."""

    name: str
    bars: list[Bar] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


@dataclass
class Panel:
    """One act: its lanes and its result."""

    title: str
    start: float
    end: float
    lanes: list[Lane]
    sums: str = ""
    good: bool | None = None
    """Whether the books add up; None for an act without a ledger."""

    def part(self, at: float) -> float:
        """Return the position of a moment in the panel's time, from 0 to 1."""
        return min(max((at - self.start) / ((self.end - self.start) or 1.0), 0.0), 1.0)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Return round moments within the panel with their labels, at most this many."""
        for step in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0):
            first = -(-self.start // step)
            found: list[float] = []
            while (at := round((first + len(found)) * step, 3)) <= self.end:
                found.append(at)
            if len(found) <= max(most, 2):
                return [(at, f"{at:.1f}" if step < 1 else f"{at:.0f}") for at in found]
        return []


def panels(events: Sequence[Event]) -> list[Panel]:
    """Return a panel for each act, in order."""
    acts: dict[str, list[Event]] = {}
    for event in events:
        acts.setdefault(event.act, []).append(event)
    tokens = sorted({event.token for event in events if event.kind == "held" and event.token is not None})
    grants = {token: number for number, token in enumerate(tokens, 1)}
    return [_panel(title, told, grants) for title, told in acts.items() if any(event.worker for event in told)]


def states(drawn: Sequence[Panel]) -> list[str]:
    """Return the kinds of bars and marks that occur, in the order of the legend."""
    lanes = [lane for panel in drawn for lane in panel.lanes]
    found = {bar.state for lane in lanes for bar in lane.bars} | {mark.kind for lane in lanes for mark in lane.marks}
    return [kind for kind in LEGEND if kind in found]


def _panel(title: str, events: Sequence[Event], grants: Mapping[int, int]) -> Panel:
    lived = [event for event in events if event.worker and event.kind != "here"]
    start, end = min(event.at for event in lived), max(event.at for event in lived)
    lanes: dict[str, Lane] = {}
    for name in sorted({event.worker for event in events if event.worker}):
        lanes[name] = _lane(name, [event for event in lived if event.worker == name], end, grants)
    # A little longer, so that the last event is not at the edge.
    panel = Panel(title, start, end + (end - start) / 40, list(lanes.values()))
    for event in events:
        if event.kind == "sums":
            panel.sums, panel.good = event.text, event.amount == event.due
    return panel


def _lane(name: str, events: Sequence[Event], end: float, grants: Mapping[int, int]) -> Lane:
    lane = Lane(name)
    state: str | None = None
    since, grant = 0.0, None

    def turn(at: float, into: str | None) -> None:
        nonlocal state, since
        if state is not None and at > since:
            lane.bars.append(Bar(since, at, state, grant if state in (HELD, FROZEN) else None))
        state, since = into, at

    for event in sorted(events, key=lambda one: one.at):
        if event.kind == "waits":
            turn(event.at, WAITING)
        elif event.kind == "held":
            turn(event.at, HELD)
            grant = None if event.token is None else grants[event.token]
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
