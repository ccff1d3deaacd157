"""Who was refused, and how far tokens have come.

A refusal that is an error undoes everything in its transaction, its own note included. So the client that was told of
it writes the note, over a short connection of its own. That may fail; the refusal stands all the same.
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

from fenced_store._postgres.engines import Where, transaction
from fenced_store._postgres.identifiers import DEFAULT_SCHEMA, check_resource, check_schema, literal, quoted
from fenced_store.errors import InvalidArgument, StaleTokenError
from fenced_store.schema import bindable, check_installed

NOTE_WITHIN = 2
"""Seconds that a note may take to connect, and then to be written."""

logger = logging.getLogger("fenced_store")


@dataclass(frozen=True)
class Rejection:
    """One refusal."""

    resource: str
    offered: int | None
    """The token that was refused; None for a writer that carried none."""
    stored: int | None
    """The token that was in the way."""
    stored_at: datetime | None
    stored_by: str | None
    """Who had superseded the one that was refused."""
    rejected_at: datetime
    rejected: str
    """Who was refused."""
    refused: bool
    """False where the fence only warned."""
    lock: str | None
    """The dblock lock granted with the token in the way, if it is in the same database and was not granted since."""
    holder: str | None
    """Its holder."""


def rejections(
    where: Where, resource: str | None = None, *, limit: int = 100, schema: str = DEFAULT_SCHEMA, locks: str = "dblock"
) -> list[Rejection]:
    """Return the latest refusals, the newest first; for the owner of the schema.

    `locks` is the schema of the dblock whose grants they are joined with, if it is in the same database.
    """
    check_schema(schema)
    if resource is not None:
        check_resource(resource)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InvalidArgument(f"A limit is a whole number from 1; got {limit!r:.80}.")
    with transaction(where, schema) as connection:
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
            # By whom as well: a token that is somebody else's number is no grant of ours.
            join = f"LEFT JOIN {grants} AS l ON l.token = r.stored_token AND starts_with(r.stored_by, l.holder)"
            join = join.replace(":", r"\:")
        found = connection.execute(
            text(
                "SELECT r.resource, r.offered_token, r.stored_token, r.stored_at, r.stored_by, r.rejected_at,"
                f" r.rejected, r.refused, {names}"
                f" FROM {bindable(schema)}.rejections AS r {join}"
                " WHERE CAST(:resource AS text) IS NULL OR r.resource = :resource ORDER BY r.id DESC LIMIT :most"
            ),
            {"resource": resource, "most": limit},
        )
        return [Rejection(*row) for row in found]


def high_water(where: Where, schema: str = DEFAULT_SCHEMA) -> int:
    """Return the highest token that any fence here has seen, protected tables included; 0 for none."""
    check_schema(schema)
    with transaction(where, schema) as connection:
        check_installed(connection, schema)
        return int(connection.execute(text(f"SELECT {bindable(schema)}.high_water()")).scalar_one())


def note(driver: Any, schema: str, error: StaleTokenError, who: str) -> None:
    """Write a refusal down, or log that it could not be; the caller waits for a moment and no longer."""

    def write(conninfo: str, statement: bytes) -> None:
        try:
            with psycopg.connect(conninfo, autocommit=True) as connection:
                connection.execute(statement)
        except Exception as failed:
            logger.warning("a refusal by %r could not be noted: %s", error.resource, failed)

    try:
        writing = threading.Thread(target=write, args=(_beside(driver), _record(schema, error, who)), daemon=True)
        writing.start()
        writing.join(2 * NOTE_WITHIN)
    except Exception as failed:
        logger.warning("a refusal by %r could not be noted: %s", error.resource, failed)


async def note_async(driver: Any, schema: str, error: StaleTokenError, who: str) -> None:
    """Write a refusal down, or log that it could not be; the caller waits for a moment and no longer."""

    async def write() -> None:
        async with await psycopg.AsyncConnection.connect(_beside(driver), autocommit=True) as connection:
            await connection.execute(_record(schema, error, who))

    try:
        await asyncio.wait_for(write(), 2 * NOTE_WITHIN)
    except Exception as failed:
        logger.warning("a refusal by %r could not be noted: %s", error.resource, failed)


def _beside(driver: Any) -> str:
    """Return how to connect to where this connection leads."""
    info = getattr(driver, "info", None)
    if not isinstance(info, psycopg.ConnectionInfo):
        raise TypeError(f"only psycopg's connections tell where they lead, and this is {type(driver).__module__}'s")
    return psycopg.conninfo.make_conninfo(
        info.dsn, password=info.password or None, connect_timeout=NOTE_WITHIN, application_name="fenced_store"
    )


def _record(schema: str, error: StaleTokenError, who: str) -> bytes:
    """Return the note as one statement without parameters, so that it is one message and prepares nothing."""
    at = f"{literal(error.stored_at.isoformat())}::timestamptz" if error.stored_at else "NULL"
    by = literal(error.stored_by) if error.stored_by else "NULL"
    return (
        f"SET statement_timeout = '{NOTE_WITHIN} s'; SELECT {quoted(schema)}.record_rejection("
        f"{literal(error.resource)}, {error.offered}, {error.stored}, {at}, {by}, {literal(who)})"
    ).encode()
