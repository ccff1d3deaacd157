"""Translate errors of the database into errors of fenced_store."""

from __future__ import annotations

from fenced_store._postgres.identifiers import how_to_install
from fenced_store.errors import (
    AccessDenied,
    FencedStoreError,
    InvalidArgument,
    NotInstalled,
    TransactionConflict,
    Unavailable,
    diagnostics_of,
    sqlstate,
    translated,
)

CONFLICTS = ("40001", "40P01")
"""The SQLSTATEs of a serialization failure and of a deadlock."""


def counterpart_of(error: BaseException, schema: str, resource: str | None = None) -> FencedStoreError | None:
    """Return the fenced_store error for an error of a statement that fenced_store has sent; None if there is none."""
    return translated(error) or not_usable(error, schema) or refusal_of(error, resource) or unavailable(error)


def refusal_of(error: BaseException, resource: str | None) -> InvalidArgument | TransactionConflict | None:
    """Return the error for a text that cannot be stored, or for a conflict with another transaction; else None."""
    state = sqlstate(error)
    if isinstance(error, UnicodeEncodeError) or state in ("22P05", "22021"):
        return InvalidArgument(
            f"The database cannot store a character of this name or value: {diagnostics_of(error)[0].rstrip('.')}. Use "
            "a database with the encoding UTF8, and connect with client_encoding=utf8."
        )
    if resource is not None and state in CONFLICTS:
        return TransactionConflict(resource, str(state))
    return None


def is_lost(error: BaseException) -> bool:
    """Return whether the connection could not be opened, or has ended."""
    state = sqlstate(error)
    if state is None:
        # SQLAlchemy does not notice a connection that ends while it waits for the reply.
        text = str(getattr(error, "orig", error)).lower()
        return bool(getattr(error, "connection_invalidated", False)) or "connection" in text
    return state.startswith("08") or state in ("57P01", "57P02", "57P03", "53300")


def unavailable(error: BaseException) -> Unavailable | None:
    """Return Unavailable if the database could not be reached or has not answered; else None."""
    if not is_lost(error) and not isinstance(error, TimeoutError) and type(error).__name__ != "TimeoutError":
        return None
    said = str(getattr(error, "orig", None) or error).strip().splitlines()[0].rstrip(".")
    return Unavailable(f"The database could not be asked: {said}.")


def not_usable(error: BaseException, schema: str) -> FencedStoreError | None:
    """Return NotInstalled or AccessDenied if the error means that the schema or a privilege is missing; else None."""
    state, (message, _, hint) = sqlstate(error), diagnostics_of(error)
    if state in ("3F000", "42883") and schema in message:
        return NotInstalled(f"There is no fenced_store in schema {schema!r} of this database. {how_to_install(schema)}")
    if state == "42501":
        return AccessDenied(
            f"The database refused: {message.rstrip('.')}. {hint + ' ' if hint else ''}To write through fences, a role "
            "needs: dblock fence grant ROLE. To protect a table, the role must also own the table and be allowed to "
            "create functions in the table's schema. To run dblock fence setup, a role needs CREATE on the database. "
            "Only the role that ran it can upgrade and remove the schema, and read the log and the high-water mark."
        )
    return None
