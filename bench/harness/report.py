"""The folder of a run: one JSON file per question with its tables, and one picture per table.

A file is replaced in one step when its question has been answered, so an interrupted run leaves whole answers only.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import dblock
from bench.harness import picture
from bench.harness.table import Table

Answer = dict[str, Any]
"""The JSON data of a question: `question`, `asks` and `tables`."""


def code() -> str:
    """Return a digest of dblock's own code, so that answers about two states of it can be told apart."""
    package, digest = Path(dblock.__file__).parent, hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.sql")]):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def load(folder: Path) -> list[Answer]:
    """Return the answers in a folder."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def about(answer: Answer) -> dict[str, Any]:
    """Return what an answer tells about its run: the same for all its tables."""
    found: dict[str, Any] = answer["tables"][0]["about"] if answer["tables"] else {}
    return found


def tables(answer: Answer) -> list[Table]:
    """Return the tables of an answer."""
    return [Table.of(data) for data in answer["tables"]]


class Report:
    """A folder that a run writes to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, name: str, asks: str, answered: list[Table]) -> None:
        """Write the answer of a question and its pictures."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for table in answered:
            if table.picture != "none":
                _write(self.folder / f"{table.name}.svg", picture.draw(table, asks))
        answer = {"question": name, "asks": asks, "tables": [table.data() for table in answered]}
        _write(self.folder / f"{name}.json", json.dumps(answer, indent=1, ensure_ascii=False) + "\n")

    def earlier(self) -> dict[str, Answer]:
        """Return the answers that are here, by question."""
        return {answer["question"]: answer for answer in load(self.folder)}


def reason_to_ask_again(answer: Answer, options: dict[str, Any], of: str) -> str:
    """Return why an earlier answer does not count for a run with these options of this code, or nothing."""
    then = about(answer)
    if not then:
        return "it has no tables"
    if then.get("options") != options:
        return "it was asked with other options"
    if then.get("code") != of:
        return "dblock has changed since"
    if then.get("failed"):
        return f"{', '.join(then['failed'])} failed"
    return ""


def _write(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)
