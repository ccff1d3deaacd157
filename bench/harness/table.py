"""The answer of a question: a table whose rows are compared with one of them, the reference.

A ratio is computed within each round and then the median is taken, so that a machine that became slower between two
rounds changes both sides alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.harness.rounds import Measured


@dataclass(frozen=True)
class Column:
    """One measured quantity."""

    key: str
    heading: str
    lower_is_better: bool = True
    digits: int = 0
    drawn: bool = True
    checked: float = 0.0
    """The part by which a ratio of dblock may get worse than the baseline before `make bench` fails; 0 for any."""


@dataclass(frozen=True)
class Goal:
    """A limit of a ratio to another row, or of the figure itself if there is no `reference`."""

    row: str
    column: str
    reference: str
    limit: float
    """The ratio is at most this, or at least this if more is better."""


@dataclass
class Cell:
    """The median of a quantity over the rounds, and of its ratio to the reference with quartiles."""

    value: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass
class Table:
    """Rows, columns, and the row that the others are compared with."""

    name: str
    title: str
    reference: str
    columns: Sequence[Column]
    cells: dict[str, dict[str, Cell]] = field(default_factory=dict)
    goals: list[tuple[Goal, float]] = field(default_factory=list)
    """The goals that could be judged, with the ratio that was measured."""
    notes: list[str] = field(default_factory=list)
    picture: str = "bars"
    """How it is drawn: `bars`, a panel for each column with the best row on top; `in order`, the same without sorting;
    `lines`, a line for each row over the columns; or `none`."""
    about: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """What went wrong with rows that are missing or have fewer rounds."""
    noisy: Sequence[str] = ()
    """Rows whose figures are too small to be compared with a baseline."""

    def fill(self, measured: Measured, goals: Sequence[Goal] = ()) -> Table:
        """Compute the medians and the ratios."""
        base = measured.values.get(self.reference, {})
        for row, columns in measured.values.items():
            self.cells[row] = {key: _cell(values, base.get(key)) for key, values in columns.items()}
        for goal in goals:
            found = measured.values.get(goal.row, {}).get(goal.column, [])
            if goal.reference:
                found = _ratios(found, measured.values.get(goal.reference, {}).get(goal.column))
            if found:
                self.goals.append((goal, _median(found)))
            else:
                what = " or ".join(name for name in (goal.row, goal.reference) if name)
                self.notes.append(f"The goal “{self.limit(goal)}” was not judged: {what} was not measured.")
        self.failed = dict(measured.failed)
        self.about |= {"blocks": measured.blocks, "repeated": measured.repeated, "disturbed": measured.disturbed}
        return self

    def column(self, key: str) -> Column:
        """Return a column by its key."""
        return next(column for column in self.columns if column.key == key)

    def met(self, goal: Goal, ratio: float) -> bool:
        """Return whether the goal is met."""
        return ratio <= goal.limit if self.column(goal.column).lower_is_better else ratio >= goal.limit

    def limit(self, goal: Goal) -> str:
        """Return what a goal demands."""
        column = self.column(goal.column)
        sign = "≤" if column.lower_is_better else "≥"
        of = f" × {goal.reference}" if goal.reference else ""
        return f"{goal.row}, {column.heading} {sign} {goal.limit:g}{of}"

    def data(self) -> dict[str, Any]:
        """Return everything as JSON data."""
        return {
            "name": self.name,
            "title": self.title,
            "reference": self.reference,
            "columns": [asdict(column) for column in self.columns],
            "rows": {row: {key: _known(cell) for key, cell in cells.items()} for row, cells in self.cells.items()},
            "goals": [{**asdict(goal), "ratio": None if math.isnan(ratio) else ratio} for goal, ratio in self.goals],
            "notes": self.notes,
            "picture": self.picture,
            "about": self.about,
            "noisy": list(self.noisy),
        }

    @staticmethod
    def of(data: dict[str, Any]) -> Table:
        """Return the table of such data."""
        table = Table(
            data["name"], data["title"], data["reference"], [Column(**column) for column in data["columns"]],
            notes=data["notes"], picture=data["picture"], about=data["about"], noisy=data["noisy"],
        )  # fmt: skip
        for row, cells in data["rows"].items():
            table.cells[row] = {
                key: Cell(**{**cell, "value": math.nan if cell["value"] is None else cell["value"]})
                for key, cell in cells.items()
            }
        for goal in data["goals"]:
            known = {key: value for key, value in goal.items() if key != "ratio"}
            table.goals.append((Goal(**known), math.nan if goal["ratio"] is None else goal["ratio"]))
        return table


def _known(cell: Cell) -> dict[str, float | None]:
    """Return a cell as JSON data, which has no NaN."""
    return {key: None if value is not None and math.isnan(value) else value for key, value in asdict(cell).items()}


def _median(values: Sequence[float]) -> float:
    """Return the median, where what did not happen in time counts as the longest."""
    found = statistics.median([math.inf if math.isnan(value) else value for value in values] or [math.inf])
    return math.nan if math.isinf(found) else found


def _ratios(values: Sequence[float] | None, base: Sequence[float] | None) -> list[float]:
    return [value / other for value, other in zip(values or [], base or [], strict=False) if other > 0]  # not NaN


def _cell(values: Sequence[float], base: Sequence[float] | None) -> Cell:
    cell, ratios = Cell(_median(values)), _ratios(values, base)
    if ratios and not math.isnan(_median(ratios)):
        cell.ratio = _median(ratios)
        ordered = sorted(ratios, key=lambda one: math.inf if math.isnan(one) else one)
        cell.low, cell.high = ordered[len(ordered) // 4], ordered[len(ordered) * 3 // 4]
    return cell


def number(value: float, digits: int) -> str:
    """Format a value of a column."""
    if math.isnan(value):
        return "–"
    return f"{value:,.{digits}f}"


def ratio(value: float | None) -> str:
    """Format a ratio with three digits."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def markdown(table: Table) -> str:
    """Return the table as Markdown: each figure, and its ratio to the reference."""
    lines = [
        f"| {table.title} | " + " | ".join(column.heading for column in table.columns) + " |",
        "|---" * (len(table.columns) + 1) + "|",
    ]
    for row, cells in table.cells.items():
        ours = f"**{row}**" if row.startswith("dblock") else row
        shown = []
        for column in table.columns:
            cell = cells.get(column.key)
            if cell is None:
                shown.append("–")
            elif row == table.reference or cell.ratio is None:
                shown.append(number(cell.value, column.digits))
            else:
                shown.append(f"{number(cell.value, column.digits)} ({ratio(cell.ratio)} ×)")
        lines.append(f"| {ours} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def judged(table: Table) -> list[tuple[str, str, str]]:
    """Return for each goal what it demands, what was measured, and whether it is met."""
    return [
        (
            table.limit(goal),
            f"{ratio(measured)} ×" if goal.reference else number(measured, table.column(goal.column).digits),
            "met" if table.met(goal, measured) else "NOT MET",
        )
        for goal, measured in table.goals
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines whose columns are aligned, the first to the left and the others to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def plain(table: Table) -> str:
    """Return the table for a terminal."""
    rows = [[table.title, *(column.heading for column in table.columns)]]
    for line in markdown(table).splitlines()[2:]:
        rows.append([cell.strip().strip("*") for cell in line.strip("|").split("|")])
    out = aligned(rows)
    if table.reference in table.cells:
        out.append(f"× {table.reference} = 1, measured in the same run")
    else:
        out.append(f"There are no ratios, because {table.reference} was not measured.")
    out += [f"goal: {limit}: {measured}, {verdict}" for limit, measured, verdict in judged(table)]
    out += table.notes
    about = table.about
    if about.get("repeated") or about.get("disturbed"):
        out.append(
            f"{about['repeated']} blocks were repeated because other programs disturbed them; "
            f"{about['disturbed']} of {about['blocks']} were disturbed each time"
        )
    return "\n".join(out)
