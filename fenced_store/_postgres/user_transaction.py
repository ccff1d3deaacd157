"""A transaction of the user's own, on a psycopg connection, or a SQLAlchemy Connection or Session, of either kind.

A statement is written once, with {name} where a value goes. Errors come through as the user's library raises them.
"""

from __future__ import annotations

import sys
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from fenced_store._postgres.identifiers import quoted
from fenced_store.errors import InvalidArgument


class UsersTransaction:
    """A connection with a transaction under way, whatever library it belongs to."""

    def __init__(self, connection: Any, schema: str) -> None:
        if hasattr(connection, "registry") and callable(connection):
            connection = connection()  # the session that a scoped_session stands for
        self._given = connection
        self._schema = quoted(schema)
        self._driver: Any = None
        """The driver's own connection, once it is known."""
        kinds = _kinds()
        for kind, (is_async, by_sqlalchemy, is_session) in kinds.items():
            if isinstance(connection, kind):
                self.is_async, self._by_sqlalchemy, self._is_session = is_async, by_sqlalchemy, is_session
                return
        raise InvalidArgument(
            "A fence needs a connection with a transaction under way, psycopg's or a SQLAlchemy Connection or Session; "
            f"got {type(connection).__module__}.{type(connection).__name__}."
        )

    @property
    def driver(self) -> Any:
        """The driver's own connection, if a statement has been sent."""
        return self._driver

    @property
    def ended(self) -> bool:
        """Whether no transaction is under way any more."""
        if self._by_sqlalchemy:
            return not self._given.in_transaction()
        return bool(self._given.info.transaction_status == TransactionStatus.IDLE)

    @property
    def usable(self) -> bool:
        """Whether another statement can be sent in it: it goes on, and has not failed."""
        info = getattr(self._driver, "info", None)
        return (
            not self.ended
            and isinstance(info, psycopg.ConnectionInfo)
            and info.transaction_status == TransactionStatus.INTRANS
        )

    def row(self, statement: str, **values: Any) -> tuple[Any, ...]:
        """Send a statement, and return the one row of its answer."""
        if not self._by_sqlalchemy:
            self._check_psycopg()
            with self._given.cursor(row_factory=tuple_row) as cursor:
                return tuple(cursor.execute(self._for_psycopg(statement, values), values).fetchone())
        connection = self._given.connection() if self._is_session else self._given
        self._check_sqlalchemy(connection, connection.connection)
        return tuple(connection.execute(self._for_sqlalchemy(statement, values), values).one())

    async def row_async(self, statement: str, **values: Any) -> tuple[Any, ...]:
        """Send a statement, and return the one row of its answer."""
        if not self._by_sqlalchemy:
            self._check_psycopg()
            async with self._given.cursor(row_factory=tuple_row) as cursor:
                await cursor.execute(self._for_psycopg(statement, values), values)
                return tuple(await cursor.fetchone())
        connection = (await self._given.connection()) if self._is_session else self._given
        self._check_sqlalchemy(connection, await connection.get_raw_connection())
        return tuple((await connection.execute(self._for_sqlalchemy(statement, values), values)).one())

    def flush(self) -> None:
        """Send what a session has yet to send."""
        if self._is_session:
            self._given.flush()

    async def flush_async(self) -> None:
        """Send what a session has yet to send."""
        if self._is_session:
            await self._given.flush()

    def _check_psycopg(self) -> None:
        self._driver = self._given
        # A transaction() block in an autocommit connection is a transaction like any other.
        _check_autocommit(self._given.autocommit and self.ended)

    def _check_sqlalchemy(self, connection: Any, raw: Any) -> None:
        if connection.dialect.name != "postgresql":
            raise InvalidArgument(f"A fence lives in postgresql, not in {connection.dialect.name}.")
        self._driver = raw.driver_connection
        _check_autocommit(bool(getattr(raw.dbapi_connection, "autocommit", False)))

    def _for_psycopg(self, statement: str, values: dict[str, Any]) -> bytes:
        places = {name: f"%({name})s" for name in values}
        return statement.replace("%", "%%").format(schema=self._schema.replace("%", "%%"), **places).encode()

    def _for_sqlalchemy(self, statement: str, values: dict[str, Any]) -> Any:
        from sqlalchemy import text

        places = {name: f":{name}" for name in values}
        return text(statement.format(schema=self._schema.replace(":", r"\:"), **places))


def _kinds() -> dict[type, tuple[bool, bool, bool]]:
    """Return each kind of connection, with whether it is asynchronous, SQLAlchemy's, and a session."""
    kinds: dict[type, tuple[bool, bool, bool]] = {
        psycopg.Connection: (False, False, False),
        psycopg.AsyncConnection: (True, False, False),
    }
    # Whoever has one of SQLAlchemy's in hand has imported it.
    if "sqlalchemy" in sys.modules:
        from sqlalchemy import Connection
        from sqlalchemy.orm import Session

        kinds |= {Connection: (False, True, False), Session: (False, True, True)}
    if "sqlalchemy.ext.asyncio" in sys.modules:
        from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

        kinds |= {AsyncConnection: (True, True, False), AsyncSession: (True, True, True)}
    return kinds


def _check_autocommit(autocommit: bool) -> None:
    if autocommit:
        raise InvalidArgument(
            "This connection is in autocommit and has no transaction under way, so a fence taken on it would protect "
            "nothing. Begin a transaction first."
        )
