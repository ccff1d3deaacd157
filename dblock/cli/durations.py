"""Durations as people write them on a command line: 90, 45s, 10m, 1h30m, 7d."""

from __future__ import annotations

import re

import click

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}

_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|min|[smhdw])")


def seconds(text: str | float) -> float:
    """Return a duration in seconds: a number, or numbers with units. For the `type` of an option."""
    try:
        return float(text)
    except ValueError:
        parts = _PART.findall(str(text))
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise click.BadParameter(f"{text!r} is not a time. Write it as in 90, 45s, 10m, 1h30m or 7d.")
    return sum(float(number) * UNITS[unit] for number, unit in parts)


def waiting_time(text: str | float) -> float:
    """Return a duration of zero or more, in seconds. For the `type` of an option."""
    value = seconds(text)
    if not value >= 0:
        raise click.BadParameter(f"{text!r} is less than 0.")
    return value


def written(value: float) -> str:
    """Return a number of seconds as `seconds` reads it, in units of a day and below."""
    if 0 < value < 1:
        return f"{value * 1000:g}ms"
    parts = []
    for unit in ("d", "h", "m"):
        count, value = divmod(value, UNITS[unit])
        if count:
            parts.append(f"{count:.0f}{unit}")
    if value or not parts:
        parts.append(f"{value:g}s")
    return "".join(parts)
