"""Protect Alembic's version table with a fence of fenced_store, as a whole and strictly.

An `alembic upgrade` without the gate carries no token, and one of a stale holder carries a lower one. Both then fail at
their version row, and the DDL of their transaction goes with it.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from dblock._core.options import quoted
from dblock.integrations.alembic.drivers import sqlstate
from dblock.recipes.migrations.version_fence import protect

logger = logging.getLogger("dblock")

LOCK_NOT_AVAILABLE = "55P03"


class Fence:
    """The fence of one version table. `wanted` is True, False, or None for a fence if fenced_store is there."""

    def __init__(self, migrations: Any, wanted: bool | None) -> None:
        self._migrations = migrations
        self._wanted = wanted
        name, schema = migrations.version_table, migrations.version_table_schema
        self._table = f"{quoted(schema)}.{quoted(name)}" if schema else quoted(name)
        self._is_missing = False
        """Whether there was no version table yet."""

    def protect_existing(self) -> None:
        """Protect the version table, if it exists, in a transaction of its own, so that it is locked only briefly."""
        connection = self._migrations.connection
        try:
            with contextlib.nullcontext() if connection.in_transaction() else connection.begin():
                self._protect()
        except DBAPIError as error:
            if self._wanted or connection.in_transaction() or sqlstate(error) != LOCK_NOT_AVAILABLE:
                raise
            logger.warning("migration: the version table has no fence yet, because it was in use: %s", error.orig)

    def protect_new(self) -> None:
        """Create and protect a version table that did not exist before, in the transaction of the migrations."""
        if not self._is_missing:
            return
        connection = self._migrations.connection
        self._migrations._ensure_version_table()
        with contextlib.nullcontext() if connection.in_transaction() else connection.begin():
            self._protect()

    def _protect(self) -> None:
        self._is_missing |= not protect(self._ask, self._table, self._wanted)

    def _ask(self, statement: str) -> Any:
        # SQLAlchemy would read a colon as the begin of a parameter.
        return self._migrations.connection.execute(text(statement.replace(":", "\\:"))).one()
