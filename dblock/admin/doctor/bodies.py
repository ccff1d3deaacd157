"""What our functions should be: read from the very files that an install runs."""

from __future__ import annotations

import re
from typing import NamedTuple

from dblock.admin.schema import function_files

_FUNCTION = re.compile(
    r"^CREATE OR REPLACE FUNCTION (?P<name>\w+)\((?P<head>.*?)\nAS \$\$(?P<body>.*?)\$\$;", re.DOTALL | re.MULTILINE
)


class Body(NamedTuple):
    """A function of ours, as far as it can be compared."""

    body: str
    is_definer: bool
    """Whether it runs with its owner's rights."""
    keeps_path: bool
    """Whether it has a search path of its own."""


def bodies() -> dict[str, Body]:
    """Return our functions by name; none has more than one form."""
    found: dict[str, Body] = {}
    for file in function_files():
        for one in _FUNCTION.finditer(file.read_text(encoding="utf-8")):
            head = one["head"]
            found[one["name"]] = Body(one["body"], "SECURITY DEFINER" in head, "SET search_path FROM CURRENT" in head)
    return found
