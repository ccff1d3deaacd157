"""The text of the scripts that a migration is about to run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

IGNORED = re.compile(r"\.|__pycache__$")
"""Names of files and folders inside a folder of scripts that are no scripts."""


def text_of(paths: Iterable[Path]) -> str:
    """Return the text of these files, and of all files in these folders and in the folders below."""
    return "\n".join(file.read_text(encoding="utf-8", errors="replace") for path in paths for file in _files(path))


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for below in sorted(path.iterdir()):
        if not IGNORED.match(below.name):
            yield from _files(below)
