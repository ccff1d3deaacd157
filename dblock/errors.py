"""Every error that dblock raises, under one base.

    DblockError
    ├── InvalidArgument        (also a ValueError)   refused before anything was sent
    ├── LockTimeout            (also a TimeoutError) the lock stayed held for as long as we would wait
    ├── LeaseLost              the lease is no longer ours, or we can no longer know that it is
    ├── NoFencingToken         a lock without durability has none
    ├── ClientClosed           the client was closed
    ├── DatabaseError          the database could not be asked, or would not answer
    │   ├── Unavailable        no connection, or it broke; what was sent may have been done
    │   ├── NotWritable        a standby, or a server set read-only
    │   ├── AccessDenied       the role may not call dblock's functions
    │   └── SchemaError        dblock's schema does not fit this client
    │       ├── SchemaMissing
    │       ├── SchemaOutdated
    │       └── SchemaTooNew
    └── EmbeddedError          the embedded Postgres could not be started, found or stopped

Messages say what happened, to which lock, and what to do next. None of them, nor any exception
that they are chained to, carries a password.
"""

from __future__ import annotations

import shlex
from datetime import datetime
from typing import ClassVar


class DblockError(Exception):
    """The base of every error that dblock raises."""


class InvalidArgument(DblockError, ValueError):
    """An argument lies outside its documented limits; nothing was sent."""


class LockTimeout(DblockError, TimeoutError):
    """The lock was still held by another when the timeout passed."""

    def __init__(self, name: str, timeout: float, claims: bool = False) -> None:
        self.name = name
        self.timeout = timeout
        self.claims = claims
        """Whether it claims resources, and may have waited for a transaction that is past one of their fences."""
        way = "another holds it, or others come first"
        if claims:
            way = "another holds it, others come first, or a transaction is past the fence of what it claims"
        super().__init__(
            f"Lock {name!r} was not acquired within {timeout:g} s: {way}. "
            "Wait longer, or ask lock.holder() who has it and lock.queue() who waits."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.timeout, self.claims)


class LeaseLost(DblockError):
    """The lease is not held any more."""

    _WHY: ClassVar[dict[str, str]] = {
        "expired": "its time ran out before it was renewed",
        "superseded": "the lock was granted to another since",
        "forced": "somebody took it away",
        "unreachable": "the database could not be asked in time",
        "over": "it was released before, or belongs to another process",
    }

    def __init__(self, name: str, reason: str, last_held: datetime, token: int) -> None:
        self.name = name
        self.reason = reason
        """One of: expired, superseded, forced, unreachable; or `over`, for a lease that was released."""
        self.last_held = last_held
        """The last moment at which the lease was known to be held, by this machine's wall clock."""
        self.token = token if token > 0 else None
        """The fencing token; None for a lock without durability."""
        self._number = token
        under = f" under token {token}" if token > 0 else ""
        super().__init__(
            f"The lease of lock {name!r}{under} is lost ({reason}): {self._WHY.get(reason, reason)}. It was last "
            f"known to be held at {last_held:%H:%M:%S.%f} UTC. Stop writing and acquire again."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.reason, self.last_held, self._number)


class NoFencingToken(DblockError):
    """A lock that is granted without durability has no token."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"Lock {name!r} is an efficiency lock: a crash of the database may forget its grant, so it has no fencing "
            "token and cannot protect a resource. Use client.lock() if it should."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name,)


class ClientClosed(DblockError):
    """The client was closed and can be used no more."""

    granted = False
    """Whether a lock was granted all the same, at the last moment."""

    def __init__(self) -> None:
        super().__init__("This client is closed. Make a new one to go on.")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ()


class DatabaseError(DblockError):
    """The database could not be asked, or refused to answer."""


class Unavailable(DatabaseError):
    """No connection could be had, or it broke under way; what was sent may have been done."""

    unanswered = False
    """Whether the database was asked and did not answer in time."""


class ClaimBusy(DatabaseError):
    """A transaction is past a fence that the grant claims. Nobody outside sees this: the grant is tried again."""


class NotWritable(DatabaseError):
    """The server takes no writes: a standby, or one set read-only."""

    def __init__(self) -> None:
        super().__init__(
            "This server takes no writes: it is a standby, or set read-only. "
            "Name every host of the cluster in the DSN, with target_session_attrs=read-write."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ()


class AccessDenied(DatabaseError):
    """The role may not call dblock's functions."""


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
        super().__init__(schema, found, needed, "Run: pip install --upgrade dblock")


class EmbeddedError(DblockError):
    """The embedded Postgres could not be started, found or stopped."""


def _option(schema: str) -> str:
    return "" if schema == "dblock" else f" --schema {shlex.quote(schema)}"
