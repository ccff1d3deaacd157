"""Draw the latency of acquisitions around a fault: before, during and after it."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from tests.robustness.history.record import History
from tests.robustness.report.canvas import COLOURS, FAINT, FAULT, LEFT, TOP, Canvas

BEFORE, AFTER, BIN = 1.0, 4.0, 0.1
"""Seconds before and after the beginning of each fault, and the width of a bin."""

LEAST, MOST = 1e-4, 30.0
"""Seconds at the bottom and at the top of the picture."""


@dataclass(frozen=True)
class Around:
    """Latencies of completed acquisitions, by the time of the request from the beginning of the fault."""

    bins: dict[int, list[float]]
    faults: int
    longest: float
    """The median duration of a fault."""


def around(history: History) -> Around:
    """Collect the latencies around every fault."""
    bins: dict[int, list[float]] = {}
    requests = [one for one in history.of("acquire") if not math.isinf(one.returned)]
    faults = history.faults
    index = 0
    for fault in faults:
        while index < len(requests) and requests[index].called < fault.called - BEFORE:
            index += 1
        for one in requests[index:]:
            since = one.called - fault.called
            if since > AFTER:
                break
            bins.setdefault(math.floor(since / BIN), []).append(one.returned - one.called)
    lasted = [one.returned - one.called for one in faults if not math.isinf(one.returned)]
    return Around(bins, len(faults), statistics.median(lasted) if lasted else 0.0)


def draw(history: History, title: str) -> str:
    """Draw the median and the 99th percentile of the latency around the faults of a run, on a logarithmic scale."""
    found = around(history)
    canvas = Canvas(
        title,
        f"Seconds until an acquisition completed, by the time of its request, around {found.faults} faults. "
        f"Red: the median duration of a fault.",
        (-BEFORE, AFTER),
        height=320,
    )
    canvas.grid([-1, -0.5, 0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4], " s")
    canvas.band(0, min(found.longest, AFTER), FAULT, 0.2)
    for value, label in ((0.001, "1 ms"), (0.01, "10 ms"), (0.1, "100 ms"), (1.0, "1 s"), (10.0, "10 s")):
        canvas.words(LEFT - 8, _y(canvas, value) + 4, label, size=11, colour=FAINT, anchor="end")
        canvas.line([(-BEFORE, _y(canvas, value)), (AFTER, _y(canvas, value))], "#222d3a", 1)
    shown = sorted(found.bins)
    for colour, part, label, at in ((COLOURS[0], 0.5, "median", 150), (COLOURS[2], 0.99, "99 %", 80)):
        points = [((index + 0.5) * BIN, _y(canvas, _at(found.bins[index], part))) for index in shown]
        canvas.line(points, colour)
        canvas.words(canvas.width - at, 30, label, colour=colour)
    return canvas.svg()


def _at(values: list[float], part: float) -> float:
    """Return the value below which this part of the values lies."""
    return sorted(values)[min(int(len(values) * part), len(values) - 1)]


def _y(canvas: Canvas, value: float) -> float:
    part = (math.log10(min(max(value, LEAST), MOST)) - math.log10(LEAST)) / (math.log10(MOST) - math.log10(LEAST))
    return canvas.bottom - part * (canvas.bottom - TOP)
