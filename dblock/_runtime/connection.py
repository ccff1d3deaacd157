"""One connection, and one function call over it.

Arguments and rows go over it as text, by statements that are prepared once. That leaves out psycopg's cursors and type
adaptation, which cost a third of the whole call (docs/performance/locks.md). psycopg still connects and waits, so
Ctrl-C and cancellation work as psycopg makes them work.

A pooler may run each statement on another backend, where it is not prepared. Behind a pooler nothing is prepared.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Generator
from typing import Any

import psycopg
from psycopg import errors, generators, pq

from dblock._core.effects import Call, Row
from dblock._core.statements import BEGIN_READ_COMMITTED
from dblock._runtime.error_mapping import Overdue

Results = list[pq.abc.PGresult]

LATE = "the reply did not come in time"

POLL_INTERVAL = 0.1
"""Seconds between two checks by psycopg of whether the time is up, unless a call asks for more frequent ones."""

Execute = Callable[[pq.abc.PGconn], Generator[Any, Any, Results]]

ENDS_SESSION = ("FATAL", "PANIC")
"""The severities of a server's last message."""

# Members of an enum, looked up once, because each lookup costs as much as a call.
_FAILED = pq.ExecStatus.FATAL_ERROR
_IDLE = pq.TransactionStatus.IDLE


class RawConnection:
    """A connection, and the statements that are prepared on it."""

    def __init__(self, connection: Any, prepares: bool, execute: Execute = generators.execute) -> None:
        self.connection = connection
        self.prepares = prepares
        self.needs_transactions = False
        """Whether each call gets a transaction of its own, because its isolation cannot be set for the session."""
        self.used_at = 0.0
        self.slot: Any = None
        """Its slot in the pool."""
        self._execute = execute
        self._pgconn: pq.abc.PGconn = connection.pgconn
        self._prepared: dict[bytes, bytes] = {}
        self._preparing: tuple[bytes, bytes] | None = None
        """The statement that is being prepared, and its name."""

    @property
    def busy(self) -> bool:
        """Whether a statement is still under way over it."""
        return bool(self._pgconn.transaction_status == pq.TransactionStatus.ACTIVE)

    @property
    def usable(self) -> bool:
        """Whether another call can go over it."""
        return bool(self._pgconn.transaction_status == _IDLE)

    def drain(self, within: float) -> Generator[Any, Any, None]:
        """Read the rest of an exchange that was given up; a generator for the connection's `wait`."""
        deadline = time.monotonic() + within
        results = yield from _bounded(_fetch_until_fatal(self._pgconn), deadline)
        if self._pgconn.transaction_status == pq.TransactionStatus.INERROR:
            yield from self._roll_back(deadline)
        _checked(results)
        self._note_prepared()

    def close(self) -> None:
        """Close the connection, as psycopg's own close does, but without an await."""
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
                # Named after its text: behind a pooler another client may use a shorter name for another statement.
                name = b"dblock_" + hashlib.sha256(call.sql).hexdigest()[:32].encode()
                self._preparing = call.sql, name
                pgconn.send_prepare(name, call.sql)
                _checked((yield from _bounded(generators.execute(pgconn), deadline)))
                self._note_prepared()
            pgconn.send_query_prepared(name, args)
        elif self.needs_transactions:
            return (yield from self._exchange_in_transaction(call.sql, args, deadline))
        else:
            pgconn.send_query_params(call.sql, args)
        # _bounded(), without the cost of another generator.
        steps = self._execute(pgconn)
        try:
            state = next(steps)
            while True:
                ready = yield state
                if not ready and time.monotonic() >= deadline:
                    raise Overdue(LATE)
                state = steps.send(ready)
        except StopIteration as done:
            result = _checked(done.value)
        # _row(), without the cost of a call.
        if result.ntuples == 0:
            return None
        get_value = result.get_value
        return tuple(
            [None if (value := get_value(0, column)) is None else value.decode() for column in range(result.nfields)]
        )

    def _exchange_in_transaction(
        self, sql: bytes, args: list[bytes | None], deadline: float
    ) -> Generator[Any, Any, Row | None]:
        """Send the call in a transaction of its own, in one message, and return its row."""
        escape = pq.Escaping(self._pgconn).escape_literal
        values = [b"NULL" if arg is None else escape(arg) for arg in args]
        call = re.sub(rb"\$(\d+)", lambda match: values[int(match[1]) - 1], sql)
        self._pgconn.send_query(b";".join((BEGIN_READ_COMMITTED, call, b"COMMIT")))
        results = yield from _bounded(self._execute(self._pgconn), deadline)
        try:
            _checked(results)
        except psycopg.Error:
            if self._pgconn.transaction_status == pq.TransactionStatus.INERROR:
                yield from self._roll_back(deadline)
            raise
        return _row(results[1])

    def _roll_back(self, deadline: float) -> Generator[Any, Any, None]:
        self._pgconn.send_query(b"ROLLBACK")
        yield from _bounded(self._execute(self._pgconn), deadline)

    def _note_prepared(self) -> None:
        if self._preparing is not None:
            sql, name = self._preparing
            self._prepared[sql] = name
            self._preparing = None


def poll_interval(within: float) -> float:
    """Return the seconds between two checks of whether the time is up."""
    return min(within / 20, POLL_INTERVAL)


def execute_until_fatal(pgconn: pq.abc.PGconn) -> Generator[Any, Any, Results]:
    """Send a query and return its results, as psycopg does, but do not wait for more after the server's last message.

    The server closes its socket some time after that message, and frees the session's locks before.
    """
    yield from generators.send(pgconn)
    return (yield from _fetch_until_fatal(pgconn))


def _fetch_until_fatal(pgconn: pq.abc.PGconn) -> Generator[Any, Any, Results]:
    results: Results = []
    while (result := (yield from generators.fetch(pgconn))) is not None:
        results.append(result)
        if result.status == _FAILED and errors.Diagnostic(result).severity_nonlocalized in ENDS_SESSION:
            break
    return results


def _bounded(steps: Generator[Any, Any, Results], deadline: float) -> Generator[Any, Any, Results]:
    """Run psycopg's generator, and raise Overdue when nothing has come by the deadline."""
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


def _row(result: pq.abc.PGresult) -> Row | None:
    if result.ntuples == 0:
        return None
    values = [result.get_value(0, column) for column in range(result.nfields)]
    return tuple([None if value is None else value.decode() for value in values])


def _checked(results: Results) -> pq.abc.PGresult:
    """Return the result of one statement. If it is an error, raise it."""
    if not results:
        raise psycopg.OperationalError("the server's reply is empty")
    result = results[-1]
    if result.status == _FAILED:
        raise errors.error_from_result(result)
    return result
