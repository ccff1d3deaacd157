"""Read the log of rejections and the highest token seen."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import text

from fenced_store._postgres.engines import Database, transaction
from fenced_store._postgres.identifiers import DEFAULT_SCHEMA, check_resource, check_schema, quoted
from fenced_store._postgres.values import MICROSECONDS, moment
from fenced_store.errors import InvalidArgument
from fenced_store.schema import check_installed, quoted_for_text


@dataclass(frozen=True)
class Rejection:
    """One rejected write, or one that a warn-only fence let through."""

    resource: str
    offered: int | None
    """The rejected token; None for a writer without a token."""
    stored: int | None
    """The higher token that the resource had seen."""
    stored_at: datetime | None
    stored_by: str | None
    """The writer that had superseded the rejected writer."""
    rejected_at: datetime
    rejected: str
    """The rejected writer."""
    refused: bool
    """False if the fence only warned."""
    lock: str | None
    """The dblock lock granted with the stored token, if it is in this database and was not granted again since."""
    holder: str | None
    """The holder of that lock; None if the lock was released since."""


def rejections(
    database: Database,
    resource: str | None = None,
    *,
    limit: int = 100,
    schema: str = DEFAULT_SCHEMA,
    locks: str = "dblock",
) -> list[Rejection]:
    """Return the latest rejections, newest first. Only the owner of the schema may read them.

    `locks` is the schema of dblock. If it is in the same database, each rejection is joined with its lock's grant.
    """
    check_schema(schema)
    if resource is not None:
        check_resource(resource)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InvalidArgument(f"limit is a whole number from 1; got {limit!r:.80}.")
    with transaction(database, schema) as connection:
        check_installed(connection, schema)
        grants = f"{quoted(check_schema(locks))}.distributed_locks"
        may_read = connection.execute(
            text(
                "SELECT has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(n.oid, 'USAGE')"
                " FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace"
                " WHERE n.nspname = :locks AND c.relname = 'distributed_locks'"
            ),
            {"locks": locks},
        ).scalar()
        names, join = "NULL, NULL", ""
        if may_read:
            names = "l.name, l.holder"
            # Join on the holder as well: a token of another lock service may equal the token of a dblock grant. A lock
            # that was released has no holder any more, but keeps its token.
            join = (
                f"LEFT JOIN {grants} AS l ON l.token = r.stored_token"
                " AND (l.holder IS NULL OR starts_with(r.stored_by, l.holder))"
            )
            join = join.replace(":", r"\:")
        found = connection.execute(
            text(
                "SELECT r.resource, r.offered_token, r.stored_token, r.stored_by, r.rejected, r.refused,"
                f" {MICROSECONDS.format('r.stored_at')}, {MICROSECONDS.format('r.rejected_at')}, {names}"
                f" FROM {quoted_for_text(schema)}.rejections AS r {join}"
                " WHERE CAST(:resource AS text) IS NULL OR r.resource = :resource ORDER BY r.id DESC LIMIT :limit"
            ),
            {"resource": resource, "limit": limit},
        )
        return [_rejection(*row) for row in found]


def _rejection(
    resource: str,
    offered: int | None,
    stored: int | None,
    stored_by: str | None,
    rejected: str,
    refused: bool,
    stored_at: int | None,
    rejected_at: int,
    lock: str | None,
    holder: str | None,
) -> Rejection:
    at = moment(rejected_at)
    assert at is not None
    return Rejection(resource, offered, stored, moment(stored_at), stored_by, at, rejected, refused, lock, holder)


def high_water(database: Database, schema: str = DEFAULT_SCHEMA) -> int:
    """Return the highest token that any fence in this schema has seen, protected tables included; 0 for none."""
    check_schema(schema)
    with transaction(database, schema) as connection:
        check_installed(connection, schema)
        return int(connection.execute(text(f"SELECT {quoted_for_text(schema)}.high_water()")).scalar_one())
