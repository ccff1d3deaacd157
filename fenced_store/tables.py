"""Fences on tables: the table refuses every writer, in any language, whose transaction carries a stale token.

Triggers in the database enforce this. A transaction carries a token after `SET LOCAL fenced_store.token = '41'`, which
`fence(...)` executes for you. With a fence per row, each row keeps its token in two extra columns, and writers of
different rows do not block each other. With a fence per table, one fence guards all rows, and writers are serialized.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, Table, text
from sqlalchemy.exc import DBAPIError

from fenced_store._postgres import identifiers
from fenced_store._postgres.connections import LimitedCall
from fenced_store._postgres.engines import Database, transaction
from fenced_store._postgres.identifiers import DEFAULT_SCHEMA, check_schema, check_table, quoted
from fenced_store.errors import FencedStoreError, InvalidArgument, sqlstate
from fenced_store.schema import check_installed, quoted_for_text

LOCK_TIMEOUT = 5
"""Seconds to wait for the table's lock: while this waits, every later statement on the table waits too."""

DDL_TIMEOUT = 3600.0
"""Seconds after which the server counts as not answering: to find the highest token, a large table is read."""

Per = Literal["row", "table"]


@dataclass(frozen=True)
class Protection:
    """The fence of a table."""

    resource: str
    """The name of the table's own fence: schema and table, quoted where necessary."""
    per: Per
    key: tuple[str, ...]
    """The columns that identify a row; none if the table is protected per table."""
    strict: bool
    """Whether it refuses transactions that carry no token."""
    warn_only: bool
    """Whether it refuses nothing and only records what it would refuse."""
    enabled: bool = True
    """False if its triggers are disabled, so that it protects nothing."""

    def row(self, *key: object) -> str:
        """Return the resource of one row, to claim it."""
        if self.per != "row":
            raise InvalidArgument(
                f"Table {self.resource} is protected per table, so its rows have no fences of their own. Claim "
                f"{self.resource!r} instead."
            )
        if len(key) != len(self.key):
            raise InvalidArgument(f"A row of {self.resource} is named by {', '.join(self.key)}; got {len(key)} values.")
        return identifiers.row(self.resource, *key)


def protect(
    database: Database,
    table: str | Table,
    *,
    key: str | Sequence[str] | None = None,
    per: Per = "row",
    strict: bool = False,
    warn_only: bool = False,
    schema: str = DEFAULT_SCHEMA,
) -> Protection:
    """Put a fence on a table, or change the fence that it has.

    `table` is a plain name, or a name as SQL writes it, with schema and quotes. `key` names the columns that identify a
    row, by default the primary key. With `strict`, transactions without a token are refused. With `warn_only`, nothing
    is refused and everything that would be is recorded: use it to try a fence out. The table is locked briefly and is
    not rewritten.
    """
    check_schema(schema)
    columns = identifiers.check_key(key)
    for option, value in (("strict", strict), ("warn_only", warn_only)):
        if not isinstance(value, bool):
            raise InvalidArgument(f"{option} is True or False; got {value!r:.80}.")
    with _ddl_transaction(database, schema) as connection:
        resource = connection.execute(
            text(
                f"SELECT {quoted_for_text(schema)}.protect_table(CAST(:target AS regclass), CAST(:key AS text[]),"
                " CAST(:per AS text), :strict, :warn_only)"
            ),
            {"target": _oid(connection, table), "key": columns, "per": per, "strict": strict, "warn_only": warn_only},
        ).scalar_one()
        return next(found for found in _list_protections(connection, schema) if found.resource == resource)


def unprotect(database: Database, table: str | Table, *, schema: str = DEFAULT_SCHEMA) -> None:
    """Remove the fence of a table and its two columns. The highest token seen stays recorded under the table's name."""
    check_schema(schema)
    with _ddl_transaction(database, schema) as connection:
        connection.execute(
            text(f"SELECT {quoted_for_text(schema)}.unprotect_table(CAST(:target AS regclass))"),
            {"target": _oid(connection, table)},
        )


def protected(database: Database, schema: str = DEFAULT_SCHEMA) -> list[Protection]:
    """Return the protected tables of this database."""
    check_schema(schema)
    with transaction(database, schema) as connection:
        check_installed(connection, schema)
        return _list_protections(connection, schema)


@contextmanager
def _ddl_transaction(database: Database, schema: str) -> Iterator[Connection]:
    """Open a transaction that alters tables, with a short lock timeout, and translate its errors."""
    try:
        with transaction(database, schema) as connection:
            check_installed(connection, schema)
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT} s'")
            with LimitedCall(connection.connection.driver_connection, DDL_TIMEOUT):
                yield connection
    except DBAPIError as error:
        raise (_translated(error) or error) from error


def _translated(error: DBAPIError) -> FencedStoreError | None:
    state = sqlstate(error)
    message = getattr(getattr(error.orig, "diag", None), "message_primary", None) or str(error.orig)
    if state == "55P03":
        return FencedStoreError(
            f"The table could not be locked within {LOCK_TIMEOUT} s: another transaction is using it. Nothing was "
            "changed. Try again when that transaction has ended."
        )
    if state in ("22023", "42809", "42703", "42701", "42704", "42710", "42P01", "42602"):
        return InvalidArgument(str(message))
    if state == "2BP01":
        detail = getattr(getattr(error.orig, "diag", None), "message_detail", None)
        return FencedStoreError(f"The database refused: {message}. {detail or ''}".strip())
    return None


def _oid(connection: Connection, table: str | Table) -> str:
    """Return the OID of a table as text."""
    if isinstance(table, Table):
        spellings = [f"{quoted(table.schema)}.{quoted(table.name)}" if table.schema else quoted(table.name)]
    else:
        check_table(table)
        # First as a plain name; if there is no such table, as SQL reads it.
        spellings = [quoted(table), table]
    for spelling in spellings:
        try:
            with connection.begin_nested():
                found = connection.execute(text("SELECT CAST(to_regclass(:name) AS oid)"), {"name": spelling}).scalar()
        except DBAPIError:
            continue  # not valid as a name
        if found is not None:
            return str(found)
    raise InvalidArgument(
        f"There is no table {str(table)!a:.100} in this database, or its schema is not in the search path."
    )


def _list_protections(connection: Connection, schema: str) -> list[Protection]:
    rows = connection.execute(
        text(f"SELECT resource, per, key, strict, warn_only, enabled FROM {quoted_for_text(schema)}.protected_tables()")
    )
    return [Protection(row.resource, row.per, tuple(row.key or ()), *row[3:]) for row in rows]
