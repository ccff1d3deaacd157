"""The errors of the database and of dblock's schema in it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from dblock.errors.base import DblockError


class DatabaseError(DblockError):
    """The database could not be asked, did not reply, or replied with an error."""


class Unavailable(DatabaseError):
    """No connection was available, or it broke. `may_be_done` says whether the call may have taken effect."""


class ClaimBusy(DatabaseError):
    """An open transaction has passed a fence that the grant claims. The grant is retried; callers never see this."""


class NotWritable(DatabaseError):
    """The server accepts no writes: it is a standby, or default_transaction_read_only is on."""

    def __init__(self) -> None:
        super().__init__(
            "This server accepts no writes: it is a standby, or default_transaction_read_only is on. For a cluster, "
            "name every host in the DSN, with target_session_attrs=read-write."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ()


class LoginRefused(DatabaseError):
    """The server refuses the role, the password or the database. A retry does not help."""


class AccessDenied(DatabaseError):
    """The role may not call dblock's functions."""


class UnsuitableServer(DatabaseError):
    """The server accepts Postgres' statements, but does not behave as dblock needs it. Nothing was created."""

    def __init__(self, failed: Sequence[tuple[str, str, str]]) -> None:
        """`failed` has the ID of each behaviour that does not hold, what was seen instead, and what would follow."""
        self.failed = list(failed)
        seen = " ".join(f"{name}: {what}. {without}" for name, what, without in failed)
        super().__init__(
            f"dblock was not installed, because this server does not behave as Postgres does. {seen} Use a Postgres "
            "server, over a connection that leads straight to it. docs/reference/engines.md lists what dblock needs."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.failed,)


class SchemaError(DatabaseError):
    """The schema in the database does not fit this client."""


class SchemaMissing(SchemaError):
    """The database has no dblock schema of that name."""

    def __init__(self, schema: str) -> None:
        self.schema = schema
        super().__init__(
            f"There is no dblock in schema {schema!r} of this database. Run: dblock install{_option(schema)}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.schema,)


class _SchemaMismatch(SchemaError):
    def __init__(self, schema: str, found: str, needed: str, advice: str) -> None:
        self.schema = schema
        self.found = found
        self.needed = needed
        super().__init__(f"Schema {schema!r} is at revision {found}; this version of dblock needs {needed}. {advice}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.schema, self.found, self.needed)


class SchemaOutdated(_SchemaMismatch):
    """The schema is older than this client needs."""

    def __init__(self, schema: str, found: str, needed: str) -> None:
        super().__init__(schema, found, needed, f"Run: dblock install{_option(schema)}")


class SchemaTooNew(_SchemaMismatch):
    """The schema is newer than this client knows."""

    def __init__(self, schema: str, found: str, needed: str) -> None:
        super().__init__(schema, found, needed, "Upgrade it: pip install --upgrade dblock (in a checkout: git pull).")


def _option(schema: str) -> str:
    return "" if schema == "dblock" else f" --schema {shlex.quote(schema)}"
