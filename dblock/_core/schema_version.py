"""The revision of the schema that this version of dblock needs, and the names that a schema may have."""

from __future__ import annotations

from dblock._core.options import is_text
from dblock.errors import InvalidArgument, SchemaMissing, SchemaOutdated, SchemaTooNew

DEFAULT_SCHEMA = "dblock"

REVISION = "0001"
"""The revision that this version of dblock needs: the newest in alembic/versions."""


def check_revision(schema: str, revision: str | None) -> None:
    """Raise unless the revision found in the database is the one that this client needs."""
    if revision == REVISION:
        return
    if revision is None:
        raise SchemaMissing(schema)
    raise (SchemaOutdated if revision < REVISION else SchemaTooNew)(schema, revision, REVISION)


def check_name(schema: str) -> str:
    """Return the schema's name if Postgres can have it whole."""
    if not is_text(schema) or not 1 <= len(schema.encode()) <= 63:
        raise InvalidArgument(f"A schema's name is text of 1 to 63 bytes without NUL; got {schema!a}.")
    if schema.startswith("pg_"):
        raise InvalidArgument(f"Schema {schema!r} cannot be used: Postgres keeps names with pg_ for itself.")
    if schema in ("public", "information_schema", "$user"):
        raise InvalidArgument(f"Schema {schema!r} cannot be used: dblock needs a schema of its own, such as 'dblock'.")
    return schema
