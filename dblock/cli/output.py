"""How the command line shows things: tables for people, JSON for programs.

At a terminal a table fits its width and has colours; elsewhere it is plain columns, whole, for grep and awk. Whatever
comes from the database is another's text: what would move the cursor, or turn the line around, is shown escaped.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from enum import Enum
from typing import Any

import click

WIDEST = 60
"""Columns that a column is padded to, at most."""

UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Control characters, formats such as a change of direction, surrogates; and line ends of other kinds."""


def shown(value: object) -> str:
    """Return a value as text that is safe to show."""
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return value.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, (dict, list)):
        value = json.dumps(value, ensure_ascii=False)
    return "".join(_escaped(character) for character in str(value))


def _escaped(character: str) -> str:
    if unicodedata.category(character) in UNSAFE:
        return character.encode("unicode_escape").decode("ascii")
    return character


def seconds(value: float | None) -> str:
    """Return a length of time as people say it."""
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    minutes, left = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {left:02} s"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], styles: Sequence[str | None] | None = None) -> None:
    """Print a table; `styles` has one for each row."""
    texts = [[shown(value) for value in row] for row in rows]
    if sys.stdout.isatty():
        _rich_table(columns, texts, styles)
        return
    # One long name should not push all the others apart.
    widths = [min(max(map(len, column)), WIDEST) for column in zip(columns, *texts, strict=True)]
    for row in (columns, *texts):
        line = "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True))
        click.echo(line.rstrip())


def _rich_table(columns: Sequence[str], rows: list[list[str]], styles: Sequence[str | None] | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        drawn.add_column(name, overflow="fold")
    for number, row in enumerate(rows):
        drawn.add_row(*(Text(text) for text in row), style=styles[number] if styles else None)
    Console().print(drawn)


def print_json(facts: Any) -> None:
    """Print facts as one JSON document."""
    click.echo(as_json(facts, indent=2))


def print_json_line(facts: Any) -> None:
    """Print facts as JSON on one line, of a stream of them."""
    click.echo(as_json(facts))


def as_json(facts: Any, indent: int | None = None) -> str:
    """Return facts as JSON that a terminal can show.

    To JSON a name may hold an 8-bit control sequence as it is; so that is escaped here. All of it is inside texts,
    where an escape means the same.
    """
    document = json.dumps(plain(facts), ensure_ascii=False, indent=indent, allow_nan=False)
    return re.sub(r"[^\n -~]", _as_json_escape, document)


def _as_json_escape(found: re.Match[str]) -> str:
    character = found[0]
    return json.dumps(character)[1:-1] if unicodedata.category(character) in UNSAFE else character


def plain(facts: Any) -> Any:
    """Return facts as JSON can have them."""
    if is_dataclass(facts) and not isinstance(facts, type):
        facts = asdict(facts)
    if isinstance(facts, dict):
        return {key: plain(value) for key, value in facts.items()}
    if isinstance(facts, (list, tuple)):
        return [plain(value) for value in facts]
    if isinstance(facts, datetime):
        return facts.isoformat()
    if isinstance(facts, Enum):
        return facts.value
    if isinstance(facts, float):
        return round(facts, 6) if facts - facts == 0 else None  # JSON has no infinity
    return facts
