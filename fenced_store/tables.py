"""Fences on tables: every writer in any language is refused when its transaction carries a stale token.

The database does it, by triggers. A transaction carries a token when it says `SET LOCAL fenced_store.token = '41'`,
which `fence(...)` says by itself. Per row, each row remembers its token in columns of its own, and rows of different
locks do not get into each other's way; per table, one fence stands before all rows, and writers come one after the
other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, Table, text
from sqlalchemy.exc import DBAPIError

from fenced_store._postgres import identifiers
from fenced_store._postgres.engines import Where, transaction
from fenced_store._postgres.identifiers import DEFAULT_SCHEMA, check_schema, check_table, quoted
from fenced_store.errors import FencedStoreError, InvalidArgument, sqlstate
from fenced_store.schema import bindable, check_installed

LOCK_WITHIN = 5
"""Seconds to wait for the table: whoever waits for it longer keeps everybody else waiting too."""

Per = Literal["row", "table"]


@dataclass(frozen=True)
class Protection:
    """How a table is protected."""

    resource: str
    """The name of the table's own fence: schema and table, quoted where need be."""
    per: Per
    key: tuple[str, ...]
    """The columns that tell its rows apart; none where it is protected per table."""
    strict: bool
    """Whether it refuses a transaction that carries no token."""
    warn_only: bool
    """Whether it lets everything through and only notes it."""
    enabled: bool = True
    """False where somebody has disabled its triggers, and it protects nothing."""

    def row(self, *key: object) -> str:
        """Return the resource of one row, to claim it."""
        if self.per != "row":
            raise InvalidArgument(
                f"Table {self.resource} is protected per table; its rows have no fences of their own."
            )
        if len(key) != len(self.key):
            raise InvalidArgument(f"A row of {self.resource} is named by {', '.join(self.key)}; got {len(key)} values.")
        return identifiers.row(self.resource, *key)


def protect(
    where: Where,
    table: str | Table,
    *,
    key: str | Sequence[str] | None = None,
    per: Per = "row",
    strict: bool = False,
    warn_only: bool = False,
    schema: str = DEFAULT_SCHEMA,
) -> Protection:
    """Put a fence on a table, or change the one that it has.

    `table` is a name as it is, or as SQL would write it with schema and quotes. `key` is what tells rows apart, by
    default the primary key. `strict` refuses transactions without a token, `warn_only` refuses nothing and notes
    everything: see what would happen before it does. Takes the table for a moment, and rewrites nothing.
    """
    check_schema(schema)
    columns = identifiers.check_key(key)
    for option, value in (("strict", strict), ("warn_only", warn_only)):
        if not isinstance(value, bool):
            raise InvalidArgument(f"{option} is True or False; got {value!r:.80}.")
    with _administering(where, schema) as connection:
        resource = connection.execute(
            text(
                f"SELECT {bindable(schema)}.protect_table(CAST(:target AS regclass), CAST(:key AS text[]),"
                " CAST(:per AS text), :strict, :warn_only)"
            ),
            {"target": _oid(connection, table), "key": columns, "per": per, "strict": strict, "warn_only": warn_only},
        ).scalar_one()
        (made,) = (one for one in _listed(connection, schema) if one.resource == resource)
        return made


def unprotect(where: Where, table: str | Table, *, schema: str = DEFAULT_SCHEMA) -> None:
    """Take the fence off a table, its columns with it. What it has seen stays with the table's name."""
    check_schema(schema)
    with _administering(where, schema) as connection:
        connection.execute(
            text(f"SELECT {bindable(schema)}.unprotect_table(CAST(:target AS regclass))"),
            {"target": _oid(connection, table)},
        )


def protected(where: Where, schema: str = DEFAULT_SCHEMA) -> list[Protection]:
    """Return the tables that are protected in this database."""
    check_schema(schema)
    with transaction(where, schema) as connection:
        check_installed(connection, schema)
        return _listed(connection, schema)


@contextmanager
def _administering(where: Where, schema: str) -> Iterator[Connection]:
    """Open a transaction that changes tables; it does not wait for one for long, and says so."""
    try:
        with transaction(where, schema) as connection:
            check_installed(connection, schema)
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_WITHIN} s'")
            yield connection
    except DBAPIError as error:
        raise (_said(error) or error) from error


def _said(error: DBAPIError) -> FencedStoreError | None:
    state = sqlstate(error)
    said = getattr(getattr(error.orig, "diag", None), "message_primary", None) or str(error.orig)
    if state == "55P03":
        return FencedStoreError(
            f"The table could not be had within {LOCK_WITHIN} s: a transaction is at work on it. Nothing was changed; "
            "try again when it has ended."
        )
    if state in ("22023", "42809", "42703", "42701", "42704", "42710", "42P01", "42602"):
        return InvalidArgument(str(said))
    if state == "2BP01":
        detail = getattr(getattr(error.orig, "diag", None), "message_detail", None)
        return FencedStoreError(f"The database refused: {said}. {detail or ''}".strip())
    return None


def _oid(connection: Connection, table: str | Table) -> str:
    """Return the table's number as text, whatever its name is made of."""
    if isinstance(table, Table):
        spellings = [f"{quoted(table.schema)}.{quoted(table.name)}" if table.schema else quoted(table.name)]
    else:
        check_table(table)
        # As it is, if there is one of that name; else as SQL reads it.
        spellings = [quoted(table), table]
    for spelling in spellings:
        try:
            with connection.begin_nested():
                found = connection.execute(text("SELECT CAST(to_regclass(:name) AS oid)"), {"name": spelling}).scalar()
        except DBAPIError:
            continue  # not even a name
        if found is not None:
            return str(found)
    raise InvalidArgument(f"There is no table {str(table)!a:.100} in this database, or not in the search path.")


def _listed(connection: Connection, schema: str) -> list[Protection]:
    rows = connection.execute(
        text(f"SELECT resource, per, key, strict, warn_only, enabled FROM {bindable(schema)}.protected_tables()")
    )
    return [Protection(one.resource, one.per, tuple(one.key or ()), *one[3:]) for one in rows]
