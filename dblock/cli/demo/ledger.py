"""The ledger that the story's workers keep: a balance, and a receipt for every deposit.

The ledger has its own schema, with the fences that protect it in the second act. The schema is created for one run of
the story and removed afterwards. A deposit does what a program does that trusts its lock alone: it reads the balance,
adds to it, and writes the sum with a receipt in one transaction. The books add up if the balance equals the opening
balance plus all receipts.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dblock._core.options import quoted
from dblock._runtime.error_mapping import translated
from dblock.errors import DblockError, Unavailable

if TYPE_CHECKING:
    import psycopg

    from dblock._runtime.target import Target
    from dblock.lease import Lease

log = logging.getLogger(__name__)

OPENING = 100
PATIENCE = 5.0
"""Seconds that the removal of the ledger may take."""

TABLES = """
    CREATE TABLE accounts (account text PRIMARY KEY, opening bigint NOT NULL, balance bigint NOT NULL);
    CREATE TABLE receipts (account text NOT NULL, worker text NOT NULL, amount bigint NOT NULL);
"""


@dataclass(frozen=True)
class Books:
    """One account: its opening balance, deposits and balance."""

    opening: int
    deposits: list[int]
    balance: int

    @property
    def due(self) -> int:
        """The balance that the account should have."""
        return self.opening + sum(self.deposits)

    @property
    def sum(self) -> str:
        """The sum that gives the due balance, as text."""
        return f"{' + '.join(map(str, [self.opening, *self.deposits]))} = {self.due}"


class Ledger:
    """The ledger, over one connection."""

    def __init__(self, connection: psycopg.Connection[Any], schema: str) -> None:
        self._connection = connection
        self._schema = schema
        with translated(schema):
            connection.execute(f"SET search_path TO {quoted(schema)}".encode())

    def open(self, account: str) -> None:
        """Open an account."""
        self._run("INSERT INTO accounts VALUES (%s, %s, %s)", [account, OPENING, OPENING])

    def balance(self, account: str) -> int:
        """Read the balance."""
        with translated(self._schema):
            row = self._connection.execute("SELECT balance FROM accounts WHERE account = %s", [account]).fetchone()
        return int(row[0]) if row else 0

    def write(self, account: str, worker: str, amount: int, balance: int, fence: Lease | None) -> None:
        """Write the new balance and the receipt of a deposit, behind the account's fence if a lease is given."""
        from fenced_store import fence as fenced

        with translated(self._schema), self._connection.transaction(), contextlib.ExitStack() as behind:
            if fence is not None:
                behind.enter_context(fenced(self._connection, account, fence, schema=self._schema))
            self._run("UPDATE accounts SET balance = %s WHERE account = %s", [balance, account])
            self._run("INSERT INTO receipts VALUES (%s, %s, %s)", [account, worker, amount])

    def books(self, account: str) -> Books:
        """Return the account as the ledger has it now."""
        with translated(self._schema):
            row = self._connection.execute(
                "SELECT opening, ARRAY(SELECT amount FROM receipts AS r WHERE r.account = a.account), balance"
                " FROM accounts AS a WHERE account = %s",
                [account],
            ).fetchone()
        assert row is not None, "accounts are never removed"
        return Books(*row)

    def _run(self, statement: str, values: list[Any]) -> None:
        with translated(self._schema):
            self._connection.execute(statement.encode(), values)


@contextmanager
def temporary_ledger(target: Target, schema: str) -> Iterator[Ledger]:
    """Create the ledger's schema with its fences; remove it afterwards, whatever happens."""
    import fenced_store

    left = f"Schema {schema!r} may be left behind; you can drop it."
    try:
        try:
            with translated(schema):
                fenced_store.install(target.conninfo(), schema)
                connection = target.connect()
        except fenced_store.FencedStoreError as error:
            raise DblockError(str(error)) from error
        with connection:
            with translated(schema):
                connection.execute(f"SET search_path TO {quoted(schema)};{TABLES}".encode())
            yield Ledger(connection, schema)
    except Unavailable as error:
        if _remove_schema(target, schema):
            raise
        raise Unavailable(f"{error} {left}") from error
    except BaseException:
        if not _remove_schema(target, schema):
            log.warning("%s", left)
        raise
    if not _remove_schema(target, schema):
        raise Unavailable(f"The database stopped replying at the end of the story. {left}")


def _remove_schema(target: Target, schema: str) -> bool:
    """Remove the schema, and return whether it is gone; the database may be gone or not reply."""
    gone = threading.Event()

    def remove() -> None:
        with contextlib.suppress(Exception), target.connect() as connection:
            connection.execute(f"DROP SCHEMA IF EXISTS {quoted(schema)} CASCADE".encode())
            gone.set()

    # In a thread, so that a database that stops replying does not block the command.
    remover = threading.Thread(target=remove, daemon=True)
    remover.start()
    remover.join(PATIENCE)
    return gone.is_set()
