"""One connection, and one function call over it.

Everything goes over it as text, by statements prepared once. That leaves out psycopg's cursors and type adaptation,
which cost a third of the whole call (docs/concepts/performance.md). psycopg still does the connecting and all the
waiting, so Ctrl-C and cancellation work as it makes them work.

A pooler may run each statement on another backend, where nothing is prepared. Nothing is then.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator
from typing import Any

import psycopg
from psycopg import errors, generators, pq

from dblock._core.effects import Call, Row
from dblock._runtime.error_mapping import Overdue

Results = list[pq.abc.PGresult]

LATE = "the answer did not come in time"

_FAILED = pq.ExecStatus.FATAL_ERROR


class RawConnection:
    """A connection, and what has been prepared on it."""

    def __init__(self, connection: Any, prepares: bool) -> None:
        self.connection = connection
        self.prepares = prepares
        self.used_at = 0.0
        self.place: Any = None
        """Its place in the pool."""
        self._pgconn: pq.abc.PGconn = connection.pgconn
        self._prepared: dict[bytes, bytes] = {}
        self._preparing: tuple[bytes, bytes] | None = None
        """What is being prepared, and under which name."""

    @property
    def busy(self) -> bool:
        """Tell whether a statement is still under way over it."""
        return bool(self._pgconn.transaction_status == pq.TransactionStatus.ACTIVE)

    @property
    def usable(self) -> bool:
        """Tell whether another call can go over it."""
        return bool(self._pgconn.transaction_status == pq.TransactionStatus.IDLE)

    def drain(self, within: float) -> Generator[Any, Any, None]:
        """Read what is left of an exchange that was given up; a generator for the connection's `wait`."""
        _checked((yield from _bounded(generators.fetch_many(self._pgconn), time.monotonic() + within)))
        self._note_prepared()

    def close(self) -> None:
        """End the connection; what psycopg's own close does, without an await."""
        self._pgconn.finish()

    def exchange(self, call: Call, within: float) -> Generator[Any, Any, Row | None]:
        """Send the call and return its row; a generator for the connection's `wait`."""
        pgconn = self._pgconn
        deadline = time.monotonic() + within
        self._preparing = None
        args = [None if arg is None else arg.encode() for arg in call.args]
        if self.prepares:
            name = self._prepared.get(call.sql)
            if name is None:
                # Named after its text: behind a pooler the name may be another client's, for another statement.
                name = b"dblock_" + hashlib.sha256(call.sql).hexdigest()[:32].encode()
                self._preparing = call.sql, name
                pgconn.send_prepare(name, call.sql)
                _checked((yield from _bounded(generators.execute(pgconn), deadline)))
                self._note_prepared()
            pgconn.send_query_prepared(name, args)
        else:
            pgconn.send_query_params(call.sql, args)
        # _bounded(), without the cost of another generator.
        steps = generators.execute(pgconn)
        try:
            state = next(steps)
            while True:
                ready = yield state
                if not ready and time.monotonic() >= deadline:
                    raise Overdue(LATE)
                state = steps.send(ready)
        except StopIteration as done:
            result = _checked(done.value)
        if result.ntuples == 0:
            return None
        values = [result.get_value(0, column) for column in range(result.nfields)]
        return tuple([None if value is None else value.decode() for value in values])

    def _note_prepared(self) -> None:
        if self._preparing is not None:
            sql, name = self._preparing
            self._prepared[sql] = name
            self._preparing = None


def _bounded(steps: Generator[Any, Any, Results], deadline: float) -> Generator[Any, Any, Results]:
    """Do the same, and raise Overdue when nothing has come by then."""
    try:
        state = next(steps)
        while True:
            ready = yield state
            if not ready and time.monotonic() >= deadline:
                raise Overdue(LATE)
            state = steps.send(ready)
    except StopIteration as done:
        results: Results = done.value
        return results


def _checked(results: Results) -> pq.abc.PGresult:
    """Return the result of one statement, or raise the error that it is."""
    if not results:
        raise psycopg.OperationalError("the server's answer is empty")
    result = results[-1]
    if result.status == _FAILED:
        raise errors.error_from_result(result)
    return result
