"""Draw axes, bars, bands, lines and text as one self-contained SVG."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

CARD, EDGE, INK, FAINT, GRID = "#0f1620", "#2a3645", "#e8eef5", "#8fa0b3", "#222d3a"
COLOURS = ("#4fd6c2", "#c4a1ff", "#f2c46d", "#7fb2ff", "#5fdd85", "#ff9ec7", "#ffb152", "#a9dcff")
FAULT = "#ff6f6f"

LEFT, RIGHT, TOP, BOTTOM = 96, 24, 64, 40


class Canvas:
    """A picture whose horizontal axis is time, or whatever else `x` is."""

    def __init__(self, title: str, below: str, x: tuple[float, float], width: int = 960, height: int = 300) -> None:
        self._x0, self._x1 = x[0], max(x[1], x[0] + 1e-9)
        self.width, self.height = width, height
        self._parts: list[str] = []
        self.words(24, 30, title, size=16, weight=600)
        self.words(24, 48, below, size=12, colour=FAINT)

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM

    def x(self, value: float) -> float:
        """Return the horizontal position of a value."""
        part = (value - self._x0) / (self._x1 - self._x0)
        return LEFT + min(max(part, 0.0), 1.0) * (self.width - LEFT - RIGHT)

    def grid(self, marks: Sequence[float], unit: str, offset: float = 0.0) -> None:
        """Draw vertical lines, each with its value below."""
        for mark in marks:
            at = self.x(mark + offset)
            self._parts.append(f'<path d="M{at:.1f} {TOP}V{self.bottom}" stroke="{GRID}"/>')
            self.words(at, self.bottom + 18, f"{mark:g}{unit}", size=11, colour=FAINT, anchor="middle")

    def band(self, start: float, end: float, colour: str, opacity: float = 0.25) -> None:
        """Draw a period of time from top to bottom."""
        left, right = self.x(start), self.x(end)
        self._parts.append(
            f'<rect x="{left:.1f}" y="{TOP}" width="{max(right - left, 1):.1f}" height="{self.bottom - TOP}" '
            f'fill="{colour}" opacity="{opacity}"/>'
        )

    def bar(self, start: float, end: float, y: float, height: float, colour: str, opacity: float = 1.0) -> None:
        """Draw a period of time in a lane."""
        left, right = self.x(start), self.x(end)
        self._parts.append(
            f'<rect x="{left:.2f}" y="{y:.1f}" width="{max(right - left, 0.6):.2f}" height="{height:.1f}" '
            f'fill="{colour}" opacity="{opacity}"/>'
        )

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1.6) -> None:
        """Draw a line through points whose heights are in pixels."""
        if points:
            path = " ".join(f"{self.x(x):.1f},{y:.1f}" for x, y in points)
            self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')

    def words(
        self, x: float, y: float, text: str, *, size: float = 12, colour: str = INK, weight: int = 400,
        anchor: str = "start",
    ) -> None:  # fmt: skip
        """Write text at a position in pixels."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" font-weight="{weight}" '
            f'text-anchor="{anchor}">{escape(text)}</text>'
        )

    def svg(self) -> str:
        """Return the SVG."""
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'font-family="system-ui, sans-serif">',
            f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="14" fill="{CARD}" '
            f'stroke="{EDGE}"/>',
            *self._parts,
            "</svg>\n",
        ])  # fmt: skip


def steps(low: float, high: float, about: int = 8) -> list[float]:
    """Return some round values between two others."""
    rough = max((high - low) / about, 1e-9)
    size = 10.0 ** len(str(int(rough))) / 10 if rough >= 1 else 1.0
    while rough < size / 2:
        size /= 10
    step = next(size * times for times in (1, 2, 5, 10) if size * times >= rough)
    first = int(low / step) * step
    return [
        round(first + number * step, 9)
        for number in range(int((high - first) / step) + 1)
        if first + number * step >= low
    ]
