"""Calls of dblock's functions inside the user's own transaction, of psycopg, SQLAlchemy or Django.

Database errors come through as the user's library raises them. The transaction belongs to the user, and so does the
decision how to handle them. Only the errors of a database that is not the lock's become InvalidArgument.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dblock._core.options import quoted
from dblock.errors import InvalidArgument


class UserTransaction:
    """A connection with an open transaction, of any supported library."""

    def __init__(self, connection: Any, schema: str, installation: str, *, wants_async: bool) -> None:
        if hasattr(connection, "registry") and callable(connection):
            connection = connection()  # the current session of a scoped_session
        if hasattr(connection, "ensure_connection"):
            connection.ensure_connection()
            connection = connection.connection  # the driver's, behind Django's
        self._connection = connection
        self._schema = quoted(schema)
        self._installation = installation
        kinds = _kinds(wants_async)
        self._by_sqlalchemy = isinstance(connection, kinds[1:])
        if not isinstance(connection, kinds):
            which = "an asynchronous" if wants_async else "a synchronous"
            raise InvalidArgument(
                f"This lease needs {which} connection with an open transaction: psycopg's, a SQLAlchemy "
                f"Connection or Session, or Django's over psycopg 3; got {type(connection).__module__}."
                f"{type(connection).__name__}."
            )

    def call(self, function: str, name: str, token: int) -> bool:
        """Call one of dblock's functions in this transaction."""
        if self._by_sqlalchemy:
            connection = self._connection
            if hasattr(connection, "get_bind"):
                connection = connection.connection()
            _check_dialect(connection)
            _check_autocommit(connection.connection.dbapi_connection.autocommit)
            with _finding_dblock(), _unprepared(connection.connection.driver_connection):
                return _answer(connection.execute(*self._text(function, name, token)).scalar_one())
        self._check_psycopg()
        with _finding_dblock(), self._connection.cursor(row_factory=_tuple_row()) as cursor:
            return _answer(cursor.execute(*self._statement(function, name, token), prepare=False).fetchone()[0])

    async def call_async(self, function: str, name: str, token: int) -> bool:
        """Call one of dblock's functions in this transaction."""
        if self._by_sqlalchemy:
            connection = self._connection
            if hasattr(connection, "get_bind"):
                connection = await connection.connection()
            _check_dialect(connection)
            raw = await connection.get_raw_connection()
            _check_autocommit(raw.dbapi_connection.autocommit)
            with _finding_dblock(), _unprepared(raw.driver_connection):
                return _answer((await connection.execute(*self._text(function, name, token))).scalar_one())
        self._check_psycopg()
        async with self._connection.cursor(row_factory=_tuple_row()) as cursor:
            with _finding_dblock():
                await cursor.execute(*self._statement(function, name, token), prepare=False)
            return _answer((await cursor.fetchone())[0])

    def _check_psycopg(self) -> None:
        from psycopg.pq import TransactionStatus

        # A transaction() block on an autocommit connection is a transaction like any other.
        idle = self._connection.info.transaction_status == TransactionStatus.IDLE
        _check_autocommit(self._connection.autocommit and idle)

    def _statement(self, function: str, name: str, token: int) -> tuple[bytes, tuple[Any, ...]]:
        schema = self._schema.replace("%", "%%")
        statement = (
            f"SELECT CASE {schema}.installation() WHEN %s::uuid THEN {schema}.{function}(%s::text, %s::bigint) END"
        )
        return statement.encode(), (self._installation, name, token)

    def _text(self, function: str, name: str, token: int) -> tuple[Any, dict[str, Any]]:
        from sqlalchemy import text

        schema = self._schema.replace(":", r"\:")
        statement = (
            f"SELECT CASE {schema}.installation() WHEN CAST(:installation AS uuid)"
            f" THEN {schema}.{function}(CAST(:name AS text), CAST(:token AS bigint)) END"
        )
        return text(statement), {"installation": self._installation, "name": name, "token": token}


@contextmanager
def _unprepared(driver: Any) -> Iterator[None]:
    """Prepare nothing on the driver's connection in the body: a pooler may run the next call in another session."""
    if not hasattr(driver, "prepare_threshold"):
        yield  # not psycopg's
        return
    threshold, driver.prepare_threshold = driver.prepare_threshold, None
    try:
        yield
    finally:
        driver.prepare_threshold = threshold


@contextmanager
def _finding_dblock() -> Iterator[None]:
    """Raise InvalidArgument if the body does not find the schema or its functions: the lock's database has both."""
    try:
        yield
    except Exception as error:
        original = getattr(error, "orig", None) or error
        # SQLAlchemy wraps asyncpg's error twice: the original is the cause of `orig`.
        states = {getattr(one, "sqlstate", None) for one in (original, original.__cause__)}
        if states & {"3F000", "42883"}:
            raise InvalidArgument(_ELSEWHERE) from error
        raise


_ELSEWHERE = (
    "The transaction is in another database than the lock, so it can neither prove nor release the lease. "
    "Give a connection to the database that the client uses."
)


def _answer(value: bool | None) -> bool:
    if value is None:
        raise InvalidArgument(_ELSEWHERE)
    return value


def _kinds(wants_async: bool) -> tuple[type, ...]:
    import psycopg

    kinds: list[type] = [psycopg.AsyncConnection if wants_async else psycopg.Connection]
    # A caller that passes one of SQLAlchemy's objects has imported SQLAlchemy.
    if wants_async and "sqlalchemy.ext.asyncio" in sys.modules:
        from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

        kinds += [AsyncConnection, AsyncSession]
    elif not wants_async and "sqlalchemy" in sys.modules:
        from sqlalchemy import Connection
        from sqlalchemy.orm import Session

        kinds += [Connection, Session]
    return tuple(kinds)


def _tuple_row() -> Any:
    from psycopg.rows import tuple_row

    return tuple_row


def _check_dialect(connection: Any) -> None:
    if connection.dialect.name != "postgresql":
        raise InvalidArgument(f"The transaction must be in the database of the lock, not in {connection.dialect.name}.")


def _check_autocommit(autocommit: bool) -> None:
    if autocommit:
        raise InvalidArgument(
            "This connection is in autocommit mode without an open transaction, so each statement would commit alone. "
            "Begin a transaction first."
        )
