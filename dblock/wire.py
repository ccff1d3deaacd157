"""One connection, and one function call over it.

Everything goes over it as text, by statements prepared once. That leaves out psycopg's cursors and type adaptation,
which cost a third of the whole call (docs/performance.md). psycopg still does the connecting and all the waiting, so
Ctrl-C and cancellation work as it makes them work.

A pooler may run each statement on another backend, where nothing is prepared. Nothing is then.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from psycopg import errors, generators, pq

from dblock.steps import Call, Row

_FAILED = pq.ExecStatus.FATAL_ERROR


class Wire:
    """A connection, and what has been prepared on it."""

    def __init__(self, connection: Any, prepares: bool) -> None:
        self.connection = connection
        self.prepares = prepares
        self.used_at = 0.0
        self._pgconn: pq.abc.PGconn = connection.pgconn
        self._prepared: dict[bytes, bytes] = {}

    @property
    def usable(self) -> bool:
        """Tell whether another call can go over it."""
        return bool(self._pgconn.transaction_status == pq.TransactionStatus.IDLE)

    def close(self) -> None:
        """End the connection; what psycopg's own close does, without an await."""
        self._pgconn.finish()

    def exchange(self, call: Call) -> Generator[Any, Any, Row | None]:
        """Send the call and return its row; a generator for the connection's `wait`."""
        pgconn = self._pgconn
        args = [None if arg is None else arg.encode() for arg in call.args]
        if self.prepares:
            name = self._prepared.get(call.sql)
            if name is None:
                name = b"dblock_%d" % len(self._prepared)
                pgconn.send_prepare(name, call.sql)
                _checked((yield from generators.execute(pgconn)))
                self._prepared[call.sql] = name
            pgconn.send_query_prepared(name, args)
        else:
            pgconn.send_query_params(call.sql, args)
        result = _checked((yield from generators.execute(pgconn)))
        if result.ntuples == 0:
            return None
        values = [result.get_value(0, column) for column in range(result.nfields)]
        return tuple([None if value is None else value.decode() for value in values])


def _checked(results: list[pq.abc.PGresult]) -> pq.abc.PGresult:
    """Return the result of one statement, or raise the error that it is."""
    result = results[-1]
    if result.status == _FAILED:
        raise errors.error_from_result(result)
    return result
