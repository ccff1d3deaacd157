"""The sketch: the bare protocol of a row, a queue, reserve and claim, and NOTIFY, as the floor for dblock.

It grants durably with a token in grant order, serves first come first served, and wakes exactly one waiter. It has
nothing else: no presence and no heartbeat, so a waiter that dies blocks its queue; no expiry, so a holder that dies
keeps its lock; no check of arguments, retries, recovery or durability settings of the caller.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psycopg

from bench.harness.contender import Release

ACQUIRE = b"SELECT token, ticket FROM sketch.acquire(%s, %s)"
CLAIM = b"SELECT sketch.claim(%s, %s)"
RELEASE = b"SELECT sketch.release(%s, %s)"


def install(where: str) -> None:
    """Create the tables and the functions of the sketch."""
    with psycopg.connect(where, autocommit=True) as owner:
        owner.execute(Path(__file__).with_name("sketch.sql").read_bytes())


class Sketch:
    """A client of the sketch: one connection for each thread, over which it calls and is woken."""

    def __init__(self, where: str) -> None:
        self._where, self._own = where, threading.local()

    def acquire(self, name: str) -> Release:
        connection: psycopg.Connection[Any] | None = getattr(self._own, "connection", None)
        if connection is None:
            connection = self._own.connection = psycopg.connect(self._where, autocommit=True, prepare_threshold=0)
            self._own.channel = f"sketch_{connection.info.backend_pid}"
            connection.execute(f"LISTEN {self._own.channel}".encode())
        row = connection.execute(ACQUIRE, [name, self._own.channel]).fetchone()
        assert row is not None
        token, ticket = row
        if token is None:
            for note in connection.notifies():
                if note.payload == str(ticket):
                    break
            claimed = connection.execute(CLAIM, [name, ticket]).fetchone()
            assert claimed is not None
            (token,) = claimed
        return lambda: connection.execute(RELEASE, [name, token])

    def close(self) -> None:
        self._own = threading.local()
