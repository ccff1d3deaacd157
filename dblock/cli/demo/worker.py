"""A worker of the story: a program that keeps a ledger under a lock, one command at a time.

It does what a careful program does: it holds the lock, renews it, reads, adds and writes. It does not check its lease
between the read and the write. That would not help, because the process can be frozen after the check as well.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from dblock._runtime.error_mapping import translated
from dblock._runtime.target import resolve
from dblock.cli.demo.ledger import Ledger
from dblock.client import Client
from dblock.errors import DblockError, Unavailable
from dblock.lease import Lease


def report(at: float | None = None, **what: Any) -> None:
    """Report a result to the conductor, with its time: now, unless given."""
    sys.stdout.write(json.dumps({"at": time.monotonic() if at is None else at, **what}) + "\n")
    sys.stdout.flush()


class Commands:
    """The commands of a worker. Each command reports its result."""

    def __init__(self, name: str, client: Client, ledger: Ledger, lock: str, ttl: float) -> None:
        self._name = name
        self._ledger = ledger
        self._lock = client.lock(lock, ttl=ttl)
        self._lease: Lease | None = None
        self._seen = 0

    def acquire(self) -> None:
        self._lease = self._lock.acquire()
        report(token=self._lease.token)

    def try_once(self) -> None:
        if self._lock.try_acquire() is not None:
            raise DblockError("The lock was granted to two holders at once. This is a bug; please report it.")
        holder = self._lock.holder()
        report(holder=holder.holder if holder else "no worker")

    def renew(self) -> None:
        self._held.renew()
        report()

    def release(self) -> None:
        # The next holder may have the lock before we have the reply.
        began = time.monotonic()
        released = self._held.release()
        report(began, released=released, answered=time.monotonic())

    def read(self, account: str) -> None:
        self._seen = self._ledger.balance(account)
        report(amount=self._seen)

    def write(self, account: str, amount: str, how: str) -> None:
        from fenced_store import StaleTokenError

        balance = self._seen + int(amount)
        try:
            fence = self._held if how == "fenced" else None
            self._ledger.write(account, self._name, int(amount), balance, fence)
            report(amount=balance, refused_for=None)
        except StaleTokenError as error:
            report(amount=balance, refused_for=error.stored)

    @property
    def _held(self) -> Lease:
        assert self._lease is not None, "the first command is acquire"
        return self._lease


def serve(name: str, schema: str, fences: str, lock: str, ttl: str) -> None:
    """Execute commands from standard input until it is closed."""
    from fenced_store import FencedStoreError

    try:
        with translated(fences):
            connection = resolve(os.environ["DBLOCK_DSN"]).connect()
        with connection, Client(holder=name, schema=schema) as client:
            commands = Commands(name, client, Ledger(connection, fences), lock, float(ttl))
            client.lock(lock).holder()  # the first call opens the connections that later ones use
            report()
            for line in sys.stdin:
                word, *arguments = json.loads(line)
                getattr(commands, word)(*arguments)
    except (DblockError, FencedStoreError) as error:
        report(error=str(error), unavailable=isinstance(error, Unavailable))


if __name__ == "__main__":
    serve(*sys.argv[1:])
