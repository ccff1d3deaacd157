"""Use the lock service from plain SQL, as you would from Go, Java or psql: no dblock client, only psycopg.

Shows how to wait in the queue: listen on your channel, call `acquire`, and call `acquire` again when you are notified,
or after a second. The repeated call is also the heartbeat that keeps your position.

    python examples/lock_from_sql.py
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any
from uuid import uuid4

import psycopg

from dblock import embedded
from dblock.admin import schema

NAME = "example:sql"


def connect(dsn: str) -> psycopg.Connection[Any]:
    # In autocommit each call is a transaction of its own, which is what the functions expect.
    return psycopg.connect(dsn, autocommit=True)


def try_acquire(connection: psycopg.Connection[Any], name: str) -> int | None:
    """Acquire the lock if it is free now; return its token."""
    row = connection.execute("SELECT granted, token FROM dblock.try_acquire(%s, ttl => '10 s')", [name]).fetchone()
    assert row is not None
    return int(row[1]) if row[0] else None


def acquire(connection: psycopg.Connection[Any], name: str, timeout: float) -> int | None:
    """Wait in the queue for the lock; return its token, or None after the timeout."""
    attempt, client = uuid4(), uuid4()  # one attempt for each acquisition, one client for each process
    connection.execute(f'LISTEN "dblock_{client.hex}"')
    give_up = time.monotonic() + timeout
    had_ticket = False
    while True:
        row = connection.execute(
            "SELECT granted, token, remaining, ticket FROM dblock.acquire("
            "%s, ttl => '10 s', attempt => %s, client => %s, had_ticket => %s)",
            [name, attempt, client, had_ticket],
        ).fetchone()
        assert row is not None
        granted, token, remaining, ticket = row
        if granted:
            return int(token)
        had_ticket = ticket is not None
        left = give_up - time.monotonic()
        if left <= 0:
            connection.execute("SELECT dblock.abandon(%s, %s)", [name, attempt])
            return None
        # Wait for the notification; at the latest, look again in a second, or when the holder's lease expires.
        for _ in connection.notifies(timeout=min(1.0, left, max(remaining, 0.05)), stop_after=1):
            pass


def hold_for_a_moment(dsn: str, acquired: threading.Event) -> None:
    with connect(dsn) as connection:
        token = try_acquire(connection, NAME)
        acquired.set()
        time.sleep(0.3)
        # Not durable, and in a transaction of its own: then the release wakes the first waiter.
        connection.execute("SELECT dblock.release(%s, %s, durable => false)", [NAME, token])


def main() -> None:
    dsn = os.environ.get("DBLOCK_DSN") or embedded.start().url
    schema.install(dsn)
    acquired = threading.Event()
    holder = threading.Thread(target=hold_for_a_moment, args=[dsn, acquired])
    holder.start()
    acquired.wait()
    with connect(dsn) as connection:
        print("try_acquire while the lock is held:", try_acquire(connection, NAME))
        token = acquire(connection, NAME, timeout=10)
        print("acquire waited and was granted:", token is not None)
        renewed = connection.execute("SELECT dblock.renew(%s, %s, '20 s')", [NAME, token]).fetchone()
        print("renewed:", renewed is not None)
        released = connection.execute("SELECT dblock.release(%s, %s)", [NAME, token]).fetchone()
        print("released:", released == (True,))
    holder.join()


if __name__ == "__main__":
    main()
