"""The history of a lock as a timeline: a bar for each grant, a mark for each event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WIDTH = 960.0
ENDS = {"released", "expired", "died", "forced_now"}

LABELS = {
    "granted": "granted",
    "released": "released",
    "expired": "expired",
    "died": "holder died",
    "forced": "told to release",
    "forced_now": "freed by force",
}
"""Each event, as the pages name it."""


@dataclass(frozen=True)
class Bar:
    """A grant: from its beginning, if that is known, to its end."""

    x: float
    width: float
    token: int | None
    holder: str | None
    how: str
    """How it ended, or `now` if it is held."""
    open_start: bool
    """Whether it began before what the history shows."""


@dataclass(frozen=True)
class Mark:
    """An event."""

    x: float
    event: str
    label: str
    token: int | None


@dataclass(frozen=True)
class Timeline:
    """What to draw. Every x is between 0 and WIDTH."""

    bars: list[Bar]
    marks: list[Mark]
    ticks: list[tuple[float, float]]
    """Positions, and how many seconds ago they were."""


def timeline(history: list[dict[str, Any]], grants: list[dict[str, Any]]) -> Timeline:
    """Return the timeline of the newest events, with the grants that are held now."""
    events = [event for event in history if event["ago"] is not None]
    began = [float(grant["held_for"]) for grant in grants if grant["held_for"] is not None]
    span = max([float(event["ago"]) for event in events] + began + [10.0]) * 1.04

    def x(ago: float) -> float:
        return round(WIDTH * (1 - min(max(ago, 0.0), span) / span), 1)

    starts = {event["token"]: float(event["ago"]) for event in events if event["event"] == "granted"}
    bars = []
    for event in events:
        if event["event"] in ENDS:
            end = x(float(event["ago"]))
            known = starts.get(event["token"])
            begin = x(known) if known is not None else max(end - 26, 0)
            bars.append(Bar(begin, max(end - begin, 3), event["token"], event["holder"], event["event"], known is None))
    for grant in grants:
        if grant["held_for"] is not None:
            begin = x(float(grant["held_for"]))
            token = grant["token"] if grant["token"] > 0 else None
            bars.append(Bar(begin, max(WIDTH - begin, 3), token, grant["holder"], "now", False))
    marks = [
        Mark(x(float(event["ago"])), event["event"], LABELS.get(event["event"], event["event"]), event["token"])
        for event in events
        if event["event"] not in ("granted", "released")
    ]
    ticks = [(round(WIDTH * part / 4, 1), span * (1 - part / 4)) for part in range(5)]
    return Timeline(bars, marks, ticks)
