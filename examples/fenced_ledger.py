"""Change your own tables under a lock, in a transaction that a stale holder cannot commit.

Four threads book deposits into one ledger. Each reads the balance, adds to it and writes it back, which is only correct
if one thread at a time does it. The lock sees to that, and the fence refuses a holder whose lease has passed on.

    python examples/fenced_ledger.py
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import psycopg

import dblock
import fenced_store
from dblock import embedded
from dblock.admin import schema

LOCK = "example:ledger"


def deposit(client: dblock.Client, dsn: str, amount: int) -> None:
    with (
        client.lock(LOCK, timeout=30) as lease,
        psycopg.connect(dsn) as connection,
        # From here to the commit, the transaction belongs to the newest holder that the fence has seen.
        fenced_store.fence(connection, LOCK, lease),
    ):
        row = connection.execute("SELECT balance FROM example_ledger").fetchone()
        assert row is not None
        connection.execute("UPDATE example_ledger SET balance = %s", [row[0] + amount])
    # In this order: the fence is checked, the transaction commits, the lock is released.


def main() -> None:
    dsn = os.environ.get("DBLOCK_DSN") or embedded.start().url
    schema.install(dsn)
    fenced_store.install(dsn)
    with psycopg.connect(dsn) as connection:
        connection.execute("DROP TABLE IF EXISTS example_ledger")
        connection.execute("CREATE TABLE example_ledger (balance bigint NOT NULL)")
        connection.execute("INSERT INTO example_ledger VALUES (100)")

    with dblock.Client(dsn) as client, ThreadPoolExecutor(4) as threads:
        for booked in [threads.submit(deposit, client, dsn, amount) for amount in (10, 20, 30, 40)]:
            booked.result()

    with psycopg.connect(dsn) as connection:
        print("balance:", *connection.execute("SELECT balance FROM example_ledger").fetchone() or ())
        connection.execute("DROP TABLE example_ledger")


if __name__ == "__main__":
    main()
