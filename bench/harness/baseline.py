"""Compare the ratios of a run with the stored ones.

The baseline has ratios only, so that it holds on machines of another speed. A ratio of dblock that is worse than its
baseline by more than its column allows is a regression.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.harness.table import Column, Table, ratio

PATH = Path(__file__).parents[1] / "baseline.json"

Ratios = dict[str, dict[str, dict[str, float]]]
"""By table, row and column."""


def load(path: Path = PATH) -> Ratios:
    """Return the stored ratios, or nothing."""
    stored: Ratios = json.loads(path.read_text()) if path.exists() else {}
    return stored


def ratios(table: Table) -> dict[str, dict[str, float]]:
    """Return the ratios of a table that are checked."""
    found: dict[str, dict[str, float]] = {}
    for row, cells in table.cells.items():
        if not row.startswith("dblock") or row == table.reference or row in table.noisy:
            continue
        for column in table.columns:
            cell = cells.get(column.key)
            if column.checked and cell is not None and cell.ratio is not None:
                found.setdefault(row, {})[column.key] = float(f"{cell.ratio:.4g}")
    return found


def save(tables: Iterable[Table], path: Path = PATH) -> None:
    """Store the ratios of these tables, and keep those of others."""
    stored = load(path)
    for table in tables:
        if found := ratios(table):
            stored[table.name] = found
    path.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")


def compared(table: Table, stored: Ratios) -> Iterator[tuple[str, Column, float, float]]:
    """Yield each ratio that has a baseline: its row and column, what it is and what it was."""
    for row, columns in ratios(table).items():
        for key, now in columns.items():
            if (before := stored.get(table.name, {}).get(row, {}).get(key)) is not None:
                yield row, table.column(key), now, before


def regressions(table: Table, stored: Ratios) -> dict[str, str]:
    """Return what is worse than its baseline allows: which ratio, and by how much."""
    found = {}
    for row, column, now, before in compared(table, stored):
        # A ratio of 0, such as that of a lock that is free at once, has only itself to be compared with.
        worse, better = (now, before) if column.lower_is_better else (before, now)
        if worse > better * (1 + column.checked):
            found[f"{table.name}: {row}, {column.heading}"] = (
                f"{ratio(now)} × {table.reference}, and it was {ratio(before)} ×"
            )
    return found
