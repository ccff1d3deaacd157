"""The database that is looked at, and what may be said of it.

Guarantee: nothing is written, and no statement takes long. Every look is a read-only transaction with limits of its
own, which go with it, so that a session behind a pooler is left as it was. Names mean those of the system catalog
alone, whatever the search path.
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
    from dblock.admin.doctor.link import Link

STATEMENT_TIMEOUT = 10.0
"""Seconds that one statement may take; a check that needs longer is left out, and that is said."""

LOCK_TIMEOUT = 2.0
"""Seconds that a statement waits for another's lock."""

BEGIN = (
    "BEGIN READ ONLY; SET LOCAL search_path TO pg_catalog; "
    f"SET LOCAL statement_timeout TO {STATEMENT_TIMEOUT * 1000:.0f}; "
    f"SET LOCAL lock_timeout TO {LOCK_TIMEOUT * 1000:.0f}"
)

OWNER = "the rights of the schema's owner"
MONITOR = "membership in pg_monitor"
USER = "the right to use the schema"


@dataclass(frozen=True)
class Finding:
    """Something that hurts or will, and what mends it."""

    level: str
    """One of: error, warning, note."""
    what: str
    why: str
    command: str
    """What to run: SQL, or a command of dblock's."""
    id: str = ""
    """Which check has found it."""


class CannotCheck(Exception):
    """This login may not see what the check looks at."""

    def __init__(self, right: str) -> None:
        self.right = right
        super().__init__(right)


class Setting(NamedTuple):
    """A setting of the server's, as a new session of this login finds it."""

    name: str
    value: str
    source: str


class Sample(NamedTuple):
    """What the server's clock said, between two looks at ours."""

    before: float
    server: float
    after: float
    wall: float
    """This machine's time of day, in the middle."""


@dataclass(frozen=True)
class Check:
    """One thing to look at."""

    find: Callable[[Patient], Iterator[Finding]]
    needs_schema: bool = True
    stops: str = ""
    """What makes no sense any more where it has found an error: `schema`, or `all`."""

    @property
    def id(self) -> str:
        """What it is called, and its findings with it."""
        return self.find.__name__.replace("_", "-")

    def run(self, patient: Patient) -> Iterator[Finding]:
        """Look."""
        for finding in self.find(patient):
            yield replace(finding, id=self.id)


def of_server(find: Callable[[Patient], Iterator[Finding]]) -> Check:
    """Make a check that looks at the server, whatever is installed."""
    return Check(find, needs_schema=False)


class Limits(NamedTuple):
    """What is held to be too much, where that can be chosen."""

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
        self.database, self.user, self.owner, self.version, self.oid = "", "", "", 0, 0
        self.standby = self.installed = False
        self.revision: str | None = None
        """None where there is none, or it cannot be seen."""
        self.usable = False
        """Whether the schema is one that this version can look at."""

    def meet(self) -> None:
        """Learn what every check wants to know."""
        # Before anything is set, so that each setting is as a new session finds it.
        settings = self._ask("SELECT name, reset_val, source FROM pg_catalog.pg_settings")
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
        """Return the name of something in our schema, for SQL."""
        return f"{quoted(self.schema)}.{quoted(name) if not name.isidentifier() else name}"

    def setting(self, name: str) -> Setting:
        """Return a setting; one that this server does not have is empty."""
        return self._settings.get(name, Setting(name, "", "default"))

    def run(self, command: str, *arguments: str) -> str:
        """Return a command of dblock's, as a shell takes it."""
        option = [] if self.schema == DEFAULT_SCHEMA else ["--schema", self.schema]
        return " ".join(["dblock", command, *map(shlex.quote, [*arguments, *option])])

    def rows(self, sql: str, *arguments: Any) -> list[tuple[Any, ...]]:
        """Ask the database; $1, $2, … stand for the arguments."""
        if not self._inside:
            self._inside = True
            self._ask(BEGIN)
        return self._ask(sql, arguments)

    def end_look(self) -> None:
        """End the transaction, if one was begun."""
        if self._inside:
            self._inside = False
            self._ask("ROLLBACK")

    def sample(self) -> Sample:
        """Look at the server's clock, and at ours."""
        before = clock.now()
        ((server,),) = self._ask("SELECT date_part('epoch', pg_catalog.clock_timestamp())")
        after = clock.now()
        return Sample(before, float(server), after, time.time() - (after - before) / 2)

    def _ask(self, sql: str, arguments: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        return self.link.ask(sql.encode(), arguments)
