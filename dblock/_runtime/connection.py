"""One connection, and one function call over it.

Arguments and rows go over it as text, by statements that are prepared once. That leaves out psycopg's cursors and type
adaptation, which cost a third of the whole call (docs/performance/locks.md). psycopg still connects and waits, so
Ctrl-C and cancellation work as psycopg makes them work. Only a thread that sends a prepared statement waits by itself,
because that takes half of the processor's time. If it is interrupted, its runner cancels the statement.

A pooler may run each statement on another backend, where it is not prepared. Behind a pooler nothing is prepared.
"""

from __future__ import annotations

import hashlib
import re
import select
import time
from collections.abc import Callable, Generator
from typing import Any

import psycopg
from psycopg import errors, generators, pq, waiting

from dblock._core.effects import Call, Row
from dblock._core.statements import BEGIN_READ_COMMITTED
from dblock._runtime.error_mapping import ENDS_SESSION, Overdue

Results = list[pq.abc.PGresult]

LATE = "the reply did not come in time"

POLL_INTERVAL = 0.1
"""Seconds between two checks by psycopg of whether the time is up, unless a call asks for more frequent ones."""

Execute = Callable[[pq.abc.PGconn], Generator[Any, Any, Results]]

# Members of an enum, looked up once, because each lookup costs as much as a call.
_FAILED = pq.ExecStatus.FATAL_ERROR
_IDLE = pq.TransactionStatus.IDLE


def _own_poll(socket: int) -> Any:
    """Return a poll() of the socket, or None where psycopg knows better how to wait: under gevent and eventlet."""
    if waiting.wait is not getattr(waiting, "wait_c", None) or not hasattr(select, "poll"):
        return None
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return poll


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
        self._poll = _own_poll(connection.pgconn.socket) if execute is generators.execute else None
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

    def call(self, call: Call, within: float) -> Row | None:
        """Send the call and return its row, in a thread. See exchange."""
        name = self._prepared.get(call.sql) if self.prepares else None
        poll = self._poll
        if name is None or poll is None:
            row: Row | None = self.connection.wait(self.exchange(call, within), poll_interval(within))
            return row
        pgconn = self._pgconn
        deadline = time.monotonic() + within
        self._preparing = None
        pgconn.send_query_prepared(name, [None if arg is None else arg.encode() for arg in call.args])
        if pgconn.flush():  # the socket takes no more at this moment
            results = self.connection.wait(_bounded(self._execute(pgconn), deadline), poll_interval(within))
        else:
            results = []
            while True:
                while pgconn.is_busy():
                    if not poll.poll(poll_interval(within) * 1000) and time.monotonic() >= deadline:
                        raise Overdue(LATE)
                    pgconn.consume_input()
                result = pgconn.get_result()
                if result is None:
                    break
                results.append(result)
        return _row(_checked(results))

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
        return _row(result)

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
    get_value = result.get_value
    return tuple(
        [None if (value := get_value(0, column)) is None else value.decode() for column in range(result.nfields)]
    )


def _checked(results: Results) -> pq.abc.PGresult:
    """Return the result of one statement. If it is an error, raise it."""
    if not results:
        raise psycopg.OperationalError("the server's reply is empty")
    result = results[-1]
    if result.status == _FAILED:
        raise errors.error_from_result(result)
    return result
