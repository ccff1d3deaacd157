"""A connection whose queries cannot hang, for an examination or a probe.

Guarantee: no query waits longer than REPLY_TIMEOUT. The server's own limits end what takes too long there. If no reply
comes at all, the socket is shut down.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

import psycopg

from dblock._runtime.error_mapping import cleaned
from dblock._runtime.socket_timeout import bounded
from dblock.errors import Unavailable

if TYPE_CHECKING:
    from dblock._runtime.target import Target

REPLY_TIMEOUT = 15.0
"""Seconds to wait for a reply: longer than the server's own limits."""


class Link:
    """A connection whose queries cannot hang; use it in a `with`."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._name = f"The database at {target}"
        self.connection = target.connect()
        # Behind a pooler the next statement may run in a session that has not prepared it.
        self.connection.prepare_threshold = None

    def query(self, sql: bytes, arguments: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Run a statement, with $1, $2, … for the arguments, and return its rows."""
        try:
            with bounded(self.connection, REPLY_TIMEOUT), psycopg.RawCursor(self.connection) as cursor:
                cursor.execute(sql, arguments or None)
                return cursor.fetchall() if cursor.description else []
        except Unavailable as error:
            cause = error.__cause__
            raise Unavailable(f"{self._name} did not reply within {REPLY_TIMEOUT:g} s.") from (
                cleaned(cause) if isinstance(cause, psycopg.Error) else cause
            )

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # This sends nothing, because the server may have stopped replying.
        self.connection.close()
