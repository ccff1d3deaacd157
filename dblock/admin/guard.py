"""Guard schemas: refuse DDL outside a migration that holds the lock.

The database decides, in the event triggers of guard_schema(). This module turns them on and off. A guard prevents
accidents and is no defence against a role that wants to get past it: a session can carry any application_name.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg

from dblock._core.options import is_text, literal, quoted
from dblock._core.schema_version import DEFAULT_SCHEMA, check_name
from dblock._runtime.error_mapping import translated
from dblock._runtime.target import Target, resolve
from dblock.admin.schema import status_of
from dblock.errors import AccessDenied, InvalidArgument

if TYPE_CHECKING:
    from dblock._runtime.target import Where


@dataclass(frozen=True)
class Guard:
    """A schema in which DDL needs a migration that holds the lock."""

    schema: str
    names: list[str]
    """The migrations that may change the schema."""
    active: bool
    """Whether the event triggers exist and are enabled. Without them nothing is refused."""


def install(
    target: Target | Where,
    schemas: Sequence[str],
    names: Sequence[str],
    schema: str = DEFAULT_SCHEMA,
    *,
    trust_owner: bool = False,
) -> list[Guard]:
    """Guard schemas: only migrations with these names may change them. Return all guards afterwards.

    The names replace those that a schema had. The first guard of a database needs a superuser, or a role that may
    create event triggers. The function of the event triggers belongs to the owner of dblock's schema and runs in the
    sessions of all roles, so `trust_owner` says that another role may trust that owner.
    """
    for text in (*schemas, *names):
        if not is_text(text):
            raise InvalidArgument(f"The name of a schema or a migration must be text without NUL; got {text!a}.")
    with _transaction(target, schema) as connection:
        if not trust_owner:
            _check_owner(connection, schema)
        try:
            for one in schemas:
                _call(connection, schema, "guard_schema(%s, %s)", one, list(names))
        except psycopg.errors.InsufficientPrivilege as error:
            if "event trigger" not in (error.diag.message_primary or ""):
                raise
            words = ["dblock", "guard", "install", *schemas, *(word for name in names for word in ("--name", name))]
            option = [] if schema == DEFAULT_SCHEMA else ["--schema", schema]
            raise AccessDenied(
                "This role may not create event triggers, so nothing was guarded. As a superuser run: "
                f"{shlex.join([*words, *option, '--trust-owner'])}"
            ) from error
        return _guards(connection, schema)


def remove(target: Target | Where, schemas: Sequence[str] = (), schema: str = DEFAULT_SCHEMA) -> list[str]:
    """Remove the guards of these schemas, or all. Return the event triggers that are left and refuse nothing.

    With the last guard the event triggers are dropped, except those that belong to another role.
    """
    with _transaction(target, schema) as connection:
        guarded = [guard.schema for guard in _guards(connection, schema)]
        for one in schemas:
            if one not in guarded:
                raise InvalidArgument(f"Schema {one!r} has no guard. Guarded are: {', '.join(guarded) or 'none'}.")
        kept: list[str] = []
        named: Sequence[str | None] = schemas or [None]
        for which in named:
            kept = _call(connection, schema, "unguard_schema(%s)", which)[0][0]
        return kept


def list_all(target: Target | Where, schema: str = DEFAULT_SCHEMA) -> list[Guard]:
    """Return the guards of a database, in the order of their schemas."""
    with _transaction(target, schema) as connection:
        return _guards(connection, schema)


def statements(schemas: Sequence[str], names: Sequence[str], schema: str = DEFAULT_SCHEMA) -> str:
    """Return the statements that `install` would run, for a DBA to review and run."""
    check_name(schema)
    listed = ", ".join(map(literal, names))
    return "\n".join(f"SELECT {quoted(schema)}.guard_schema({literal(one)}, ARRAY[{listed}]);" for one in schemas)


@contextmanager
def _transaction(target: Target | Where, schema: str) -> Iterator[psycopg.Connection[Any]]:
    check_name(schema)
    with translated(schema), resolve(target).connect() as connection:
        status_of(connection, schema).check()
        with connection.transaction():
            yield connection


def _check_owner(connection: psycopg.Connection[Any], schema: str) -> None:
    """Raise if another role without a superuser's privileges owns the function that the event triggers call."""
    found = connection.execute(
        "SELECT r.rolname FROM pg_namespace AS n JOIN pg_roles AS r ON r.oid = n.nspowner"
        " WHERE n.nspname = %s AND r.rolname <> current_user AND NOT r.rolsuper",
        [schema],
    ).fetchone()
    if found:
        raise AccessDenied(
            f"Role {found[0]!r} owns schema {schema!r}, and so could change the function that a guard runs in the "
            "sessions of all roles, those of superusers too. Nothing was guarded. If you trust that role, add "
            "--trust-owner (in Python: trust_owner=True)."
        )


def _guards(connection: psycopg.Connection[Any], schema: str) -> list[Guard]:
    return [Guard(*row) for row in _call(connection, schema, "list_guards()")]


def _call(connection: psycopg.Connection[Any], schema: str, call: str, *arguments: Any) -> list[tuple[Any, ...]]:
    statement = f"SELECT * FROM {quoted(schema).replace('%', '%%')}.{call}"
    return connection.execute(statement.encode(), arguments).fetchall()
