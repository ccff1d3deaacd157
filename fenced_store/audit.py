"""The log of rejections, and the highest token seen.

A rejection that is raised as an error rolls back its transaction, and would roll back its own log entry too. The client
that receives the error therefore records it, over a short connection of its own. If that fails, the rejection still
stands.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from sqlalchemy import text

from fenced_store._postgres.engines import Database, transaction
from fenced_store._postgres.identifiers import DEFAULT_SCHEMA, check_resource, check_schema, literal, quoted
from fenced_store.errors import InvalidArgument, StaleTokenError
from fenced_store.schema import check_installed, quoted_for_text

RECORD_TIMEOUT = 2
"""Seconds for connecting to record a rejection, and again for the statement."""

_log = logging.getLogger("fenced_store")


@dataclass(frozen=True)
class Rejection:
    """One rejected write, or one that a warn-only fence let through."""

    resource: str
    offered: int | None
    """The rejected token; None for a writer without a token."""
    stored: int | None
    """The higher token that the resource had seen."""
    stored_at: datetime | None
    stored_by: str | None
    """The writer that had superseded the rejected writer."""
    rejected_at: datetime
    rejected: str
    """The rejected writer."""
    refused: bool
    """False if the fence only warned."""
    lock: str | None
    """The dblock lock granted with the stored token, if it is in this database and was not granted again since."""
    holder: str | None
    """The holder of that lock."""


def rejections(
    database: Database,
    resource: str | None = None,
    *,
    limit: int = 100,
    schema: str = DEFAULT_SCHEMA,
    locks: str = "dblock",
) -> list[Rejection]:
    """Return the latest rejections, newest first. Only the owner of the schema may read them.

    `locks` is the schema of dblock. If it is in the same database, each rejection is joined with its lock's grant.
    """
    check_schema(schema)
    if resource is not None:
        check_resource(resource)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InvalidArgument(f"limit is a whole number from 1; got {limit!r:.80}.")
    with transaction(database, schema) as connection:
        check_installed(connection, schema)
        grants = f"{quoted(check_schema(locks))}.distributed_locks"
        may_read = connection.execute(
            text(
                "SELECT has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(n.oid, 'USAGE')"
                " FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace"
                " WHERE n.nspname = :locks AND c.relname = 'distributed_locks'"
            ),
            {"locks": locks},
        ).scalar()
        names, join = "NULL, NULL", ""
        if may_read:
            names = "l.name, l.holder"
            # Join on the holder as well: a token of another lock service may equal the token of a dblock grant.
            join = f"LEFT JOIN {grants} AS l ON l.token = r.stored_token AND starts_with(r.stored_by, l.holder)"
            join = join.replace(":", r"\:")
        found = connection.execute(
            text(
                "SELECT r.resource, r.offered_token, r.stored_token, r.stored_at, r.stored_by, r.rejected_at,"
                f" r.rejected, r.refused, {names}"
                f" FROM {quoted_for_text(schema)}.rejections AS r {join}"
                " WHERE CAST(:resource AS text) IS NULL OR r.resource = :resource ORDER BY r.id DESC LIMIT :limit"
            ),
            {"resource": resource, "limit": limit},
        )
        return [Rejection(*row) for row in found]


def high_water(database: Database, schema: str = DEFAULT_SCHEMA) -> int:
    """Return the highest token that any fence in this schema has seen, protected tables included; 0 for none."""
    check_schema(schema)
    with transaction(database, schema) as connection:
        check_installed(connection, schema)
        return int(connection.execute(text(f"SELECT {quoted_for_text(schema)}.high_water()")).scalar_one())


def record_rejection(driver: Any, schema: str, error: StaleTokenError, writer: str) -> None:
    """Record a rejection, or log that this failed. The caller waits for at most twice RECORD_TIMEOUT."""

    def record(conninfo: str, statement: bytes) -> None:
        try:
            with psycopg.connect(conninfo, autocommit=True) as connection:
                connection.execute(statement)
        except Exception as failed:
            _warn(error, failed)

    try:
        args = (_conninfo_of(driver), _record_statement(schema, error, writer))
        recorder = threading.Thread(target=record, args=args, daemon=True)
        recorder.start()
        recorder.join(2 * RECORD_TIMEOUT)
    except Exception as failed:
        _warn(error, failed)


async def record_rejection_async(driver: Any, schema: str, error: StaleTokenError, writer: str) -> None:
    """Record a rejection, or log that this failed. The caller waits for at most twice RECORD_TIMEOUT."""

    async def record() -> None:
        async with await psycopg.AsyncConnection.connect(_conninfo_of(driver), autocommit=True) as connection:
            await connection.execute(_record_statement(schema, error, writer))

    try:
        await asyncio.wait_for(record(), 2 * RECORD_TIMEOUT)
    except Exception as failed:
        _warn(error, failed)


def _warn(error: StaleTokenError, failed: Exception) -> None:
    _log.warning("rejection by resource %r was not recorded: %s", error.resource, failed)


def _conninfo_of(driver: Any) -> str:
    """Return the conninfo of a connection, to open another one to the same database."""
    info = getattr(driver, "info", None)
    if not isinstance(info, psycopg.ConnectionInfo):
        raise TypeError(f"only psycopg's connections say which database they use; this is {type(driver).__module__}'s")
    return psycopg.conninfo.make_conninfo(
        info.dsn, password=info.password or None, connect_timeout=RECORD_TIMEOUT, application_name="fenced_store"
    )


def _record_statement(schema: str, error: StaleTokenError, writer: str) -> bytes:
    """Return SQL without parameters, so that it is sent as one message and prepares no statement."""
    at = f"{literal(error.stored_at.isoformat())}::timestamptz" if error.stored_at else "NULL"
    by = literal(error.stored_by) if error.stored_by else "NULL"
    return (
        f"SET statement_timeout = '{RECORD_TIMEOUT} s'; SELECT {quoted(schema)}.record_rejection("
        f"{literal(error.resource)}, {error.offered}, {error.stored}, {at}, {by}, {literal(writer)})"
    ).encode()
