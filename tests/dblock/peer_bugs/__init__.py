"""Mistakes that other lock libraries have really had, each put into dblock's own code, and the check that finds it.

Every entry names the issues in which users reported the mistake. It changes one of dblock's SQL functions or a part of
its client, in the database or the process of one test. `test_peer_bugs.py` shows that the check fails then. Most checks
are tests of the suite, which pass without the mistake. The others are in these modules, and are run without it too.

docs/concepts/peer-bugs.md has the same list as a table, and a test keeps both equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest

from tests.robustness.mutations import Edit
from tests.support import mutants

FAILURES = (AssertionError, pytest.fail.Exception)


@dataclass(frozen=True)
class PeerBug:
    """One mistake, how it is made here, and the check that must fail with it."""

    issues: tuple[str, ...]
    """Where the mistake was reported: project#number."""
    mistake: str
    """The mistake in one sentence."""
    check: Callable[..., Any] | None = None
    """A test of the suite, or a check of these modules. None if the mistake is made only `elsewhere`."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """The arguments of the check that are no fixtures."""
    edits: tuple[Edit, ...] = ()
    """The mistake in the SQL functions."""
    sql: str = ""
    """A wrong SQL function, run in dblock's schema."""
    patch: Callable[[pytest.MonkeyPatch], None] | None = None
    """The mistake in the client."""
    failures: tuple[type[BaseException], ...] = FAILURES
    elsewhere: str = ""
    """The seeded bug of the robustness suite that is the same mistake."""
    second_stage: bool = False

    @property
    def name(self) -> str:
        return self.issues[0]

    @property
    def place(self) -> str:
        """What is changed: a file of SQL functions, a part of the client, or a seeded bug."""
        files = [edit.file for edit in self.edits]
        if self.sql:
            files.append("a function replaced")
        if self.patch is not None:
            files.append("client")
        return ", ".join(dict.fromkeys(files)) or "seeded bug"

    def insert(self, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make the mistake in this test's database and process."""
        changed: dict[str, str] = {}
        for edit in self.edits:
            text = changed.get(edit.file) or mutants.altered(edit.file, "", "")
            assert edit.right in text, f"{edit.file} no longer contains {edit.right!r}"
            changed[edit.file] = text.replace(edit.right, edit.wrong)
        for text in (*changed.values(), *([self.sql] if self.sql else [])):
            mutants.replace(owner, text)
        if self.patch is not None:
            self.patch(monkeypatch)


def all_peer_bugs() -> list[PeerBug]:
    """Return every entry, by kind of lock."""
    from tests.dblock.peer_bugs import deadlocks, read_write, reentrance, semaphores, several

    return [bug for module in (read_write, reentrance, semaphores, several, deadlocks) for bug in module.BUGS]
