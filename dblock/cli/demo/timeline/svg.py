"""Draw a timeline as a self-contained SVG, with its own background for light and dark pages.

The width of the font is unknown, because only the generic family is named. So every text gets more room than it needs.
A text that does not fit is moved or left out, and no two texts overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

from dblock.cli.demo.timeline.lanes import ASLEEP, FROZEN, HELD, LEGEND, WAITING, Bar, Lane, Panel, states
from dblock.cli.output import printable

WIDTH = 960
MARGIN = 32
LEFT, RIGHT = 110, WIDTH - MARGIN - 4
"""The horizontal range of the time axis."""
BAR, BETWEEN, ROW = 26, 30, 16
"""The height of a bar, the gap between lanes, and the height of a row of labels."""

CARD, EDGE, INK, FAINT, GRID, PANEL = "#0f1620", "#2a3645", "#e8eef5", "#8fa0b3", "#222d3a", "#141d29"
HOLDERS = ("#c4a1ff", "#4fd6c2", "#f2c46d", "#7fb2ff")
"""The colours of the lanes."""
GOOD, BAD, WARN, ICE = "#5fdd85", "#ff6f6f", "#ffb152", "#a9dcff"
SIGNS = {
    "tried": WARN, "renewed": GOOD, "read": INK, "stored": GOOD, "corrupted": BAD, "refused": WARN, "killed": BAD,
}  # fmt: skip

SUBTITLE = "Recorded by dblock demo on a real Postgres: real processes, signals, times and tokens."

STYLE = f"""
    text {{ font-family: system-ui, sans-serif; fill: {INK}; font-size: 12px; }}
    .number {{ font-family: ui-monospace, monospace; }}
    .faint {{ fill: {FAINT}; }}
    .title {{ font-size: 16px; font-weight: 600; }}
    .on {{ font-size: 11px; font-weight: 600; fill: {CARD}; }}
    .in {{ font-size: 11px; fill: {ICE}; }}
"""
ICY = (
    '<pattern id="{}" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="8" height="8" fill="{}"/><rect width="3" height="8" fill="{}"/></pattern>'
)


def render_svg(drawn: Sequence[Panel], heading: str = "Two workers, one lock, one ledger") -> str:
    """Return the picture as an SVG document."""
    body: list[str] = []
    y = 78.0
    for panel in drawn:
        part, height = _panel(panel, y)
        body += part
        y += height + 18
    legend, height = _legend(states(drawn), y + 6)
    height += y + 14
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
        f'height="{height:g}" role="img">',
        f"<title>{_escape(heading)}</title>",
        f"<desc>{_escape(' '.join(f'{panel.title}: {panel.sums}.' for panel in drawn if panel.sums))}</desc>",
        f"<style>{STYLE}</style>",
        f"<defs>{ICY.format('frozen', '#27506e', '#3d769c')}{ICY.format('asleep', '#172230', '#26384a')}</defs>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="16" fill="{CARD}" stroke="{EDGE}"/>',
        _text(MARGIN, 40, heading, 20, weight=600),
        _text(MARGIN, 61, SUBTITLE, 12.5, css="faint"),
        *body,
        *legend,
        "</svg>\n",
    ])  # fmt: skip


def _panel(panel: Panel, top: float) -> tuple[list[str], float]:
    """Draw one act; return also its height."""
    labels = [_place_labels(panel, lane) for lane in panel.lanes]
    rows = [max([label.row + 1 for label in placed], default=0) for placed in labels]
    y = top + 44 + rows[0] * ROW
    bars: list[float] = []
    for number, count in enumerate(rows):
        bars.append(y)
        # The first lane has its labels above, so that there is room for the arrows between lanes.
        y += BAR + BETWEEN + (count * ROW if number else 0)
    bottom = y - BETWEEN + 10
    ticks = [(_x(panel, at), text) for at, text in panel.ticks(9)]
    drawn = [_grid(x, text, bars[0] - 6, bottom) for x, text in ticks if x < RIGHT - 12]
    drawn += _draw_handovers(panel, bars)
    for number, lane in enumerate(panel.lanes):
        colour = HOLDERS[number % len(HOLDERS)]
        drawn.append(_text(MARGIN + 14, bars[number] + 18, _shorten(lane.name, 7), 14, weight=600, fill=colour))
        drawn += [_bar(panel, lane, bar, bars[number], colour) for bar in lane.bars]
        for label in labels[number]:
            drawn += _draw_mark(label, bars[number], above=number == 0)
    height = bottom + 26 - top
    if panel.sums:
        drawn += _draw_sums(panel, top + height)
        height += 42
    frame = (
        f'<rect x="{MARGIN - 14}" y="{top:g}" width="{WIDTH - 2 * MARGIN + 28}" height="{height:g}" rx="10" '
        f'fill="{PANEL}" stroke="{GRID}"/>'
    )
    title = f'<text class="title" x="{MARGIN}" y="{top + 27:g}">{_escape(_shorten(panel.title, 80))}</text>'
    return [frame, title, *drawn], height


def _grid(x: float, text: str, top: float, bottom: float) -> str:
    return (
        f'<line x1="{x:.1f}" y1="{top:g}" x2="{x:.1f}" y2="{bottom:g}" stroke="{GRID}"/>'
        f'<text class="number faint" x="{x:.1f}" y="{bottom + 15:g}" text-anchor="middle" '
        f'style="font-size: 11px">{text} s</text>'
    )


def _draw_handovers(panel: Panel, bars: Sequence[float]) -> list[str]:
    """Draw the hand-overs of the lock from lane to lane."""
    held = sorted(
        (bar.start, bar.end, number)
        for number, lane in enumerate(panel.lanes)
        for bar in lane.bars
        if bar.state in (HELD, FROZEN)
    )
    drawn = []
    for (_, ended, before), (began, _, after) in pairwise(held):
        if before != after:
            x1, x2 = _x(panel, ended), _x(panel, began)
            y1, y2 = (bars[before] + BAR, bars[after]) if before < after else (bars[before], bars[after] + BAR)
            middle = (y1 + y2) / 2
            drawn.append(
                f'<path d="M{x1:.1f} {y1:g} C{x1:.1f} {middle:g} {x2:.1f} {middle:g} {x2:.1f} {y2:g}" fill="none" '
                f'stroke="{HOLDERS[after % len(HOLDERS)]}" stroke-width="1.5" stroke-dasharray="3 3"/>'
            )
    return drawn


def _bar(panel: Panel, lane: Lane, bar: Bar, y: float, colour: str) -> str:
    x1, x2 = _x(panel, bar.start), _x(panel, bar.end)
    width = max(x2 - x1, 2.0)
    if bar.state == WAITING:
        line = f'<line x1="{x1:.1f}" y1="{y + BAR / 2:g}" x2="{x2:.1f}" y2="{y + BAR / 2:g}"'
        return f'{line} stroke="{colour}" stroke-opacity="0.7" stroke-width="2.5" stroke-dasharray="1.5 6"/>'
    fill = {HELD: colour, FROZEN: "url(#frozen)", ASLEEP: "url(#asleep)"}[bar.state]
    edge = {HELD: "none", FROZEN: colour, ASLEEP: "#4a6075"}[bar.state]
    dashes = ' stroke-dasharray="4 3"' if bar.state == ASLEEP else ""
    drawn = (
        f'<rect x="{x1:.1f}" y="{y:g}" width="{width:.1f}" height="{BAR}" rx="4" fill="{fill}" stroke="{edge}"'
        f"{dashes}/>"
    )
    free = min([_x(panel, mark.at) - 11 for mark in lane.marks if bar.start <= mark.at <= bar.end] + [x2]) - x1 - 8
    said = {
        HELD: [f"grant {bar.grant}", f"{bar.grant}"],
        FROZEN: ["frozen by SIGSTOP, still holding the lock", "frozen, holding the lock", "frozen"],
        ASLEEP: ["frozen, its lease has expired", "lease expired"],
    }[bar.state]
    for text in said:
        if _text_width(text, 11) <= free:
            css = "on" if bar.state == HELD else "in"
            return f'{drawn}<text class="{css}" x="{x1 + 8:.1f}" y="{y + 17:g}">{_escape(text)}</text>'
    return drawn


@dataclass(frozen=True)
class _Label:
    """A mark with the position of its label."""

    x: float
    kind: str
    text: str
    left: float
    row: int


def _place_labels(panel: Panel, lane: Lane) -> list[_Label]:
    """Find a place for the text of each mark: below its middle, to its right or to its left; else one row further."""
    labels: list[_Label] = []
    marks = [
        (_x(panel, mark.at), mark.kind, _shorten(mark.label, 40)) for mark in sorted(lane.marks, key=lambda one: one.at)
    ]
    for number, (x, kind, text) in enumerate(marks):
        length = _text_width(text, 12)
        middle, right, left = x - length / 2, x - 8, x + 8 - length
        # Where the next one is near, there is more room on the other side.
        after = marks[number + 1 : number + 2]
        near = any(there - x < (length + _text_width(text_there, 12)) / 2 + 6 for there, _, text_there in after)
        wished = (left, middle, right) if near else (middle, right, left)
        places = [min(max(place, LEFT - 10.0), RIGHT + 4 - length) for place in wished]
        row = 0
        while not (free := [place for place in places if _is_free(labels, place, length, row)]):
            row += 1
        labels.append(_Label(x, kind, text, free[0], row))
    return labels


def _is_free(labels: Sequence[_Label], left: float, length: float, row: int) -> bool:
    taken = ((one.left, one.left + _text_width(one.text, 12)) for one in labels if one.row == row)
    return all(left >= end + 6 or left + length + 6 <= start for start, end in taken)


def _draw_mark(label: _Label, y: float, above: bool) -> list[str]:
    baseline = y - 9 - label.row * ROW if above else y + BAR + 16 + label.row * ROW
    colour = SIGNS[label.kind]
    strong = ' font-weight="700"' if label.kind in ("corrupted", "refused", "killed") else ""
    return [
        _draw_sign(label.kind, label.x, y + BAR / 2),
        f'<text x="{label.left:.1f}" y="{baseline:g}" style="fill: {colour}"{strong}>{_escape(label.text)}</text>',
    ]


def _draw_sign(kind: str, x: float, y: float) -> str:
    """Draw a mark's sign around a point."""
    colour = SIGNS[kind]
    group = f'<g transform="translate({x:.1f} {y:g})" fill="none" stroke-linecap="round" stroke-linejoin="round">'
    disc = f'<circle r="8.5" fill="{CARD}" stroke="{colour}" stroke-width="2"/>'
    signs = {
        "read": f'<circle r="6.5" fill="{CARD}" stroke="{colour}" stroke-width="2"/><circle r="2" fill="{colour}"/>',
        "stored": f'{disc}<path d="M-3.5 0.3 L-1 3 L4 -3" stroke="{colour}" stroke-width="2.2"/>',
        "renewed": f'{disc}<path d="M-4 0 H4 M0 -4 V4" stroke="{colour}" stroke-width="2.2"/>',
        "tried": f'{disc}<path d="M-4 0 H4" stroke="{colour}" stroke-width="2.4"/>',
        "killed": f'<circle r="9" fill="{CARD}"/><path d="M-6 -6 L6 6 M6 -6 L-6 6" stroke="{colour}" '
        'stroke-width="3.4"/>',
        "corrupted": f'<path d="{_burst(13, 9)}" fill="{colour}" stroke="{CARD}" stroke-width="1.5"/>'
        f'<path d="M0 -5 V1 M0 4.6 V4.7" stroke="{CARD}" stroke-width="2.6"/>',
        "refused": f'<circle r="11" fill="{CARD}" stroke="{colour}" stroke-width="2.6"/>'
        f'<path d="M-4.4 -4.4 L4.4 4.4 M4.4 -4.4 L-4.4 4.4" stroke="{colour}" stroke-width="2.8"/>',
    }
    return f"{group}{signs[kind]}</g>"


def _burst(outer: float, inner: float) -> str:
    from math import cos, pi, sin

    points = [(outer if number % 2 == 0 else inner, number * pi / 9) for number in range(18)]
    return "M" + " L".join(f"{radius * sin(angle):.1f} {-radius * cos(angle):.1f}" for radius, angle in points) + " Z"


def _draw_sums(panel: Panel, y: float) -> list[str]:
    colour, ground = (GOOD, "#12291c") if panel.good else (BAD, "#331a1d")
    return [
        f'<rect x="{MARGIN}" y="{y:g}" width="{WIDTH - 2 * MARGIN}" height="30" rx="7" fill="{ground}" '
        f'stroke="{colour}" stroke-opacity="0.45"/>',
        _draw_sign("stored" if panel.good else "corrupted", MARGIN + 20, y + 15),
        _text(MARGIN + 42, y + 20, _shorten(panel.sums, 95), 14, weight=600, fill=colour),
    ]


def _legend(kinds: Sequence[str], top: float) -> tuple[list[str], float]:
    drawn = []
    column = (WIDTH - 2 * MARGIN) / 3
    rows = -(-len(kinds) // 3)
    for number, kind in enumerate(kinds):
        x, y = MARGIN + (number // rows) * column, top + (number % rows) * 25 + 12
        if kind in SIGNS:
            drawn.append(_draw_sign(kind, x + 15, y))
        elif kind == WAITING:
            drawn.append(
                f'<line x1="{x:g}" y1="{y:g}" x2="{x + 30:g}" y2="{y:g}" stroke="{FAINT}" stroke-width="2.5" '
                'stroke-dasharray="1.5 6"/>'
            )
        else:
            fill = {HELD: HOLDERS[0], FROZEN: "url(#frozen)", ASLEEP: "url(#asleep)"}[kind]
            edge = {HELD: "none", FROZEN: HOLDERS[0], ASLEEP: "#4a6075"}[kind]
            size = f'x="{x:g}" y="{y - 8:g}" width="30" height="16" rx="3"'
            drawn.append(f'<rect {size} fill="{fill}" stroke="{edge}"/>')
        drawn.append(_text(x + 42, y + 4, LEGEND[kind], 12, css="faint"))
    return drawn, rows * 25.0


def _x(panel: Panel, at: float) -> float:
    return LEFT + panel.part(at) * (RIGHT - LEFT)


def _text_width(text: str, size: float) -> float:
    """Return an upper bound for the width of a text in pixels."""
    return len(text) * size * 0.62


def _text(x: float, y: float, text: str, size: float, css: str = "", weight: int = 400, fill: str = "") -> str:
    style = f"font-size: {size:g}px; font-weight: {weight}" + (f"; fill: {fill}" if fill else "")
    return f'<text{f" class={css!r}" if css else ""} x="{x:g}" y="{y:g}" style="{style}">{_escape(text)}</text>'


def _shorten(text: str, most: int) -> str:
    text = printable(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _escape(text: str) -> str:
    """Return a text escaped for XML."""
    return escape(printable(text), {'"': "&quot;"})
