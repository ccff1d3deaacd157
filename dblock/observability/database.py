"""The metrics that come from the database: what all processes hold and wait for, in one query.

The query needs the privilege `see`. If the database does not reply, `dblock_database_up` is 0 and the other metrics of
the database are left out, because an old value would look like a current one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dblock._core.options import quoted
from dblock._core.schema_version import DEFAULT_SCHEMA, check_name
from dblock._runtime.forks import importing
from dblock.errors import DblockError
from dblock.observability import catalogue
from dblock.observability.store import Family, Groups, family

if TYPE_CHECKING:
    from dblock._runtime.target import Target, Where
    from dblock.admin.link import Link

logger = logging.getLogger("dblock")

COLUMNS = (
    catalogue.HELD,
    catalogue.OLDEST_HOLD,
    catalogue.WAITING,
    catalogue.OLDEST_WAIT,
    catalogue.ONCE_OVERDUE,
)
"""The metrics in the order of the columns of lock_metrics(), after the group."""


class DatabaseMetrics:
    """Queries the database for each scrape, over one connection that stays open. Threads may share it."""

    def __init__(self, where: Where | Target = None, *, schema: str = DEFAULT_SCHEMA) -> None:
        """Name the database, as for a Client. Nothing is opened yet."""
        from dblock._runtime.target import resolve

        self._target = resolve(where)
        self._sql = f"SELECT * FROM {quoted(check_name(schema))}.lock_metrics($1::text[], $2)".encode()
        self._groups = Groups()
        self._link: Link | None = None
        self._lock = threading.Lock()
        self._fails = False

    def families(self) -> list[Family]:
        """Return the current values. If the database does not reply, return `dblock_database_up 0` alone."""
        try:
            rows = self._query()
        except Exception as error:
            if not isinstance(error, DblockError) and not type(error).__module__.startswith("psycopg"):
                raise
            level = logging.DEBUG if self._fails else logging.WARNING
            logger.log(level, "metrics: the database did not reply: %s", error)
            self._fails = True
            return down()
        self._fails = False
        return families_of(rows, self._groups)

    def close(self) -> None:
        """Close the connection. The next call opens another."""
        with self._lock:
            self._close()

    def _query(self) -> list[tuple[Any, ...]]:
        with importing:
            import psycopg

            from dblock.admin.link import Link

        arguments = (self._groups.known, catalogue.MAX_GROUPS)
        with self._lock:
            if self._link is not None:
                try:
                    return self._link.query(self._sql, arguments)
                except (psycopg.OperationalError, psycopg.InterfaceError, DblockError):
                    # The connection may have ended since the last time.
                    self._close()
            self._link = Link(self._target)
            try:
                return self._link.query(self._sql, arguments)
            except BaseException:
                self._close()
                raise

    def _close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            with contextlib.suppress(Exception):
                link.connection.close()


def families_of(rows: Sequence[Sequence[Any]], groups: Groups) -> list[Family]:
    """Return the metrics for the rows of lock_metrics(), and remember their groups."""
    for group, *_ in rows:
        groups.admit(group)
    found = [
        family(metric, [((row[0],), float(row[column])) for row in rows])
        for column, metric in enumerate(COLUMNS, start=1)
    ]
    return [*found, family(catalogue.DATABASE_UP, [((), 1.0)])]


def down() -> list[Family]:
    """Return the metrics of a database that does not reply."""
    return [family(catalogue.DATABASE_UP, [((), 0.0)])]
