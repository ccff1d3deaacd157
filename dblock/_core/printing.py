"""Turn values into text that is safe to print: at a terminal, and in a picture."""

from __future__ import annotations

import json
import unicodedata
from datetime import datetime

UNSAFE_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories to escape: controls, formats such as a change of direction, surrogates, line separators."""


def printable(value: object) -> str:
    """Return a value as text that is safe to print."""
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return value.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, (dict, list)):
        value = json.dumps(value, ensure_ascii=False)
    return "".join(_escape(character) for character in str(value))


def _escape(character: str) -> str:
    if unicodedata.category(character) in UNSAFE_CATEGORIES:
        return character.encode("unicode_escape").decode("ascii")
    return character


def duration(value: float | None) -> str:
    """Return a number of seconds in the units that people use."""
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
