"""The expected functions, read from the files that an install runs."""

from __future__ import annotations

import re
from typing import NamedTuple

from dblock.admin.schema import function_files

_FUNCTION = re.compile(
    r"^CREATE OR REPLACE FUNCTION (?P<name>\w+)\((?P<head>.*?)\nAS \$\$(?P<body>.*?)\$\$;", re.DOTALL | re.MULTILINE
)


class Body(NamedTuple):
    """The properties of a function that the doctor compares."""

    body: str
    is_definer: bool
    """Whether it runs with its owner's privileges."""
    keeps_path: bool
    """Whether it fixes its search path."""


def bodies() -> dict[str, Body]:
    """Return dblock's functions by name. No name has two signatures."""
    found: dict[str, Body] = {}
    for file in function_files():
        for one in _FUNCTION.finditer(file.read_text(encoding="utf-8")):
            head = one["head"]
            found[one["name"]] = Body(one["body"], "SECURITY DEFINER" in head, "SET search_path FROM CURRENT" in head)
    return found
