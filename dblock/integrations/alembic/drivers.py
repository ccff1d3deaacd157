"""What the gate asks of a driver: psycopg, psycopg2, and asyncpg or psycopg under SQLAlchemy's asyncio."""

from __future__ import annotations

from typing import Any


def sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of an error of SQLAlchemy or of a driver."""
    found = getattr(error, "orig", None) or error
    state = getattr(found, "sqlstate", None) or getattr(found, "pgcode", None)
    return state if isinstance(state, str) else None


def is_autocommit(connection: Any) -> bool:
    """Return whether each statement of this connection is a transaction of its own."""
    return bool(getattr(connection.connection.dbapi_connection, "autocommit", False))


def is_in_transaction(connection: Any) -> bool:
    """Return whether a transaction has begun on the server, and not only in SQLAlchemy."""
    driver = connection.connection.driver_connection
    if hasattr(driver, "is_in_transaction"):  # asyncpg
        return bool(driver.is_in_transaction())
    info = getattr(driver, "info", None)
    return info is None or info.transaction_status != 0


def has_pooler(connection: Any, backend: int) -> bool:
    """Return whether the server's process differs from the one that the driver knows."""
    driver = connection.connection.driver_connection
    if hasattr(driver, "get_server_pid"):  # asyncpg
        return bool(driver.get_server_pid() != backend)
    info = getattr(driver, "info", None)
    return info is not None and info.backend_pid != backend


def forget(connection: Any, *, external: bool) -> None:
    """End the transaction of a look, so that nothing is held while this replica waits.

    If env.py has begun the transaction, only the driver's side of it ends. SQLAlchemy's stays open.
    """
    if connection.closed or connection.invalidated:
        return
    if external:
        connection.connection.rollback()
    else:
        connection.rollback()
