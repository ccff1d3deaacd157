"""Record a rejection in the log that `rejections` reads.

A rejection that is raised as an error rolls back its transaction, and would roll back its own log entry too. The client
that receives the error therefore records it, over a short connection of its own. If that fails, the rejection still
stands.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import psycopg

from fenced_store._postgres.connections import connect, connect_async
from fenced_store._postgres.identifiers import literal, quoted
from fenced_store.errors import StaleTokenError

RECORD_TIMEOUT = 2
"""Seconds for connecting to record a rejection, and again for the statement."""

_log = logging.getLogger("fenced_store")


def record_rejection(driver: Any, schema: str, error: StaleTokenError, writer: str) -> None:
    """Record a rejection, or log that this failed. The caller waits for at most twice RECORD_TIMEOUT."""

    def record(conninfo: str, statement: bytes) -> None:
        try:
            with connect(conninfo, RECORD_TIMEOUT) as connection:
                connection.autocommit = True
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
        async with await connect_async(_conninfo_of(driver), RECORD_TIMEOUT) as connection:
            await connection.set_autocommit(True)
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
        info.dsn,
        password=info.password or None,
        connect_timeout=RECORD_TIMEOUT,
        application_name="fenced_store",
        client_encoding="UTF8",
    )


def _record_statement(schema: str, error: StaleTokenError, writer: str) -> bytes:
    """Return SQL without parameters, so that it is sent as one message and prepares no statement."""
    at = f"{literal(error.stored_at.isoformat())}::timestamptz" if error.stored_at else "NULL"
    by = literal(error.stored_by) if error.stored_by else "NULL"
    return (
        # LOCAL, because behind a pooler the next transaction of another client may run in the same session.
        f"BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL statement_timeout = '{RECORD_TIMEOUT} s';"
        f" SELECT {quoted(schema)}.record_rejection({literal(error.resource)}, {error.offered}, {error.stored}, {at},"
        f" {by}, {literal(writer)}); COMMIT"
    ).encode()
