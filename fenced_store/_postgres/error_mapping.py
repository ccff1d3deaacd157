"""Translate errors of the database into errors of fenced_store."""

from __future__ import annotations

import re

import psycopg

from fenced_store._postgres.identifiers import how_to_install
from fenced_store.errors import (
    AccessDenied,
    FencedStoreError,
    InvalidArgument,
    LoginRefused,
    NotInstalled,
    TransactionConflict,
    Unavailable,
    diagnostics_of,
    sqlstate,
    translated,
)

CONFLICTS = ("40001", "40P01")
"""The SQLSTATEs of a serialization failure and of a deadlock."""

_LOGIN_REFUSED = re.compile(
    r"authentication failed|no password supplied|(role|user|database) \".*\" does not exist|no such (user|database)"
    r"|is not permitted to log in|no pg_hba\.conf entry|permission denied for database"
)
"""What Postgres, libpq and the poolers say if they refuse a login for a reason that does not pass by itself."""

_PASSING = re.compile(r"too many|slots are reserved|the database system is|accepting connections|no more connections")
"""What they say if they refuse a login for now."""

_LOGIN_STATES = ("28000", "28P01", "3D000")
"""The SQLSTATEs of a refused login, from a driver that reports them (asyncpg). libpq does not."""


def counterpart_of(error: BaseException, schema: str, resource: str | None = None) -> FencedStoreError | None:
    """Return the fenced_store error for an error of a statement that fenced_store has sent; None if there is none."""
    return (
        translated(error)
        or login_refused(error)
        or not_usable(error, schema)
        or refusal_of(error, resource)
        or unavailable(error)
    )


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


def is_login_refused(error: BaseException) -> bool:
    """Return whether a connection was refused for a reason that does not pass by itself.

    Of several hosts, each must have refused it: one that is away or busy may accept the login later.
    In a server with translated messages, psycopg's error looks like that of a server that cannot be reached.
    """
    if sqlstate(error) is not None:
        return sqlstate(error) in _LOGIN_STATES
    original = getattr(error, "orig", None) or error
    text = str(original)
    if type(original) is not psycopg.OperationalError or _PASSING.search(text):
        return False
    # psycopg lists the failures if there were several, one for each address of a host.
    hosts: dict[str, str] = {}
    for failure in text.split("\n- host: ")[1:]:
        host, _, said = failure.partition(", hostaddr: ")
        hosts[host] = hosts.get(host, "") + said
    return all(_LOGIN_REFUSED.search(said) for said in list(hosts.values()) or [text])


def login_refused(error: BaseException) -> LoginRefused | None:
    """Return LoginRefused, with the reason of the server, if the server refused the login; else None."""
    if not is_login_refused(error):
        return None
    # libpq explains over several lines, one for each host. None of them holds the password.
    lines = str(getattr(error, "orig", None) or error).splitlines()
    said = "; ".join(line.strip() for line in lines if line.strip())
    return LoginRefused(
        f"The server refused the login, and a retry does not help: {said.rstrip('.')}. "
        "Check the role, its password, the database and the role's CONNECT privilege on it."
    )


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
