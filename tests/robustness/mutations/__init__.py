"""Insert bugs, one at a time, to prove that the checkers can find them. No bug is in the shipped code.

A bug changes the SQL functions, or the client in the traffic processes, or both. Many bugs show only in a race, so they
also say where to sleep to make the race likely. The sleeps are kept apart: with the sleeps and no other change, the
same scenario must be clean. Otherwise a finding would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psycopg

import fenced_store
from dblock.admin.schema import function_files

ONLY_SLOW = ", only slow"
"""Suffix of a bug's name that inserts its delays and no mistake."""


class Edit(NamedTuple):
    """A text in a file of SQL functions, and its replacement."""

    file: str
    right: str
    wrong: str
    schema: str = "dblock"


@dataclass(frozen=True)
class Bug:
    """One bug: what it changes, the scenario that should provoke it, and the checkers that should find it."""

    name: str
    what: str
    found_by: tuple[str, ...]
    """The checkers. It is enough if one of them finds the bug."""
    workload: str = "mutex"
    fault: str = "none"
    workers: int = 4
    seconds: float = 2.0
    strikes: int | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    """The mistakes in the SQL functions."""
    sql: str = ""
    """Further SQL, run in dblock's schema."""
    client: Callable[[], None] | None = None
    """The mistake in the client; called first in each traffic process."""
    slow_edits: tuple[Edit, ...] = ()
    """The delays in the SQL functions. Applied first."""
    slow_client: Callable[[], None] | None = None
    """The delays or lost replies in the client."""


def all_bugs() -> dict[str, Bug]:
    """Return every bug by its name."""
    from tests.robustness.mutations import (
        elections,
        fences,
        leases,
        probes,
        schedules,
        shared_locks,
        tickets,
        tokens,
        trust,
    )

    modules = (tokens, leases, trust, probes, tickets, fences, schedules, elections, shared_locks)
    found: list[Bug] = [bug for module in modules for bug in module.BUGS]
    assert len({bug.name for bug in found}) == len(found), "two bugs have the same name"
    return {bug.name: bug for bug in found}


def insert_into_database(name: str | None, dsn: str) -> None:
    """Insert the SQL part of a bug into a database."""
    if name is None:
        return
    bug, wrong = _named(name)
    with psycopg.connect(dsn) as owner:
        for (schema, _), text in edited(bug, wrong).items():
            owner.execute(f"SET LOCAL search_path TO {schema}, pg_temp".encode())
            owner.execute(text.encode())
        if wrong and bug.sql:
            owner.execute("SET LOCAL search_path TO dblock, pg_temp")
            owner.execute(bug.sql.encode())


def edited(bug: Bug, wrong: bool = True) -> dict[tuple[str, str], str]:
    """Return the SQL files that a bug changes, by schema and name, with the bug in them."""
    texts: dict[tuple[str, str], str] = {}
    for edit in (*bug.slow_edits, *(bug.edits if wrong else ())):
        text = texts.get((edit.schema, edit.file)) or _file(edit).read_text()
        assert edit.right in text, f"{edit.file} does not contain {edit.right!r} any more: update the edit"
        texts[edit.schema, edit.file] = text.replace(edit.right, edit.wrong)
    return texts


def insert_into_client(name: str | None) -> None:
    """Insert the client part of a bug into this process."""
    if name is None:
        return
    bug, wrong = _named(name)
    if bug.slow_client is not None:
        bug.slow_client()
    if wrong and bug.client is not None:
        bug.client()


def _named(name: str) -> tuple[Bug, bool]:
    """Return a bug, and whether to insert its mistakes besides its delays."""
    return all_bugs()[name.removesuffix(ONLY_SLOW)], not name.endswith(ONLY_SLOW)


def _file(edit: Edit) -> Path:
    if edit.schema == "fenced_store":
        return Path(fenced_store.__file__).parent / "sql" / edit.file
    (path,) = (path for path in function_files() if path.name == edit.file)
    return path
