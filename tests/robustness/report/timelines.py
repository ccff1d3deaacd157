"""Draw the holder of each lock over time, and the faults: a lane for each lock, a colour for each process."""

from __future__ import annotations

import math

from tests.robustness.history.record import History, Operation
from tests.robustness.report.canvas import COLOURS, FAINT, FAULT, LEFT, TOP, Canvas, steps

LANES = 6
"""Number of locks to draw: those with the most grants."""

LETTER = 5.4
"""The width of a letter in a fault's name."""

LONGEST = 12.0
"""Seconds to draw, around the fault in the middle of the run."""


def draw(history: History, title: str) -> str:
    """Draw the middle of a history."""
    start, end = _window(history)
    grants = {
        key: [one for one in some if one.ok and start <= one.returned <= end]
        for key, some in history.by_key("acquire").items()
    }
    keys = sorted(sorted((key for key in grants if grants[key]), key=lambda key: -len(grants[key]))[:LANES])
    processes = sorted({one.process for one in history if one.process != "runner"})
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(processes)}
    lane = 30
    canvas = Canvas(
        title,
        "Bars: a grant, from its reply to its release or to the last moment at which its holder trusted it. A colour "
        "for each process. Red: a fault.",
        (start, end),
        height=TOP + lane * len(keys) + 56,
    )
    canvas.grid(steps(0, end - start), " s", offset=start)
    taken = 0.0
    for fault in sorted(history.faults, key=lambda one: one.called):
        if fault.called < end and min(fault.returned, end) > start:
            canvas.band(max(fault.called, start), min(fault.returned, end), FAULT, 0.22)
            at, label = canvas.x(max(fault.called, start)) + 2, _label(fault)
            if at > taken:  # else it would overlap the previous label
                canvas.words(at, TOP - 3, label, size=9.5, colour=FAULT)
                taken = at + LETTER * (len(label) + 1)
    ends = _ends(history)
    for index, key in enumerate(keys):
        y = TOP + index * lane + 6
        canvas.words(LEFT - 8, y + 14, key, size=11, colour=FAINT, anchor="end")
        for grant in grants[key]:
            until = ends.get((key, grant.token), grant.returned)
            canvas.bar(grant.returned, min(until, end), y, lane - 12, colours[grant.process])
    return canvas.svg()


def _window(history: History) -> tuple[float, float]:
    times = [one.called for one in history.of("acquire")]
    if not times:
        return 0.0, 1.0
    first, last = min(times), max(times)
    if last - first <= LONGEST:
        return first, last
    faults = [one for one in history.faults if first <= one.called <= last]
    middle = faults[len(faults) // 2].called if faults else (first + last) / 2
    start = min(max(middle - LONGEST / 3, first), last - LONGEST)
    return start, start + LONGEST


def _ends(history: History) -> dict[tuple[str, int], float]:
    """Return until when each grant was held, as far as its holder recorded it."""
    ends: dict[tuple[str, int], float] = {}
    for one in history.of("believe", "release"):
        if "token" in one.details:
            at = one.called if math.isinf(one.returned) else one.returned
            ends[one.key, one.token] = max(ends.get((one.key, one.token), 0.0), at)
    return ends


def _label(fault: Operation) -> str:
    return str(fault.details.get("label", fault.details.get("victim", fault.key)))
