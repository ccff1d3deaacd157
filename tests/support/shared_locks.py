"""Statements and steps that the tests of shared locks in SQL have in common: a read-write lock `a`, a semaphore `s`."""

from __future__ import annotations

import uuid
from typing import Any

import psycopg

from tests.support.sessions import Session

HERE, THERE = uuid.UUID(int=0xC1), uuid.UUID(int=0xC2)
"""Two clients that wait."""

ASK = "SELECT granted FROM acquire_shared('a', 'read-write', %s, attempt => %s, client => %s)"
AGAIN = "SELECT granted FROM acquire_shared('a', 'read-write', %s, attempt => %s, client => %s, had_ticket => true)"
TRY = "SELECT granted FROM acquire_shared('a', 'read-write', %s)"
TAKE = "SELECT token, share FROM acquire_shared('a', 'read-write', %s, NULL, %s, presence => %s, attempt => %s)"
PERMIT = "SELECT granted FROM acquire_shared('s', 'semaphore', permits => %s, attempt => %s)"
EXPIRE = "UPDATE distributed_locks SET expires_at = clock_timestamp() WHERE name = %s"
FREE = "SELECT release(%s, (SELECT token FROM distributed_locks WHERE name = %s), durable => false)"


def attempt(number: int) -> uuid.UUID:
    return uuid.UUID(int=0xA0 + number)


def keep_clients_alive(owner: psycopg.Connection) -> None:
    """Keep the clients alive without heartbeats, however slow this machine is."""
    owner.execute("INSERT INTO lock_clients VALUES (%s, 'infinity'), (%s, 'infinity')", [HERE, THERE])


def listen(session: Session, *clients: uuid.UUID) -> None:
    for client in clients:
        session.do(f"LISTEN dblock_{client.hex}")


def notified(session: Session) -> list[int]:
    """Return the numbers of the attempts that were notified so far."""
    session.do("SELECT 1")
    return [uuid.UUID(one.payload).int - 0xA0 for one in session.connection.notifies(timeout=0.1)]


def take(session: Session, mode: str, number: int = 1, ttl: str = "30 s", presence: Any = None) -> tuple[int, str]:
    """Acquire a share of the read-write lock, and return its token and its name."""
    token, share = session.do(TAKE, mode, ttl, presence, attempt(number))
    assert token is not None
    return token, share


def free(session: Session, share: str) -> None:
    """Release a share, whichever grant holds it."""
    assert session.do(FREE, share, share) == (True,), share
