"""Every public SQL function has a comment, so that psql's \\df+ explains it."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest

from dblock.admin.privileges import PRIVILEGES, functions

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "sql.md").read_text()


def documented(schema: str) -> set[str]:
    """Return the functions that the reference lists in its tables."""
    if schema == "dblock":
        table = PAGE[PAGE.index("## All functions") : PAGE.index("## Hold a lock")]
        return set(re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table.splitlines() if "|" in row)))
    return set(re.findall(r"^\| `(\w+)\(", PAGE[PAGE.index("## fenced_store") :], re.MULTILINE))


@pytest.mark.parametrize("schema", ["dblock", "fenced_store"])
def test_every_public_function_has_a_comment(owner: psycopg.Connection, schema: str) -> None:
    rows = owner.execute(
        "SELECT proname, obj_description(oid, 'pg_proc') FROM pg_proc WHERE pronamespace = %s::regnamespace", [schema]
    ).fetchall()
    commented = {name for name, text in rows if text}
    public = documented(schema) | (set(functions(PRIVILEGES)) if schema == "dblock" else set())
    assert len(public) > 10
    assert commented == public
