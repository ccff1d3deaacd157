"""What tests of `dblock migrate` ask the database: the ledger, the marked sessions, and what becomes of them."""

from __future__ import annotations

from typing import Any

import psycopg


def outcomes(dsn: str) -> list[str | None]:
    """Return how the runs of all migrations ended, the oldest first."""
    return [row[0] for row in query(dsn, "SELECT outcome FROM dblock.migration_runs ORDER BY run")]


def errors(dsn: str) -> list[str | None]:
    """Return what the runs have reported, the oldest first."""
    return [row[0] for row in query(dsn, "SELECT error FROM dblock.migration_runs ORDER BY run")]


def marked(dsn: str, state: str = "%") -> int:
    """Return how many sessions of a migration there are, in one state or in any."""
    ((count,),) = query(
        dsn,
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE 'dblock-migrate:%%' AND coalesce(state, '') LIKE %s",
        state,
    )
    return int(count)


def query(dsn: str, statement: str, *arguments: object) -> list[tuple[Any, ...]]:
    """Return the rows of a statement, over a connection of its own."""
    with psycopg.connect(dsn, autocommit=True, application_name="test") as connection:
        cursor = connection.execute(statement.encode(), arguments or None)
        return cursor.fetchall() if cursor.description else []
