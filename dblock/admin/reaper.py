"""The reaper: delete the rows of locks that have been idle for a long time.

Guarantee: the reaper deletes no lock that is in use and lowers no token. The database ensures both. This module only
calls it, batch after batch, each in its own transaction. The reaper is housekeeping: without it, a table of locks that
are named after invoices grows with the invoices, and nothing else goes wrong.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from dblock._core.options import Seconds, check_seconds, quoted
from dblock._core.schema_version import DEFAULT_SCHEMA, check_name
from dblock._runtime.error_mapping import translated
from dblock._runtime.target import Target, resolve
from dblock.admin.schema import status_of
from dblock.errors import InvalidArgument, LoginRefused, NotWritable, Unavailable

if TYPE_CHECKING:
    from dblock._runtime.target import Where

logger = logging.getLogger("dblock")

DAY = 86_400.0
HOUR = 3_600.0
BATCH = 1_000


class Reaper:
    """Deletes idle locks, once or at intervals. Any number of reapers may run at once."""

    def __init__(
        self,
        target: Target | Where,
        *,
        idle: Seconds = DAY,
        interval: Seconds = HOUR,
        batch: int = BATCH,
        schema: str = DEFAULT_SCHEMA,
    ) -> None:
        """Set the database and the minimum idle time. Nothing is deleted yet."""
        self._target = resolve(target)
        self._schema = check_name(schema)
        self._idle = check_seconds("idle time", idle)
        self._interval = check_seconds("interval", interval)
        if not 0 <= self._idle < 1e9 or not 0 < self._interval < 1e9:
            raise InvalidArgument(
                "A reaper's idle time must be 0 s or more and its interval more than 0 s, both below 1e9 s; "
                f"got {idle} and {interval}."
            )
        if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= 1_000_000:
            raise InvalidArgument(f"A reaper's batch must be a number of rows from 1 to 1000000; got {batch!r}.")
        self._batch = batch

    def once(self) -> int:
        """Delete all locks that are idle now, and return the number of deleted rows."""
        statement = f"SELECT {quoted(self._schema).replace('%', '%%')}.reap(make_interval(secs => %s), %s)".encode()
        deleted = 0
        with translated(self._schema), self._target.connect() as connection:
            status_of(connection, self._schema).check()
            while True:
                with connection.transaction():  # which names its isolation, also through a pooler
                    row = connection.execute(statement, [self._idle, self._batch]).fetchone()
                assert row is not None
                count = int(row[0])
                deleted += count
                if count < self._batch:
                    return deleted

    def run(self, stop: threading.Event | None = None) -> None:
        """Reap at intervals until `stop` is set. If the database is unreachable, retry at the next interval."""
        stop = stop or threading.Event()
        worked = False
        while not stop.is_set():
            try:
                logger.info("reaper deleted %d idle locks", self.once())
                worked = True
            except (Unavailable, NotWritable, LoginRefused) as error:
                if isinstance(error, LoginRefused) and not worked:
                    raise  # a password that has worked before may be in the middle of a change
                logger.warning("reaper could not run; retrying in %g s: %s", self._interval, error)
            stop.wait(self._interval)
