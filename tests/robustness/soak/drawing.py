"""Draw the figures of a soak as one SVG: a panel for each group, all over the same time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tests.robustness.soak.flatness import EARLY, LATE, WARM_UP, Series

WIDTH, HEIGHT, ACROSS = 300, 172, 3
LEFT, TOP, RIGHT, BOTTOM = 44, 52, 10, 22
CARD, EDGE, INK, FAINT, GRID, PART = "#0f1620", "#2a3645", "#e8eef5", "#8fa0b3", "#222d3a", "#182433"
COLOURS = ("#c4a1ff", "#4fd6c2", "#f2c46d", "#7fb2ff", "#ff9f8f", "#5fdd85", "#e58fd0", "#b9c7d6")

PANELS = (
    ("memory of each process, MB", "memory of ", ("memory of a session",)),
    ("threads of each process", "threads of ", ()),
    ("open files of each process", "files of ", ()),
    ("connections to the server", "connections", ()),
    ("memory of a session, MB", "memory of a session", ()),
    ("tables, MB", "size of ", ()),
    ("dead rows", "dead rows of ", ()),
    ("operations a second", "operations", ()),
    ("a free lock: p50 and p99, ms", "p", ()),
)
"""A title, the prefix of the names of its series, and the names to leave out."""


LETTER, LINES = 5.2, 2
"""The width of a letter in a legend, and the most lines of a legend."""


def svg_of(series: Sequence[Series], minutes: float, heading: str) -> str:
    """Return the SVG."""
    rows = -(-len(PANELS) // ACROSS)
    width, height = WIDTH * ACROSS + 40, HEIGHT * rows + 80
    drawn = []
    for number, (title, prefix, without) in enumerate(PANELS):
        x, y = 20 + number % ACROSS * WIDTH, 56 + number // ACROSS * HEIGHT
        inside = [one for one in series if one.name.startswith(prefix) and one.name not in without and one.points]
        drawn.append(f'<g transform="translate({x} {y})">{_panel(title, prefix, inside, minutes)}</g>')
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img">',
        f"<title>{escape(heading)}</title>",
        f"<style>text {{ font: 11px system-ui, sans-serif; fill: {FAINT}; }} .title {{ fill: {INK}; }}</style>",
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="16" fill="{CARD}" stroke="{EDGE}"/>',
        f'<text class="title" x="24" y="34" style="font-size: 17px; font-weight: 600">{escape(heading)}</text>',
        *drawn,
        "</svg>\n",
    ])  # fmt: skip


def _panel(title: str, prefix: str, series: Sequence[Series], minutes: float) -> str:
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    most = max((value for one in series for _, value in one.points), default=0) * 1.08 or 1.0
    parts = [f'<text class="title" x="{LEFT}" y="16">{escape(title)}</text>']
    # The two periods that are compared.
    for begin, end in ((WARM_UP, EARLY), (LATE, 1.0)):
        parts.append(
            f'<rect x="{LEFT + begin * width:.1f}" y="{TOP}" width="{(end - begin) * width:.1f}" height="{height}" '
            f'fill="{PART}"/>'
        )
    for part in (0.0, 0.5, 1.0):
        y = TOP + height * (1 - part)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + width}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{most * part:.3g}</text>')
    for part in (0.0, 0.5, 1.0):
        at = f"{minutes * part:g} min" if part else "0"
        parts.append(f'<text x="{LEFT + part * width:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{at}</text>')
    for number, one in enumerate(series):
        line = " ".join(
            f"{LEFT + min(at / minutes, 1.0) * width:.1f},{TOP + height * (1 - value / most):.1f}"
            for at, value in _thinned(one.points)
        )
        colour = COLOURS[number % len(COLOURS)]
        name = _short(one.name, prefix)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.4"><title>{escape(name)}</title>'
            "</polyline>"
        )
    if len(series) > 1:
        parts += _legend([_short(one.name, prefix) for one in series])
    return "".join(parts)


def _short(name: str, prefix: str) -> str:
    """Return the name without the prefix that all names in the panel share, if that prefix is a word."""
    return name.removeprefix(prefix) if prefix.endswith(" ") else name


def _legend(names: Sequence[str]) -> list[str]:
    """Name the lines in their colours, as far as there is space. A pointer over a line always shows its name."""
    parts: list[str] = []
    x, line = 0.0, 0

    def write(text: str, colour: str) -> None:
        style = f"font-size: 9.5px; fill: {colour}"
        parts.append(f'<text x="{LEFT + x:.1f}" y="{30 + 12 * line}" style="{style}">{escape(text)}</text>')

    for number, name in enumerate(names):
        width = LETTER * (len(name) + 2)
        if x > 0 and x + width > WIDTH - LEFT - RIGHT:
            if line + 1 == LINES:
                write("…", FAINT)
                break
            x, line = 0.0, line + 1
        write(name, COLOURS[number % len(COLOURS)])
        x += width
    return parts


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    return points[:: max(len(points) // 300, 1)]
