"""A worker of the story: a program that keeps a ledger under a lock, one cue at a time.

It does what careful programs do: holds the lock, renews it, reads, adds, writes. What it does not do is to look at
its lease between the reading and the writing; and it would not help, for it can be frozen after that look as well.
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
    """Tell the conductor what has happened, and when: just now, unless given."""
    sys.stdout.write(json.dumps({"at": time.monotonic() if at is None else at, **what}) + "\n")
    sys.stdout.flush()


class Work:
    """What a worker can be told to do; each word reports what came of it."""

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
            raise DblockError("the lock was granted to two at once. This is a bug; please report it.")
        holder = self._lock.holder()
        report(holder=holder.holder if holder else "nobody")

    def renew(self) -> None:
        self._held.renew()
        report()

    def release(self) -> None:
        # The next may have it before we have the answer.
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
        assert self._lease is not None, "it is told to acquire first"
        return self._lease


def work(name: str, schema: str, fences: str, lock: str, ttl: str) -> None:
    """Do as told until nobody tells any more."""
    from fenced_store import FencedStoreError

    try:
        with translated(fences):
            connection = resolve(os.environ["DBLOCK_DSN"]).connect()
        with connection, Client(holder=name, schema=schema) as client:
            doing = Work(name, client, Ledger(connection, fences), lock, float(ttl))
            client.lock(lock).holder()  # a first call, so that no later one has to open anything
            report()
            for line in sys.stdin:
                word, *arguments = json.loads(line)
                getattr(doing, word)(*arguments)
    except (DblockError, FencedStoreError) as error:
        report(error=str(error), unavailable=isinstance(error, Unavailable))


if __name__ == "__main__":
    work(*sys.argv[1:])
