"""Bugs to be put in, one at a time, to prove that the checkers can find them. None of them is in what we ship.

A bug is a change of the SQL functions, or of the client in the processes of the traffic, or of both. Many show only if
two things happen at once, and then it also says where to lose time, so that they do. That is kept apart: with the time
lost and nothing else changed, the same scenario must be clean, or what was found would prove nothing.
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
"""After the name of a bug: what only loses time, and nothing wrong."""


class Edit(NamedTuple):
    """One thing in a file of SQL functions, and what to put in its place."""

    file: str
    right: str
    wrong: str
    schema: str = "dblock"


@dataclass(frozen=True)
class Bug:
    """One bug: where it is put in, where it should be met, and what should find it."""

    name: str
    what: str
    found_by: tuple[str, ...]
    """The checkers, any of which will do."""
    workload: str = "mutex"
    fault: str = "none"
    workers: int = 4
    seconds: float = 2.0
    strikes: int | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    """What is wrong in the SQL functions."""
    sql: str = ""
    """What else is done to the database, in dblock's schema."""
    client: Callable[[], None] | None = None
    """What is wrong in the client; called in each process of the traffic, before anything else."""
    slow_edits: tuple[Edit, ...] = ()
    """Where the SQL functions lose time. Made first."""
    slow_client: Callable[[], None] | None = None
    """Where the client loses time, or an answer."""


def all_bugs() -> dict[str, Bug]:
    """Return every bug by its name."""
    from tests.robustness.mutations import fences, leases, tickets, tokens, trust

    found = [*tokens.BUGS, *leases.BUGS, *trust.BUGS, *tickets.BUGS, *fences.BUGS]
    assert len({bug.name for bug in found}) == len(found), "every bug has a name of its own"
    return {bug.name: bug for bug in found}


def install(name: str | None, dsn: str) -> None:
    """Put a bug of the SQL functions into a database."""
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
    """Return the files of SQL that a bug changes, by schema and name, as they are with it."""
    texts: dict[tuple[str, str], str] = {}
    for edit in (*bug.slow_edits, *(bug.edits if wrong else ())):
        text = texts.get((edit.schema, edit.file)) or _file(edit).read_text()
        assert edit.right in text, f"{edit.file} does not contain {edit.right!r} any more: alter what it does contain"
        texts[edit.schema, edit.file] = text.replace(edit.right, edit.wrong)
    return texts


def put_in(name: str | None) -> None:
    """Put a bug of the client into this process."""
    if name is None:
        return
    bug, wrong = _named(name)
    if bug.slow_client is not None:
        bug.slow_client()
    if wrong and bug.client is not None:
        bug.client()


def _named(name: str) -> tuple[Bug, bool]:
    """Return a bug, and whether anything is to be wrong."""
    return all_bugs()[name.removesuffix(ONLY_SLOW)], not name.endswith(ONLY_SLOW)


def _file(edit: Edit) -> Path:
    if edit.schema == "fenced_store":
        return Path(fenced_store.__file__).parent / "sql" / edit.file
    (path,) = (path for path in function_files() if path.name == edit.file)
    return path
