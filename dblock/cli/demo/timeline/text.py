"""Draw a timeline in characters: in colours and as wide as the terminal there, in plain ASCII elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from dblock.cli.demo.timeline.lanes import ASLEEP, FROZEN, HELD, LEGEND, WAITING, Lane, Panel, states
from dblock.cli.output import printable

Piece = tuple[str, str]
"""A piece of text with the name of its style."""

PLAIN = {
    HELD: "=", FROZEN: "#", ASLEEP: "~", WAITING: ".", "tried": "?", "renewed": "+", "read": "r", "stored": "w",
    "corrupted": "!", "refused": "X", "killed": "K",
}  # fmt: skip
FINE = {
    HELD: "━", FROZEN: "▒", ASLEEP: "░", WAITING: "┄", "tried": "?", "renewed": "+", "read": "○", "stored": "●",
    "corrupted": "✖", "refused": "⊘", "killed": "†",
}  # fmt: skip
STYLES = {
    HELD: "bold green", FROZEN: "bright_blue", ASLEEP: "blue", WAITING: "dim", "tried": "yellow", "renewed": "green",
    "read": "cyan", "stored": "bold green", "corrupted": "bold red", "refused": "bold magenta", "killed": "bold red",
    "title": "bold", "good": "bold green", "bad": "bold red", "axis": "dim", "name": "bold",
}  # fmt: skip

MIN_WIDTH = 40
"""Columns; a narrower terminal gets a timeline of this width."""


def print_timeline(drawn: Sequence[Panel]) -> None:
    """Print a timeline, in colours at a terminal."""
    import shutil

    at_terminal = sys.stdout.isatty()
    fine = at_terminal and (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    lines = timeline(drawn, shutil.get_terminal_size((80, 24)).columns, FINE if fine else PLAIN)
    if not at_terminal:
        for line in lines:
            click.echo("".join(text for text, _ in line).rstrip())
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in lines:
        console.print(Text.assemble(*((text, STYLES.get(style, "")) for text, style in line)), soft_wrap=True)


def timeline(drawn: Sequence[Panel], width: int, characters: dict[str, str] = PLAIN) -> list[list[Piece]]:
    """Return a timeline as lines of styled text, none wider than the width."""
    width = max(width, MIN_WIDTH)
    margin = min(max([len(printable(lane.name)) for panel in drawn for lane in panel.lanes], default=0), 12) + 2
    lines: list[list[Piece]] = []
    for panel in drawn:
        lines += [[], [(_shorten(printable(panel.title), width), "title")], _axis(panel, margin, width)]
        for lane in panel.lanes:
            lines += _lane(panel, lane, margin, width, characters)
        if panel.sums:
            lines += [[(part, "good" if panel.good else "bad")] for part in _folded(printable(panel.sums), width)]
    if drawn:
        lines += [[], *_legend(states(drawn), width, characters)]
    return lines


def _axis(panel: Panel, margin: int, width: int) -> list[Piece]:
    row = [" "] * width
    for at, text in panel.ticks((width - margin) // 10):
        column = _column(panel, at, margin, width)
        if column + len(text) + 2 <= width and "".join(row[column - 1 : column + len(text)]).strip() == "":
            row[column : column + len(text)] = text
    filled = len("".join(row).rstrip())
    row[filled : filled + 2] = " s"
    return [("".join(row)[:width], "axis")]


def _lane(panel: Panel, lane: Lane, margin: int, width: int, characters: dict[str, str]) -> list[list[Piece]]:
    cells: list[Piece] = [(" ", "")] * (width - margin)

    def column(at: float) -> int:
        return _column(panel, at, margin, width) - margin

    for bar in lane.bars:
        first, last = column(bar.start), column(bar.end)
        for place in range(first, max(last, first + 1)):
            cells[place] = (characters[bar.state], bar.state)
        number = "" if bar.grant is None or bar.state != HELD else str(bar.grant)
        if number and last - first > len(number) + 1:
            cells[first + 1 : first + 1 + len(number)] = [(digit, "title") for digit in number]
    labels: list[list[Piece]] = []
    taken: set[int] = set()
    for mark in lane.marks:
        place = column(mark.at)
        while place in taken and place < len(cells) - 1:
            place += 1  # beside the mark that is already there
        taken.add(place)
        cells[place] = (characters[mark.kind], mark.kind)
        _write_below(labels, place, mark.label, mark.kind, width - margin)
    name = _shorten(printable(lane.name), margin - 2)
    return [
        [(f"{name:<{margin}}", "name"), *_joined(cells)],
        *([(" " * margin, ""), *_joined(row)] for row in labels),
    ]


def _write_below(rows: list[list[Piece]], place: int, label: str, style: str, width: int) -> None:
    """Write a label below its mark, in the first row that has room for it."""
    label = _shorten(printable(label), width)
    start = min(place, width - len(label))
    for row in rows:
        if all(text == " " for text, _ in row[max(start - 2, 0) : start + len(label) + 2]):
            break
    else:
        row = [(" ", "")] * width
        rows.append(row)
    row[start : start + len(label)] = [(character, style) for character in label]


def _legend(kinds: Sequence[str], width: int, characters: dict[str, str]) -> list[list[Piece]]:
    entries = [(characters[kind] * (3 if kind in (HELD, FROZEN, ASLEEP, WAITING) else 1), kind) for kind in kinds]
    column = max([len(LEGEND[kind]) for kind in kinds], default=0) + 6
    across = max(min(width // column, 2), 1)
    lines: list[list[Piece]] = []
    rows = -(-len(entries) // across)
    for number in range(rows):
        line: list[Piece] = []
        for sign, kind in entries[number::rows]:
            line += [(f"{sign:<3} ", kind), (f"{LEGEND[kind]:<{column - 4}}", "")]
        lines.append(line)
    return lines


def _column(panel: Panel, at: float, margin: int, width: int) -> int:
    return margin + round(panel.part(at) * (width - margin - 1))


def _joined(cells: Sequence[Piece]) -> list[Piece]:
    """Join adjacent pieces of the same style."""
    pieces: list[Piece] = []
    for text, style in cells:
        if pieces and pieces[-1][1] == style:
            pieces[-1] = (pieces[-1][0] + text, style)
        else:
            pieces.append((text, style))
    return pieces


def _folded(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width) or [""]


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"[: max(width, 0)]
