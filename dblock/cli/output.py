"""Print results: tables for people, JSON for programs.

At a terminal a table fits the window and has colours. Elsewhere it is plain columns, uncut, for grep and awk. Text from
the database may come from any role, so characters that would move the cursor or reverse a line are escaped.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import datetime
from enum import Enum
from typing import Any

import click

from dblock._core.printing import UNSAFE_CATEGORIES
from dblock._core.printing import duration as duration
from dblock._core.printing import printable as printable

MAX_COLUMN_WIDTH = 60
"""The width up to which a column is padded."""


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], styles: Sequence[str | None] | None = None) -> None:
    """Print a table; `styles` has one entry for each row."""
    texts = [[printable(value) for value in row] for row in rows]
    if sys.stdout.isatty():
        _rich_table(columns, texts, styles)
        return
    # The limit keeps one long name from pushing all other columns apart.
    widths = [min(max(map(len, column)), MAX_COLUMN_WIDTH) for column in zip(columns, *texts, strict=True)]
    for row in (columns, *texts):
        line = "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True))
        click.echo(line.rstrip())


def _rich_table(columns: Sequence[str], rows: list[list[str]], styles: Sequence[str | None] | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        grid.add_column(name, overflow="fold")
    for number, row in enumerate(rows):
        grid.add_row(*(Text(text) for text in row), style=styles[number] if styles else None)
    Console().print(grid)


def print_json(data: Any) -> None:
    """Print data as one indented JSON document."""
    click.echo(to_json(data, indent=2))


def print_json_line(data: Any) -> None:
    """Print data as JSON on one line, for a stream of documents."""
    click.echo(to_json(data))


def to_json(data: Any, indent: int | None = None) -> str:
    """Return data as JSON that is safe to print at a terminal.

    JSON allows 8-bit control sequences inside a string, so they are escaped here. They occur only inside strings,
    where the escape means the same.
    """
    document = json.dumps(jsonable(data), ensure_ascii=False, indent=indent, allow_nan=False)
    return re.sub(r"[^\n -~]", _json_escape, document)


def _json_escape(found: re.Match[str]) -> str:
    character = found[0]
    return json.dumps(character)[1:-1] if unicodedata.category(character) in UNSAFE_CATEGORIES else character


def jsonable(data: Any) -> Any:
    """Return data with every value converted to a type that JSON has."""
    if is_dataclass(data) and not isinstance(data, type):
        data = asdict(data)
    if isinstance(data, dict):
        return {key: jsonable(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [jsonable(value) for value in data]
    if isinstance(data, datetime):
        return data.isoformat()
    if isinstance(data, Enum):
        return data.value
    if isinstance(data, float):
        return round(data, 6) if data - data == 0 else None  # JSON has no infinity
    return data


@contextmanager
def suppress_warnings() -> Iterator[None]:
    """Suppress the warnings of clients whose problems the command reports itself."""
    log = logging.getLogger("dblock")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
