"""Compare the ratios of a run with the stored ones.

The baseline has ratios only, so that it holds on machines of another speed. A ratio of dblock that is worse than its
baseline by more than its column allows is a regression.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from bench.harness.table import Table, ratio

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
                found.setdefault(row, {})[column.key] = round(cell.ratio, 3)
    return found


def save(tables: Iterable[Table], path: Path = PATH) -> None:
    """Store the ratios of these tables, and keep those of others."""
    stored = load(path)
    for table in tables:
        if found := ratios(table):
            stored[table.name] = found
    path.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")


def regressions(table: Table, stored: Ratios) -> list[str]:
    """Return a line for each ratio that is worse than its baseline allows."""
    found = []
    for row, columns in ratios(table).items():
        for key, now in columns.items():
            before = stored.get(table.name, {}).get(row, {}).get(key)
            if before is None:
                continue
            column = table.column(key)
            worse = now / before if column.lower_is_better else before / now
            if worse > 1 + column.checked:
                found.append(
                    f"{table.name}: {row}, {column.heading}: {ratio(now)} × {table.reference}, and it was "
                    f"{ratio(before)} ×"
                )
    return found
