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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

from dblock._core.options import brief, quoted
from dblock._core.schema_version import DEFAULT_SCHEMA, check_name
from dblock.errors import DblockError, InvalidArgument
from dblock.testing.leaks import watching
from dblock.testing.proof.gate import Statement
from dblock.testing.proof.holder import GIVEN
from dblock.testing.proof.own_sessions import noting_own_sessions
from dblock.testing.proof.report import Report, Unsafe, shortened
from dblock.testing.proof.run import SAME_VALUES, BothHolders, Run
from dblock.testing.proof.tables import Tables, difference

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
        proof = Proof(function, dsn, schema, lock, reset, patience, Tables(connection, tables, ignore), connection)
        try:
            return proof.report()
        finally:
            try:
                proof.put_back()
            finally:
                proof.tables.drop_copies()


class Proof:
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
        # Known to the connection alone: the DSN may name several, or leave that to the environment.
        self.server = (connection.info.hostaddr or connection.info.host, connection.info.port)
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
            self.tables.check()
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
                text = shortened(self._recorded[number].text)
                raise DblockError(
                    f"The function sent statement {number + 1}, {text!r}, in its first run, and not when it ran again. "
                    "It keeps something from run to run, such as a cache. Let `reset` put that back too, or call the "
                    "function once before the proof."
                ) from run.first_error()
            reached = run.run_second()
            if run.error is not None:
                return f"the second holder failed: {type(run.error).__name__}: {run.error}"
            between = self.tables.read()
            run.end_first()
            after = self.tables.read()
            regained = run.regained()
            was, ends = run.values(between), run.values(after)
            early = run.harm_before_regained(between)
            sent = run.gate.statements[:reached]
        if early:
            return early
        if after != between and not regained:
            changed = difference(was, ends, ("the second holder left", "then the first one left"))
            lost = difference(self._serial_rows(None), ends, ("two serial runs leave", "these two left"))
            return changed or lost or SAME_VALUES
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
    def _run(self) -> Iterator[Run]:
        self.put_back()
        watch = BothHolders()
        with watching(watch), noting_own_sessions() as own:
            run = Run(self, watch, own)
            try:
                yield run
            finally:
                run.close()
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
            " WHERE expires_at > clock_timestamp() AND NOT token = ANY(%s) RETURNING name"
        )
        for name in self._connection.execute(statement.encode(), [tokens]).fetchall():
            wake = f"SELECT {quoted(self.schema).replace('%', '%%')}.wake_queue(%s)"
            self._connection.execute(wake.encode(), name)

    def is_blocked(self, backends: list[int]) -> bool:
        """Return whether the second holder waits for one of these sessions."""
        statement = BLOCKED_BY.format(schema=quoted(self.schema).replace("%", "%%"))
        row = self._connection.execute(statement.encode(), {"first": backends}).fetchone()
        return bool(row and row[0])

    def open_transactions(self, backends: list[int]) -> list[str]:
        """Return the numbers of the transactions in which these sessions have written so far."""
        found = self._connection.execute(
            "SELECT (pg_snapshot_xmax(pg_current_snapshot())::text::bigint >> 32 << 32) + backend_xid::text::bigint"
            " FROM pg_stat_activity WHERE pid = ANY(%s) AND backend_xid IS NOT NULL",
            [backends],
        ).fetchall()
        return [str(number) for (number,) in found]

    def are_committed(self, transactions: list[str]) -> bool:
        """Return whether one of these transactions was committed."""
        row = self._connection.execute(
            "SELECT EXISTS (SELECT FROM unnest(%s::text[]) AS n WHERE pg_xact_status(n::xid8) = 'committed')",
            [transactions],
        ).fetchone()
        return bool(row and row[0])

    def sessions(self, backends: list[int]) -> int:
        """Return how many of these sessions there are."""
        row = self._connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY(%s)", [backends]
        ).fetchone()
        return int(row[0]) if row else 0
