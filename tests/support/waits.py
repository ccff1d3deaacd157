"""Wait in the database without a client: in a queue, and in wait-for graphs with their deadlocks.

A participant of a graph stands for a thread or a task: it holds locks, and waits for at most one.
"""

from __future__ import annotations

import itertools
import uuid
from typing import Any

import psycopg

from tests.support.eventually import eventually


def join_queue(
    connection: psycopg.Connection[Any], name: str, holder: str = "waiter", client: uuid.UUID | None = None
) -> None:
    """Take a ticket for a lock. A renewal by the client that holds it may have locked the row for a moment."""
    asked = "SELECT ticket FROM acquire(%s, attempt => gen_random_uuid(), client => %s, holder => %s)"
    client = client or uuid.uuid4()
    eventually(lambda: connection.execute(asked, [name, client, holder]).fetchone() != (None,), "a ticket")


class Participant:
    """A thread or task of a client of its own."""

    def __init__(self, graph: WaitGraph, name: str) -> None:
        self._graph = graph
        self.name = name
        self.client = uuid.uuid4()
        self.attempt: uuid.UUID | None = None
        self.lock: str | None = None
        self.tokens: list[int] = []

    def hold(self, *locks: str, ttl: str = "60 s", presence: uuid.UUID | None = None) -> Participant:
        """Hold these locks."""
        for lock in locks:
            granted, token = self._graph.one(
                "SELECT granted, token FROM try_acquire(%s, %s, %s, presence => %s)", lock, ttl, self.name, presence
            )
            assert granted
            self.tokens.append(token)
        return self

    def wait(self, lock: str, presence: uuid.UUID | None = None) -> Participant:
        """Wait for this lock. Participants that wait later are younger."""
        self.lock = lock
        self.attempt = uuid.UUID(int=0xA000 + next(self._graph.numbers))
        granted, ticket = self._graph.one(
            "SELECT granted, ticket FROM acquire(%s, '60 s', %s, NULL, %s, %s, presence => %s)",
            lock, self.name, self.attempt, self.client, presence,
        )  # fmt: skip
        assert not granted
        assert ticket is not None
        self._stay_alive()
        return self

    def hold_share(self, lock: str, mode: str | None, permits: int | None = None) -> Participant:
        """Hold a share of a read-write lock (mode read or write), or a permit of a semaphore (no mode)."""
        granted, token = self._graph.one(
            "SELECT granted, token FROM acquire_shared(%s, %s, %s, %s, '60 s', %s)",
            lock, _kind(mode), mode, permits, self.name,
        )  # fmt: skip
        assert granted
        self.tokens.append(token)
        return self

    def wait_for_share(self, lock: str, mode: str | None) -> Participant:
        """Wait for a share."""
        self.lock = lock
        self.attempt = uuid.UUID(int=0xA000 + next(self._graph.numbers))
        granted, ticket = self._graph.one(
            "SELECT granted, ticket FROM acquire_shared(%s, %s, %s, NULL, '60 s', %s, NULL, %s, %s)",
            lock, _kind(mode), mode, self.name, self.attempt, self.client,
        )  # fmt: skip
        assert not granted
        assert ticket is not None
        self._stay_alive()
        return self

    def _stay_alive(self) -> None:
        """Count as alive without heartbeats, for longer than a slow machine needs to build a large graph."""
        self._graph.one(
            "UPDATE lock_clients SET seen_until = clock_timestamp() + interval '1 minute' WHERE client = %s"
            " RETURNING 1",
            self.client,
        )

    @property
    def request(self) -> tuple[str, list[Any]]:
        """The statement that looks for a deadlock, and its arguments."""
        return "SELECT victim, cycle FROM look_for_deadlock(%s, %s, %s)", [self.lock, self.attempt, self.tokens]

    def look(self) -> tuple[bool, list[dict[str, Any]] | None]:
        """Look for a deadlock, as this participant's client does."""
        statement, args = self.request
        victim, cycle = self._graph.one(statement, *args)
        return victim, cycle

    def note(self) -> None:
        """Note what it holds, as a look does, without looking."""
        for token in self.tokens:
            self._graph.one("INSERT INTO waiting_holds VALUES (%s, %s, %s) RETURNING 1", self.attempt, token, self.lock)

    @property
    def waits(self) -> bool:
        """Whether it still has its ticket."""
        (count,) = self._graph.one("SELECT count(*) FROM lock_tickets WHERE attempt = %s", self.attempt)
        return bool(count)


class WaitGraph:
    """The participants of one database."""

    def __init__(self, owner: psycopg.Connection) -> None:
        self._owner = owner
        self.numbers = itertools.count()

    def one(self, statement: str, *args: Any) -> Any:
        """Return the first row of a statement."""
        return self._owner.execute(statement.encode(), args).fetchone()

    def add(self, name: str) -> Participant:
        """Return a new participant."""
        return Participant(self, name)

    def ring(self, size: int, prefix: str = "") -> list[Participant]:
        """Return participants of which each waits for a lock of the next one; the last one closes the cycle."""
        made = [self.add(f"{prefix}p{number}").hold(f"{prefix}l{number}") for number in range(size)]
        for number, participant in enumerate(made):
            participant.wait(f"{prefix}l{(number + 1) % size}")
        return made


def _kind(mode: str | None) -> str:
    return "semaphore" if mode is None else "read-write"
