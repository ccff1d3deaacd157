"""Prove that a function is fenced: freeze it at every statement, let a second holder through, and look for harm.

There is one run for each statement that the function sends:

1. The first holder runs the function up to that statement. The gate holds the statement before it reaches the server,
   and freezes the whole holder, with the connections of its client.
2. The proof lets the lease expire in the database, and a second holder runs the same function from beginning to end.
3. The first holder continues. It finds its lease lost, as a process does that was paused for longer than its ttl.

Harm is a row that the first holder changes after step 2, whatever the row then holds, unless the holder was granted the
lock again. Postgres stores the number of the writing transaction with each row, so a write of the same values counts.

If the second holder has to wait for a transaction of the first one, the gate lets the first one continue, one statement
at a time, until the second one can. That is how a fence or a proof of the lease inside the transaction works: the first
transaction comes before the second holder. Then the rows must be those of a serial run, in which the first holder dies
at the statement that it has reached, and the second one runs after that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

from dblock._core.options import brief, quoted
from dblock._core.schema_version import DEFAULT_SCHEMA, check_name
from dblock.errors import DblockError, InvalidArgument
from dblock.testing.client_clock import ClientClock
from dblock.testing.leaks import Watch, watching
from dblock.testing.proof.gate import Gate, Statement
from dblock.testing.proof.holder import GIVEN, Holder
from dblock.testing.proof.report import Report, Unsafe
from dblock.testing.proof.tables import Rows, Tables, difference, values

POLL = 0.005

BLOCKED_BY = """
SELECT EXISTS (
    SELECT FROM pg_stat_activity
    WHERE datname = current_database() AND NOT pid = ANY(%(first)s) AND pg_blocking_pids(pid) && %(first)s::integer[]
) OR (
    -- A grant does not wait for a transaction that has proved its lease. It leaves a ticket in the queue.
    EXISTS (SELECT FROM {schema}.lock_tickets)
    AND EXISTS (
        SELECT FROM pg_stat_activity WHERE pid = ANY(%(first)s::integer[]) AND state LIKE 'idle in transaction%%'
    )
)
"""


def prove_fenced(
    function: Callable[..., Any],
    *,
    dsn: str,
    schema: str = DEFAULT_SCHEMA,
    lock: str = "prove_fenced",
    tables: Sequence[str] | None = None,
    ignore: Sequence[str] = (),
    reset: Callable[[], object] | None = None,
    patience: float = 30.0,
) -> Report:
    """Run a function once for each of its statements, freeze it there, and report where a frozen holder does harm.

    The function says by the names of its parameters how it reaches the database: `dsn`, `client` (a dblock client),
    `connection` (of psycopg), `engine` (of SQLAlchemy) or `lease`. If it takes `lease`, it runs under the lock `lock`,
    otherwise it takes its lock itself. An async function gets the asynchronous kinds. Bind all other parameters with
    `functools.partial`.

    The rows of all tables are put back before each run, or `reset` is called for that. `tables` are those to compare,
    by default all. `ignore` names columns that differ from run to run, such as random keys. Tokens and the time may
    differ without that. One run may take `patience`.
    """
    check_name(schema)
    if not isinstance(dsn, str):
        raise InvalidArgument(f"prove_fenced takes a DSN as text, such as that of dblock_dsn; got {brief(dsn)}.")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET TimeZone TO 'UTC'")
        proof = _Proof(function, dsn, schema, lock, reset, patience, Tables(connection, tables, ignore), connection)
        try:
            return proof.report()
        finally:
            proof.put_back()
            proof.tables.drop_copies()


class _Run:
    """One run: the first holder behind its gate, and the second one."""

    def __init__(self, proof: _Proof, watch: Watch) -> None:
        self._proof = proof
        self._watch = watch
        self._first = Holder(proof.function, proof.schema, proof.lock)
        self._second = Holder(proof.function, proof.schema, proof.lock)
        self.gate = Gate(proof.dsn, self._first.where)
        self._since = proof.tables.now()
        self.foreign_tokens = proof.live_tokens()
        """The tokens of locks that this run did not acquire."""
        self._first_clients: list[Any] = []
        self._grants_of_both = 0
        self.error: BaseException | None = None
        """The error that the second holder has raised."""

    def start(self, freeze_at: int | None = None) -> bool:
        """Run the first holder up to a statement, or to its end; return whether it is frozen there."""
        if freeze_at is not None:
            self.gate.freeze_at(freeze_at)
        self._first.start(self.gate.dsn)
        until = time.monotonic() + self._proof.patience
        while self._first.running and not self.gate.frozen:
            self._check(until, "The function did not return, nor send its next statement")
            time.sleep(POLL)
        self._first_clients = [client for client, _ in self._watch.clients]
        if self.gate.frozen:
            for its_clock in self._clocks():
                its_clock.stop()
            for client in self._first_clients:
                _withhold_news(client)
        return self.gate.frozen

    def _clocks(self) -> list[ClientClock]:
        clocks = [client._runtime.flows.clock for client in self._first_clients]
        return [one for one in clocks if isinstance(one, ClientClock)]

    def _pass_ttl(self) -> None:
        """Let every check of the first holder find its lease lost, as after a pause that was longer than its ttl."""
        for its_clock in self._clocks():
            its_clock.resume_past_ttl()

    def end_first(self) -> None:
        """Let the first holder run to its end, with its lease lost."""
        self._pass_ttl()
        self.gate.resume()
        self._join(self._first, "The function did not return after it was resumed")

    def kill_first(self) -> None:
        """Let the first holder die where it is."""
        self._pass_ttl()
        self.gate.cut()
        self._join(self._first, "The function did not return after its connections were cut")
        until = time.monotonic() + self._proof.patience
        while self._proof.sessions(self.gate.backends()):
            self._check(until, "The sessions of the function did not end")
            time.sleep(POLL)

    def run_second(self) -> int:
        """Run the second holder to its end; return the number of the statement before which the first one is held."""
        self._proof.expire_except(self.foreign_tokens)
        self._second.start(self._proof.dsn)
        until = time.monotonic() + self._proof.patience
        stepped = False
        while self._second.running:
            self._check(until, "The second holder did not return. Does the function wait for a lock that stays held?")
            if self.gate.frozen and self._proof.is_blocked(self.gate.backends()):
                if not stepped:
                    self._pass_ttl()
                    stepped = True
                reached = len(self.gate.statements)
                self.gate.step()
                # Wait for its next statement, or its end. Then check again whether the second holder can continue.
                while len(self.gate.statements) == reached and self._first.running and self._second.running:
                    self._check(until, "The function did not return, nor send its next statement")
                    time.sleep(POLL)
            time.sleep(POLL)
        self.error = self._second.error
        self._grants_of_both = len(self._watch.grants)
        return self.gate.reached

    def first_error(self) -> BaseException | None:
        """Return the error that the first holder has raised, None if it has returned."""
        return self._first.error

    def regained(self) -> bool:
        """Return whether the first holder was granted a lock after the second one had returned."""
        return len(self._watch.grants) > self._grants_of_both

    def values(self, rows: Rows) -> dict[str, list[str]]:
        """Return the rows without what differs from run to run."""
        tokens = [hold.token for hold, _ in self._watch.grants if hold.token is not None]
        return values(rows, tokens, self._since)

    def _join(self, holder: Holder, message: str) -> None:
        if not holder.join(self._proof.patience):
            raise DblockError(f"{message} within {self._proof.patience:g} s.")

    def _check(self, until: float, message: str) -> None:
        if time.monotonic() > until:
            raise DblockError(f"{message} within {self._proof.patience:g} s.")


def _withhold_news(client: Any) -> None:
    """Let the tasks of a client receive no news of a loss: no event, and no cancellation of a body."""
    callbacks: Any = getattr(client._runtime, "callbacks", None)
    if hasattr(callbacks, "in_loop"):
        callbacks.in_loop = lambda function: None


class _Proof:
    """The proof of one function."""

    def __init__(
        self,
        function: Callable[..., Any],
        dsn: str,
        schema: str,
        lock: str,
        reset: Callable[[], object] | None,
        patience: float,
        tables: Tables,
        connection: psycopg.Connection[Any],
    ) -> None:
        self.function, self.dsn, self.schema, self.lock = function, dsn, schema, lock
        self.patience = patience
        self.tables = tables
        self._reset = reset
        self._connection = connection
        self._recorded: list[Statement] = []
        """The statements of an undisturbed run."""
        self._serial: dict[int | None, dict[str, list[str]]] = {}
        """The rows of each serial run, by the statement at which the first holder dies."""

    def report(self) -> Report:
        """Find the statements, and freeze the function at each of them."""
        statements = self._recorded = self._record()
        inner = getattr(self.function, "func", self.function)
        report = Report(getattr(inner, "__qualname__", repr(inner)), statements)
        for number, statement in enumerate(statements):
            harm = self._harm(number)
            if harm:
                report.unsafe.append(Unsafe(number + 1, statement, harm))
        return report

    def _record(self) -> list[Statement]:
        with self._run() as run:
            before = self.tables.read()
            run.start()
            if (error := run.first_error()) is not None:
                raise error
            if not run.gate.statements:
                raise DblockError(
                    "The function sent no statement over what its parameters gave it, so there is nothing to prove. "
                    f"Does it use a connection of its own? Let it reach the database by one of {', '.join(GIVEN)}."
                )
            if self.tables.read() == before:
                raise DblockError(
                    "The function changed no row of the tables that are compared, so there is nothing to prove. Give "
                    "it something to do, such as rows to change, and look at `dsn` and `tables`."
                )
            return list(run.gate.statements)

    def _harm(self, number: int) -> str:
        """Freeze the function at a statement. Return the harm that it did, or an empty text."""
        with self._run() as run:
            if not run.start(number):
                return ""  # the function took another path, and never sent this statement
            reached = run.run_second()
            if run.error is not None:
                return f"the second holder failed: {type(run.error).__name__}: {run.error}"
            between = self.tables.read()
            run.end_first()
            after = self.tables.read()
            regained = run.regained()
            was, ends = run.values(between), run.values(after)
            sent = run.gate.statements[:reached]
        if after != between and not regained:
            changed = difference(was, ends, ("the second holder left", "then the first one left"))
            lost = difference(self._serial_rows(None), ends, ("two serial runs leave", "these two left"))
            return changed or lost or "the first holder wrote the same values again, after the second one"
        if regained or reached > number:
            expected = self._serial_rows(None if regained else self._same_as_recorded(sent))
            return difference(expected, ends, ("a serial run leaves", "these two left"))
        return ""

    def _same_as_recorded(self, sent: list[Statement]) -> int:
        """Return how many statements are those of an undisturbed run: a holder that finds its loss takes another path.

        The first other statement is usually a ROLLBACK, which leaves what the death of the holder leaves.
        """
        for number, statement in enumerate(sent):
            if number >= len(self._recorded) or statement.text != self._recorded[number].text:
                return number
        return len(sent)

    def _serial_rows(self, dies_at: int | None) -> dict[str, list[str]]:
        """Return the rows of a serial run: the first holder dies at this statement, or returns, and the second runs."""
        if dies_at not in self._serial:
            with self._run() as run:
                if run.start(dies_at):
                    run.kill_first()
                run.run_second()
                self._serial[dies_at] = run.values(self.tables.read())
        return self._serial[dies_at]

    @contextmanager
    def _run(self) -> Iterator[_Run]:
        self.put_back()
        with watching(Watch()) as watch:
            run = _Run(self, watch)
            try:
                yield run
            finally:
                run.gate.close()
                watch.close_clients()
                self.expire_except(run.foreign_tokens)

    def put_back(self) -> None:
        """Give the tables the rows that they had at first."""
        if self._reset is not None:
            self._reset()
        else:
            self.tables.put_back()

    def live_tokens(self) -> list[int]:
        """Return the tokens of all locks that are held."""
        statement = f"SELECT token FROM {quoted(self.schema)}.distributed_locks WHERE expires_at > clock_timestamp()"
        return [token for (token,) in self._connection.execute(statement.encode()).fetchall()]

    def expire_except(self, tokens: list[int]) -> None:
        """Let every lease expire, except those with these tokens."""
        statement = (
            f"UPDATE {quoted(self.schema).replace('%', '%%')}.distributed_locks SET expires_at = clock_timestamp()"
            " WHERE expires_at > clock_timestamp() AND NOT token = ANY(%s)"
        )
        self._connection.execute(statement.encode(), [tokens])

    def is_blocked(self, backends: list[int]) -> bool:
        """Return whether the second holder waits for one of these sessions."""
        statement = BLOCKED_BY.format(schema=quoted(self.schema).replace("%", "%%"))
        row = self._connection.execute(statement.encode(), {"first": backends}).fetchone()
        return bool(row and row[0])

    def sessions(self, backends: list[int]) -> int:
        """Return how many of these sessions there are."""
        row = self._connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY(%s)", [backends]
        ).fetchone()
        return int(row[0]) if row else 0
