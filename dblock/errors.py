"""Every error that dblock raises, under one base.

    DblockError
    ├── InvalidArgument        (also a ValueError)   refused before anything was sent
    │   └── ConfigurationError no database is named, or a setting cannot be used
    ├── LockTimeout            (also a TimeoutError) the lock was not acquired before the timeout
    ├── LeaseLost              the lease is no longer held, or can no longer be known to be held
    ├── NoFencingToken         an efficiency lock has no fencing token
    ├── ClientClosed           the client was closed
    ├── MigrationFailed        a version has failed, here or on another replica, and is not run again
    ├── DatabaseAhead          the database is at a newer version than the caller
    ├── SessionsRemain         sessions of an earlier migration could not be ended
    ├── TransferRefused        the named candidate cannot lead next
    ├── TermsForgotten         an observer asks for terms that are not kept any more
    ├── DatabaseError          the database could not be asked, or did not reply
    │   ├── Unavailable        no connection, or it broke; the call may have taken effect
    │   ├── NotWritable        a standby, or a server in read-only mode
    │   ├── LoginRefused       wrong password, unknown role or database, or no CONNECT
    │   ├── AccessDenied       the role may not call dblock's functions
    │   ├── UnsuitableServer   the server does not behave as dblock needs it
    │   └── SchemaError        dblock's schema does not fit this client
    │       ├── SchemaMissing
    │       ├── SchemaOutdated
    │       └── SchemaTooNew
    └── EmbeddedError          the embedded Postgres could not be started, found or stopped

A message says what happened, to which lock, and what to do next. No message contains a password, and neither does any
exception that an error is chained to.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime
from typing import ClassVar


class DblockError(Exception):
    """The base of every error that dblock raises."""


class InvalidArgument(DblockError, ValueError):
    """An argument is outside its documented limits. Nothing was sent."""


class ConfigurationError(InvalidArgument):
    """No database is named, or a setting of the environment or of a file cannot be used. Nothing was sent."""


class LockTimeout(DblockError, TimeoutError):
    """The lock was not acquired before the timeout passed."""

    def __init__(self, name: str, timeout: float, claims: bool = False, own_token: int | None = None) -> None:
        self.name = name
        self.timeout = timeout
        self.claims = claims
        """Whether the lock claims resources. It may then have waited for a transaction that has passed their fences."""
        self.own_token = own_token if own_token is not None and own_token > 0 else None
        """The token of the lease by which this client itself holds the lock; None if it does not, and for an efficiency
        lock."""
        self._own_number = own_token
        way = "another client holds it, or other waiters are ahead"
        if claims:
            way = (
                "another client holds it, other waiters are ahead, or an open transaction has passed the fence of a "
                "resource that it claims"
            )
        then = "Wait longer, or call lock.holder() and lock.queue() to see its holder and its waiters."
        if own_token is not None:
            # The number of an efficiency lock's grant is negative, and is no token.
            under = f", under token {self.own_token}" if self.own_token else ""
            way = f"this client itself holds it{under}, and a lock is not reentrant"
            then = "Release that lease first, or wait longer if another thread or task holds it."
        super().__init__(f"Lock {name!r} was not acquired within {timeout:g} s: {way}. {then}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.timeout, self.claims, self._own_number)


class LeaseLost(DblockError):
    """The lease is no longer held."""

    _WHY: ClassVar[dict[str, str]] = {
        "expired": "it expired before it was renewed",
        "superseded": "the lock was granted to another client",
        "forced": "an operator or another session released it by force",
        "unreachable": "the database did not confirm it in time",
        "over": "it was released, or belongs to another process",
    }

    def __init__(self, name: str, reason: str, last_held: datetime, token: int) -> None:
        self.name = name
        self.reason = reason
        """One of expired, superseded, forced and unreachable; or `over` for a lease that was released."""
        self.last_held = last_held
        """The last moment at which the lease was known to be held, by this machine's wall clock."""
        self.token = token if token > 0 else None
        """The fencing token; None for an efficiency lock."""
        self._number = token
        under = f" under token {token}" if token > 0 else ""
        super().__init__(
            f"The lease of lock {name!r}{under} is lost ({reason}): {self._WHY.get(reason, reason)}. It was last "
            f"known to be held at {last_held:%H:%M:%S.%f} UTC. Stop writing and acquire again."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.reason, self.last_held, self._number)


class NoFencingToken(DblockError):
    """An efficiency lock has no fencing token."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"Lock {name!r} is an efficiency lock: a crash of the database may forget its grant, so it has no fencing "
            "token and cannot protect a resource. Use client.lock() if it should."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name,)


class ClientClosed(DblockError):
    """The client was closed and cannot be used again."""

    granted = False
    """Whether a lock was granted while the client was being closed."""

    def __init__(self) -> None:
        super().__init__("This client is closed. Create a new one.")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ()


class MigrationFailed(DblockError):
    """A version of a migration has failed, here or on another replica. It is not run again."""

    def __init__(self, name: str, version: str | None, failures: int, error: str | None) -> None:
        self.name = name
        self.version = version
        self.failures = failures
        self.error = error
        """What the first of the failed runs reported."""
        to = "" if version is None else f" to version {version!r}"
        times = "once" if failures == 1 else f"{failures} times"
        said = f" It reported: {error}" if error else ""
        super().__init__(
            f"Migration {name!r}{to} has failed {times} and is not run again until you deploy another version, or run: "
            f"dblock migrate --name {shlex.quote(name)} --retry.{said}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.version, self.failures, self.error)


class MigrationBlocked(DblockError):
    """A migration could not lock a table in time, or deadlocked, as often as it may."""

    def __init__(self, name: str, problem: str, tries: int, blockers: Sequence[str]) -> None:
        self.name = name
        self.problem = problem
        self.tries = tries
        self.blockers = list(blockers)
        """The sessions that were seen to hold the locks, at most five, each in a line."""
        times = "once" if tries == 1 else f"{tries} times"
        by = f" It was blocked by {'; '.join(self.blockers)}." if self.blockers else ""
        super().__init__(
            f"Migration {name!r} {problem}, {times}, and was rolled back.{by} End these sessions, or migrate when they "
            "are gone."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.problem, self.tries, self.blockers)


class DatabaseAhead(DblockError):
    """The database is at a newer version than the caller."""

    def __init__(self, name: str, version: str, newer: str) -> None:
        self.name = name
        self.version = version
        self.newer = newer
        super().__init__(
            f"Migration {name!r}: the database is at {newer!r}, which is newer than {version!r}. Deploy the newer "
            "code, or accept a database that is ahead: --when-ahead ok, or when_ahead='ok'."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.version, self.newer)


class SessionsRemain(DblockError):
    """Sessions of an earlier migration could not be ended, so nothing was run."""

    def __init__(self, name: str, pids: Sequence[int]) -> None:
        self.name = name
        self.pids = list(pids)
        listed = ", ".join(map(str, self.pids))
        super().__init__(
            f"Migration {name!r} was not started: sessions of an earlier holder still run (pid {listed}) and did not "
            "end when they were terminated. End them as their role or as a superuser: SELECT pg_terminate_backend(pid)."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.pids)


class TransferRefused(DblockError):
    """A term of an election was not handed over, because the named candidate cannot lead next."""

    _WHY: ClassVar[dict[str, str]] = {
        "absent": "no candidate of that name waits. Name one that campaigns at this moment",
        "outranked": "the leader or another candidate has a higher priority or version, and would take over at once. "
        "Name one with the highest priority",
        "leads": "it is the leader already",
        "over": "there is no leader. Ask again when a term has begun",
    }

    def __init__(self, name: str, candidate: str, why: str) -> None:
        self.name = name
        self.candidate = candidate
        self.why = why
        """One of absent, outranked, leads and over."""
        super().__init__(
            f"Election {name!r} was not transferred to candidate {candidate!r}: {self._WHY.get(why, why)}."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.candidate, self.why)


class TermsForgotten(DblockError):
    """An observer of an election asks for terms that are not kept any more."""

    def __init__(self, name: str, since: int) -> None:
        self.name = name
        self.since = since
        super().__init__(
            f"Election {name!r} does not keep all terms since token {since} any more: only the newest ten thousand are "
            "kept. Call leader(), and observe from there."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.since)


class DatabaseError(DblockError):
    """The database could not be asked, or did not reply."""


class Unavailable(DatabaseError):
    """No connection was available, or it broke. The call may have taken effect."""

    unanswered = False
    """Whether the call was sent and the database did not reply in time."""
    granted = False
    """Whether a lock was granted before the error, and has to be given back."""


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


class EmbeddedError(DblockError):
    """The embedded Postgres could not be started, found or stopped."""


def _option(schema: str) -> str:
    return "" if schema == "dblock" else f" --schema {shlex.quote(schema)}"
