"""Parts of a pair, each as a peer, so that the parts can be measured beside the whole."""

from __future__ import annotations

import uuid
from typing import Any

import psycopg

from bench.harness.contender import Release

COMMIT = "SELECT pg_logical_emit_message(true, 'bench', '')"
"""Writes a few bytes to the WAL and nothing to any table, so that there is something to commit."""

ACQUIRE = "SELECT token FROM dblock.try_acquire(%s, '30 s', 'bench', NULL, %s, %s)"
RELEASE = "SELECT dblock.release(%s, %s, durable => false)"


class _OnConnection:
    def __init__(self, where: str) -> None:
        self.connection: psycopg.Connection[Any] = psycopg.connect(where, autocommit=True, prepare_threshold=0)

    def close(self) -> None:
        self.connection.close()


class RoundTrip(_OnConnection):
    """SELECT 1: the least that any call of the database takes."""

    def acquire(self, name: str) -> Release:
        self.connection.execute("SELECT 1")
        return lambda: None


class TwoRoundTrips(_OnConnection):
    """SELECT 1, twice."""

    def acquire(self, name: str) -> Release:
        self.connection.execute("SELECT 1")
        return lambda: self.connection.execute("SELECT 1")


class DurableCommit(_OnConnection):
    """A commit that waits for the disk, and a second round trip."""

    def acquire(self, name: str) -> Release:
        self.connection.execute(COMMIT)
        return lambda: self.connection.execute("SELECT 1")


class TwoCalls(_OnConnection):
    """dblock's two functions, called by psycopg without dblock's client."""

    def __init__(self, where: str, *, durable: bool = True) -> None:
        super().__init__(where)
        self._durable = durable

    def acquire(self, name: str) -> Release:
        row = self.connection.execute(ACQUIRE, [name, uuid.uuid4(), self._durable]).fetchone()
        assert row is not None
        return lambda: self.connection.execute(RELEASE, [name, row[0]])
