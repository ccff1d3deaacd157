"""Arguments and columns of statements, which are text."""

from __future__ import annotations

import re
from functools import lru_cache

_ITEM = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


class UnknownStatement(Exception):
    """The store cannot execute this."""


def text(value: str | None) -> str:
    """Return an argument that is never NULL."""
    assert value is not None
    return value


@lru_cache(maxsize=256)
def seconds(interval: str | None) -> float:
    """Return the seconds of an interval."""
    return float(text(interval).removesuffix(" s"))


def items(values: str | None) -> list[str]:
    """Return the items of an array."""
    inside = text(values)[1:-1]
    if not inside:
        return []
    if inside[0] != '"':
        return inside.split(",")
    found = inside[1:-1].split('","') if "\\" not in inside else _ITEM.findall(inside)
    return [_ESCAPED.sub(r"\1", one) for one in found] if "\\" in inside else found


def boolean(value: bool | None) -> str | None:
    """Return a boolean as a column of a reply."""
    return None if value is None else "t" if value else "f"


def number(value: float | None) -> str | None:
    """Return a number as a column of a reply."""
    return None if value is None else repr(value)
