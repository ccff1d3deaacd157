"""Draw a table as an SVG on a light card: a panel of bars for each column, or lines over the columns."""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

from bench.harness.table import Column, Table, number

CARD, EDGE, INK, FAINT, GRID = "#ffffff", "#d5dce4", "#1c2733", "#5d6b7a", "#e8edf2"
OURS, FLOOR, OTHER = "#1f6feb", "#8a63d2", "#9fb0c3"
LIGHTER = "#79b8ff"
LINES = ("#d1495b", "#e8a33d", "#2a9d8f", "#b07d48", "#5d6b7a", "#3c8031", "#c06c9b", "#111111")
FLOORS = ("sketch", "pgbench", "two SQL statements")

WIDTH = 920
BAR, GAP, PANEL_HEAD = 16, 6, 34
LABELS, LETTER = 90, 6.7
"""The least width of the labels, and that of a letter."""
CUT = 3.0
"""Bars are cut at this multiple of the longest bar of dblock and of the reference."""


class Canvas:
    """The parts of an SVG."""

    def __init__(self, title: str, below: str) -> None:
        self._parts: list[str] = []
        self._title = title
        self.words(24, 32, title, size=17, weight=600)
        self.words(24, 52, below, size=12, colour=FAINT)

    def words(
        self, x: float, y: float, text: str, *, size: float = 12, colour: str = INK, weight: int = 400,
        anchor: str = "start",
    ) -> None:  # fmt: skip
        """Write text."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" font-weight="{weight}" '
            f'text-anchor="{anchor}">{escape(text)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """Draw a filled rectangle."""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height:.1f}" rx="2" fill="{colour}"/>'
        )

    def line(self, points: list[tuple[float, float]], colour: str, width: float = 2.0, dashed: bool = False) -> None:
        """Draw a line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" '
            f'stroke-linejoin="round"{dash}/>'
        )

    def svg(self, height: float) -> str:
        """Return the SVG."""
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" role="img" '
            f'font-family="system-ui, sans-serif">',
            f"<title>{escape(self._title)}</title>",
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="14" fill="{CARD}" '
            f'stroke="{EDGE}"/>',
            *self._parts,
            "</svg>\n",
        ])  # fmt: skip


def draw(table: Table, asks: str) -> str:
    """Return the picture of a table."""
    floors = " · violet: floors" if any(row in FLOORS for row in table.cells) and table.picture != "lines" else ""
    ours = any(row.startswith("dblock") for row in table.cells)
    others = any(not row.startswith("dblock") for row in table.cells)
    blue = " · blue: dblock" if ours and others and table.picture != "lines" else ""
    canvas = Canvas(asks, f"{table.title}{blue}{floors}")
    return _lines(canvas, table) if table.picture == "lines" else _bars(canvas, table)


def _colour(row: str) -> str:
    return OURS if row.startswith("dblock") else FLOOR if row in FLOORS else OTHER


def _value(table: Table, row: str, column: Column) -> float:
    cell = table.cells[row].get(column.key)
    return math.nan if cell is None else cell.value


def _bars(canvas: Canvas, table: Table) -> str:
    """Draw a panel for each column, side by side if there are two, with the best row on top."""
    drawn = [column for column in table.columns if column.drawn][:4]
    across = min(len(drawn), 2)
    width = (WIDTH - 48) / across
    tops = [74.0] * across
    for place, column in enumerate(drawn):
        left, top = 24 + place % across * width, tops[place % across]
        tops[place % across] = _panel(canvas, table, column, left, top, width - 28) + 18
    return canvas.svg(max(tops))


def _panel(canvas: Canvas, table: Table, column: Column, left: float, top: float, width: float) -> float:
    better = "less is better" if column.lower_is_better else "more is better"
    canvas.words(left, top + 14, column.heading, size=13, weight=600)
    canvas.words(left + width, top + 14, better, size=11, colour=FAINT, anchor="end")
    known = [row for row in table.cells if not math.isnan(_value(table, row, column))]
    if table.picture == "bars":
        known.sort(key=lambda row: _value(table, row, column), reverse=not column.lower_is_better)
    values = {row: _value(table, row, column) for row in known}
    # A bar that is far longer than the others is cut, so that they stay comparable. Its figure is written out.
    most = max(values.values(), default=1.0) or 1.0
    shown = [value for row, value in values.items() if row.startswith("dblock") or row == table.reference]
    most = min(most, CUT * max(shown, default=most)) or most
    y = top + PANEL_HEAD - 8
    labels = min(max([LABELS, *(len(row) * LETTER + 14 for row in table.cells)]), width - 140)
    room = width - labels - 62
    for row in known:
        value = values[row]
        length = min(value / most, 1.0) * room
        weight = 600 if row.startswith("dblock") else 400
        canvas.words(left + labels - 8, y + BAR - 4, row, size=11.5, weight=weight, anchor="end")
        canvas.box(left + labels, y, length, BAR, _colour(row))
        if value > most:
            end = left + labels + length - 14
            canvas.line([(end, y + BAR + 3), (end + 6, y - 3)], CARD, 4)
        canvas.words(
            left + labels + length + 6,
            y + BAR - 4,
            number(value, column.digits),
            size=11.5,
            colour=FAINT,
            weight=weight,
        )
        y += BAR + GAP
    for row, cells in table.cells.items():
        if row not in values and column.key in cells:
            canvas.words(left + labels - 8, y + BAR - 4, row, size=11.5, anchor="end")
            canvas.words(left + labels, y + BAR - 4, "–", size=11.5, colour=FAINT)
            y += BAR + GAP
    return y


def _lines(canvas: Canvas, table: Table) -> str:
    """Draw a line for each row over the columns, on logarithmic scales, with a legend on the right."""
    left, top, right, bottom = 70.0, 78.0, WIDTH - 240.0, 400.0
    columns = list(table.columns)
    values = [
        value for row in table.cells for column in columns if (value := _value(table, row, column)) > 0
    ]  # NaN is not greater
    if not values:
        return canvas.svg(120)
    low, high = math.floor(math.log10(min(values)) * 3) / 3, math.ceil(math.log10(max(values)) * 3) / 3
    high = max(high, low + 1 / 3)

    def x(place: int) -> float:
        return left + (right - left) * (place + 0.5) / len(columns)

    def y(value: float) -> float:
        return bottom - (math.log10(value) - low) / (high - low) * (bottom - top)

    for tick in _ticks(low, high):
        canvas.line([(left, y(tick)), (right, y(tick))], GRID, 1)
        canvas.words(left - 8, y(tick) + 4, f"{tick:,.10g}", size=11, colour=FAINT, anchor="end")
    for place, column in enumerate(columns):
        canvas.words(x(place), bottom + 20, column.heading, size=11, colour=FAINT, anchor="middle")
    ends, others = [], 0
    for row in table.cells:
        points = [
            (x(place), y(value)) for place, column in enumerate(columns) if (value := _value(table, row, column)) > 0
        ]
        if points:
            ours, floor = row.startswith("dblock"), row in FLOORS
            colour = LINES[others % len(LINES)]
            if ours or floor:
                colour = FLOOR if floor else LIGHTER if "efficiency" in row else OURS
            others += not (ours or floor)
            canvas.line(points, colour, 3.2 if ours else 1.8, floor)
            ends.append((points[-1][1], row, colour))
    at = top
    for _, row, colour in sorted(ends):
        canvas.line([(right + 16, at), (right + 36, at)], colour, 3, row in FLOORS)
        canvas.words(right + 44, at + 4, row, size=11.5, weight=600 if row.startswith("dblock") else 400)
        at += 20
    return canvas.svg(max(bottom + 40, at + 20))


def _ticks(low: float, high: float) -> list[float]:
    return [
        step * 10.0**power
        for power in range(math.floor(low) - 1, math.ceil(high) + 1)
        for step in (1, 2, 5)
        if low - 1e-9 <= math.log10(step * 10.0**power) <= high + 1e-9
    ]
