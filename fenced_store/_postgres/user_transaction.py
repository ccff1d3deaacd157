"""The user's own transaction: of psycopg, SQLAlchemy (a Connection or a Session, sync or async) or Django.

A statement is written once, with {name} for each value. Errors are raised as the user's library raises them. Nothing is
prepared, because behind a pooler the transaction may run on a backend that does not know the statement.
"""

from __future__ import annotations

import sys
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from fenced_store._postgres.connections import LimitedCall
from fenced_store._postgres.identifiers import quoted
from fenced_store.errors import InvalidArgument


class UserTransaction:
    """A connection with an open transaction, of any supported library."""

    def __init__(self, connection: Any, schema: str) -> None:
        if hasattr(connection, "registry") and callable(connection):
            connection = connection()  # the session that a scoped_session stands for
        if hasattr(connection, "ensure_connection"):
            connection.ensure_connection()
            connection = connection.connection  # the driver's, behind Django's
        self._connection = connection
        self._schema = quoted(schema)
        self._driver: Any = None
        """The driver's own connection, once it is known."""
        for kind, (is_async, is_sqlalchemy, is_session) in _connection_types().items():
            if isinstance(connection, kind):
                self.is_async, self._is_sqlalchemy, self._is_session = is_async, is_sqlalchemy, is_session
                return
        raise InvalidArgument(
            "A fence needs a connection with an open transaction: psycopg's, a SQLAlchemy Connection or Session, or "
            f"Django's over psycopg 3; got {type(connection).__module__}.{type(connection).__name__}."
        )

    @property
    def driver(self) -> Any:
        """The driver's own connection, if a statement has been sent."""
        return self._driver

    @property
    def ended(self) -> bool:
        """Whether the transaction has ended."""
        if self._is_sqlalchemy:
            return not self._connection.in_transaction()
        return bool(self._connection.info.transaction_status == TransactionStatus.IDLE)

    @property
    def usable(self) -> bool:
        """Whether the transaction can take another statement: it is open and has not failed."""
        info = getattr(self._driver, "info", None)
        return (
            not self.ended
            and isinstance(info, psycopg.ConnectionInfo)
            and info.transaction_status == TransactionStatus.INTRANS
        )

    def fetch_row(self, statement: str, **values: Any) -> tuple[Any, ...]:
        """Execute a statement and return its one row."""
        if not self._is_sqlalchemy:
            self._check_psycopg()
            with LimitedCall(self._driver), self._connection.cursor(row_factory=tuple_row) as cursor:
                return tuple(cursor.execute(self._for_psycopg(statement, values), values).fetchone())
        connection = self._connection.connection() if self._is_session else self._connection
        self._check_sqlalchemy(connection, connection.connection)
        with LimitedCall(self._driver):
            return tuple(connection.execute(self._for_sqlalchemy(statement, values), values).one())

    async def fetch_row_async(self, statement: str, **values: Any) -> tuple[Any, ...]:
        """Execute a statement and return its one row."""
        if not self._is_sqlalchemy:
            self._check_psycopg()
            with LimitedCall(self._driver):
                async with self._connection.cursor(row_factory=tuple_row) as cursor:
                    await cursor.execute(self._for_psycopg(statement, values), values)
                    return tuple(await cursor.fetchone())
        connection = (await self._connection.connection()) if self._is_session else self._connection
        self._check_sqlalchemy(connection, await connection.get_raw_connection())
        with LimitedCall(self._driver):
            return tuple((await connection.execute(self._for_sqlalchemy(statement, values), values)).one())

    def flush(self) -> None:
        """Flush the pending changes of a session."""
        if self._is_session:
            self._connection.flush()

    async def flush_async(self) -> None:
        """Flush the pending changes of a session."""
        if self._is_session:
            await self._connection.flush()

    def _check_psycopg(self) -> None:
        self._driver = self._connection
        # A transaction() block on an autocommit connection is a transaction like any other.
        _check_autocommit(self._connection.autocommit and self.ended)

    def _check_sqlalchemy(self, connection: Any, raw: Any) -> None:
        if connection.dialect.name != "postgresql":
            raise InvalidArgument(f"A fence needs postgresql; this connection is to {connection.dialect.name}.")
        self._driver = raw.driver_connection
        _check_autocommit(bool(getattr(raw.dbapi_connection, "autocommit", False)))

    def _for_psycopg(self, statement: str, values: dict[str, Any]) -> bytes:
        placeholders = {name: f"%({name})s" for name in values}
        return statement.replace("%", "%%").format(schema=self._schema.replace("%", "%%"), **placeholders).encode()

    def _for_sqlalchemy(self, statement: str, values: dict[str, Any]) -> Any:
        from sqlalchemy import text

        placeholders = {name: f":{name}" for name in values}
        return text(statement.format(schema=self._schema.replace(":", r"\:"), **placeholders))


def _connection_types() -> dict[type, tuple[bool, bool, bool]]:
    """Return each supported type, with whether it is asynchronous, SQLAlchemy's, and a session."""
    types: dict[type, tuple[bool, bool, bool]] = {
        psycopg.Connection: (False, False, False),
        psycopg.AsyncConnection: (True, False, False),
    }
    # A caller that has a connection of SQLAlchemy's has imported SQLAlchemy.
    if "sqlalchemy" in sys.modules:
        from sqlalchemy import Connection
        from sqlalchemy.orm import Session

        types |= {Connection: (False, True, False), Session: (False, True, True)}
    if "sqlalchemy.ext.asyncio" in sys.modules:
        from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

        types |= {AsyncConnection: (True, True, False), AsyncSession: (True, True, True)}
    return types


def _check_autocommit(autocommit: bool) -> None:
    if autocommit:
        raise InvalidArgument(
            "This connection is in autocommit mode and has no open transaction, so a fence would protect nothing. "
            "Begin a transaction first."
        )
