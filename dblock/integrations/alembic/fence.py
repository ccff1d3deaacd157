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
from dblock.errors import InvalidArgument
from dblock.integrations.alembic.drivers import sqlstate

logger = logging.getLogger("dblock")

FENCES = "fenced_store"
FUNCTION = f"{FENCES}.protect_table(regclass, text[], text, boolean, boolean)"
LOCK_NOT_AVAILABLE = "55P03"

LOOK = f"""
    SELECT to_regprocedure('{FUNCTION}') IS NOT NULL AS installed,
           coalesce(has_function_privilege(to_regprocedure('{FUNCTION}'), 'EXECUTE'), false) AS may_call,
           c.oid IS NOT NULL AS exists, coalesce(pg_has_role(c.relowner, 'USAGE'), false) AS owns
    FROM (SELECT to_regclass(:table) AS target) AS t LEFT JOIN pg_class AS c ON c.oid = t.target
"""

IS_PROTECTED = f"""
    SELECT count(*) FROM {FENCES}.protected_tables() AS p
    WHERE p.target = to_regclass(:table) AND p.per = 'table' AND p.strict AND NOT p.warn_only AND p.enabled
"""

PROTECT = f"SELECT {FENCES}.protect_table(to_regclass(:table), NULL, 'table', true, false)"


class Fence:
    """The fence of one version table. `wanted` is True, False, or None for a fence if fenced_store is there."""

    def __init__(self, migrations: Any, wanted: bool | None) -> None:
        self._migrations = migrations
        self._wanted = wanted
        name, schema = migrations.version_table, migrations.version_table_schema
        self._table = {"table": f"{quoted(schema)}.{quoted(name)}" if schema else quoted(name)}
        self._is_missing = False
        """Whether there was no version table yet."""

    def protect_existing(self) -> None:
        """Protect the version table, if it exists, in a transaction of its own, so that it is locked only briefly."""
        if self._wanted is False:
            return
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
        connection = self._migrations.connection
        found = connection.execute(text(LOOK), self._table).one()
        if found.installed and found.may_call and (found.owns or not found.exists):
            self._is_missing |= not found.exists
            if found.exists and not connection.execute(text(IS_PROTECTED), self._table).scalar_one():
                connection.execute(text(PROTECT), self._table)
        elif self._wanted:
            raise InvalidArgument(
                "The version table cannot be fenced: "
                + (
                    "this role may not protect it. Own it, and run: dblock fence grant ROLE."
                    if found.installed
                    else "fenced_store is not installed in this database. Run: dblock fence setup."
                )
            )
        elif found.installed:
            logger.warning("migration: the version table has no fence, because this role may not protect it")
