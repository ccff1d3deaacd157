"""The database under examination, and the checks and findings about it.

Guarantee: nothing is written, and no statement takes long. Every check runs in a read-only transaction with its own
limits, which end with it, so that a session behind a pooler is left as it was. Names resolve only to the system
catalog, whatever the search path.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from dblock._core import clock
from dblock._core.options import quoted
from dblock._core.schema_version import DEFAULT_SCHEMA
from dblock.admin.schema import VERSION_TABLE

if TYPE_CHECKING:
    from dblock.admin.link import Link
    from dblock.admin.probe import Outcome

STATEMENT_TIMEOUT = 10.0
"""Seconds that one statement may take; a check that needs longer is reported as not run."""

LOCK_TIMEOUT = 2.0
"""Seconds that a statement waits for the lock of another transaction."""

BEGIN = (
    "BEGIN READ ONLY; SET LOCAL search_path TO pg_catalog; "
    f"SET LOCAL statement_timeout TO {STATEMENT_TIMEOUT * 1000:.0f}; "
    f"SET LOCAL lock_timeout TO {LOCK_TIMEOUT * 1000:.0f}"
)

OWNER = "the privileges of the schema's owner"
MONITOR = "membership in pg_monitor"
USER = "USAGE on the schema"


def duration(seconds: float) -> str:
    """Return a duration in the largest unit that fits."""
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


@dataclass(frozen=True)
class Finding:
    """A problem, its consequence and its fix."""

    level: str
    """One of: error, warning, note."""
    what: str
    why: str
    command: str
    """The fix: SQL, or a dblock command."""
    id: str = ""
    """The ID of the check that found it."""
    accepted: bool = False
    """Whether the operator has accepted it. It is shown, but does not count."""


class CannotCheck(Exception):
    """The login lacks a privilege that the check needs."""

    def __init__(self, privilege: str) -> None:
        self.privilege = privilege
        super().__init__(privilege)


class Setting(NamedTuple):
    """A server setting, as a new session of this login finds it."""

    name: str
    value: str
    source: str


class Sample(NamedTuple):
    """A reading of the server's clock, between two readings of this machine's clock."""

    before: float
    server: float
    after: float
    wall: float
    """This machine's time of day, halfway between the two."""


@dataclass(frozen=True)
class Check:
    """One check."""

    find: Callable[[Patient], Iterator[Finding]]
    needs_schema: bool = True
    stops: str = ""
    """The checks to skip after an error: those that need the `schema`, or `all`."""

    @property
    def id(self) -> str:
        """The ID of the check and of its findings."""
        return self.find.__name__.replace("_", "-")

    def run(self, patient: Patient) -> Iterator[Finding]:
        """Run the check and yield its findings."""
        for finding in self.find(patient):
            yield replace(finding, id=self.id)


def server_check(find: Callable[[Patient], Iterator[Finding]]) -> Check:
    """Turn a function into a check of the server, which needs no schema."""
    return Check(find, needs_schema=False)


class Limits(NamedTuple):
    """The limits that the user can choose."""

    snapshot_age: float = 300.0
    listeners: int = 300


class Patient:
    """One database, over one connection."""

    def __init__(self, link: Link, schema: str, fences: str, limits: Limits) -> None:
        self.link = link
        self.schema = schema
        self.fences = fences
        self.limits = limits
        self._inside = False
        self._settings: dict[str, Setting] = {}
        self.samples: list[Sample] = []
        self.outcomes: list[Outcome] | None = None
        """What a probe of the server found; None before the probe."""
        self.database, self.user, self.owner, self.version, self.oid = "", "", "", 0, 0
        self.standby = self.installed = False
        self.revision: str | None = None
        """None if there is none, or if it cannot be read."""
        self.usable = False
        """Whether the checks that need the schema can run."""

    def read_basics(self) -> None:
        """Read the facts that every check needs."""
        # This comes first, so that each setting is as a new session finds it.
        settings = self._query("SELECT name, reset_val, source FROM pg_catalog.pg_settings")
        self._settings = {row[0]: Setting(*row) for row in settings}
        self.samples = [self.sample()]
        ((self.database, self.version, self.user, self.standby),) = self.rows(
            "SELECT current_database()::text, current_setting('server_version_num')::integer, current_user::text,"
            " pg_is_in_recovery()"
        )
        found = self.rows(
            "SELECT n.oid, r.rolname::text, c.oid IS NOT NULL, has_schema_privilege(n.oid, 'USAGE'),"
            " coalesce(has_table_privilege(c.oid, 'SELECT'), false),"
            " EXISTS (SELECT FROM pg_proc AS p WHERE p.pronamespace = n.oid AND p.proname = 'schema_revision'"
            "  AND p.pronargs = 0 AND has_function_privilege(p.oid, 'EXECUTE'))"
            " FROM pg_namespace AS n JOIN pg_roles AS r ON r.oid = n.nspowner"
            " LEFT JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = $1 AND c.relkind = 'r'"
            " WHERE n.nspname = $2",
            VERSION_TABLE,
            self.schema,
        )
        if not found:
            return
        ((self.oid, self.owner, self.installed, enters, reads, asks),) = found
        self.usable = self.installed
        if self.installed and enters and (reads or asks):
            source = f"SELECT version_num::text FROM {self.within(VERSION_TABLE)}"
            rows = self.rows(source if reads else f"SELECT {self.within('schema_revision')}()")
            self.revision = rows[0][0] if rows else None

    def within(self, name: str) -> str:
        """Return the qualified name of an object in dblock's schema, for SQL."""
        return f"{quoted(self.schema)}.{quoted(name) if not name.isidentifier() else name}"

    def setting(self, name: str) -> Setting:
        """Return a setting; its value is empty if this server does not have it."""
        return self._settings.get(name, Setting(name, "", "default"))

    def run(self, command: str, *arguments: str) -> str:
        """Return a dblock command, quoted for a shell."""
        option = [] if self.schema == DEFAULT_SCHEMA else ["--schema", self.schema]
        return " ".join(["dblock", command, *map(shlex.quote, [*arguments, *option])])

    def rows(self, sql: str, *arguments: Any) -> list[tuple[Any, ...]]:
        """Run a query, with $1, $2, … for the arguments, and return its rows."""
        if not self._inside:
            self._inside = True
            self._query(BEGIN)
        return self._query(sql, arguments)

    def end_transaction(self) -> None:
        """End the transaction, if there is one."""
        if self._inside:
            self._inside = False
            self._query("ROLLBACK")

    def sample(self) -> Sample:
        """Read the server's clock and this machine's."""
        before = clock.now()
        ((server,),) = self._query("SELECT date_part('epoch', pg_catalog.clock_timestamp())")
        after = clock.now()
        return Sample(before, float(server), after, time.time() - (after - before) / 2)

    def _query(self, sql: str, arguments: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        return self.link.query(sql.encode(), arguments)
