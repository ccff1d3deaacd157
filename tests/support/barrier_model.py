"""Make calls for one barrier or one latch, and compare every reply with a plain model of it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import psycopg
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tests.support.state_machines import Machine, picked, picks


@dataclass(eq=False)
class Party:
    """An attempt to pass a barrier or a latch, with a client of its own."""

    attempt: uuid.UUID = field(default_factory=uuid.uuid4)
    client: uuid.UUID = field(default_factory=uuid.uuid4)


class _Machine(Machine):
    def __init__(self, connection: psycopg.Connection) -> None:
        super().__init__()
        self._connection = connection
        connection.execute("DELETE FROM lock_clients")
        for name in ("delete_barrier('b')", "delete_latch('l')"):
            self.do(f"SELECT {name}")

    def do(self, statement: str, *args: Any) -> Any:
        return self._connection.execute(statement.encode(), args).fetchone()

    def waiters(self) -> int:
        (count,) = self.do("SELECT count(*) FROM barrier_waiters WHERE NOT over")
        return int(count)

    def keep_alive(self, party: Party) -> None:
        """Do what a heartbeat each second does, for longer than a test takes."""
        later = "UPDATE lock_clients SET seen_until = seen_until + interval '1 hour' WHERE client = %s"
        self._connection.execute(later, [party.client])


class Barrier:
    """What a barrier should do: the parties that wait, in order, and the numbers of those that have tripped."""

    def __init__(self, parties: int) -> None:
        self.parties = parties
        self.waiting: list[Party] = []
        self.numbers: dict[Party, int] = {}
        self.dead: set[Party] = set()
        self.generation = 0

    def arrive(self, party: Party) -> int | None:
        self.dead.discard(party)
        if party not in self.numbers and party not in self.waiting:
            self.waiting.append(party)
        # A dead party is not found before as many wait as the barrier has parties.
        if len(self.waiting) >= self.parties:
            self.waiting = [one for one in self.waiting if one not in self.dead]
        if len(self.waiting) >= self.parties:
            self.numbers.update((one, number) for number, one in enumerate(self.waiting))
            self.waiting = []
            self.generation += 1
        return self.numbers.get(party)

    def leave(self, party: Party) -> int | None:
        if party in self.waiting:
            self.waiting.remove(party)
        return self.numbers.get(party)


class BarrierMachine(_Machine):
    @initialize(parties=st.integers(1, 4))
    def start(self, parties: int) -> None:
        self.model = Barrier(parties)
        self.known = [Party(), Party(), Party()]

    def compare(self) -> None:
        assert self.waiters() == len(self.model.waiting)
        row = self.do("SELECT generation FROM list_barriers('b')")
        assert (row[0] if row else 0) == self.model.generation

    def _arrive(self, party: Party) -> None:
        fresh = party not in self.model.numbers and party not in self.model.waiting
        before = self.model.generation
        number = self.model.arrive(party)
        wakes = self.model.generation > before and self.model.parties > 1
        reply = self.do(
            "SELECT tripped, number, wake, fresh FROM arrive_barrier('b', %s, %s, %s, 'me')",
            *(self.model.parties, party.attempt, party.client),
        )
        assert reply == (number is not None, number, wakes, fresh)
        self.keep_alive(party)

    @rule()
    def arrive(self) -> None:
        # Older parties are not chosen again.
        self.known = [*self.known[-5:], Party()]
        self._arrive(self.known[-1])

    @rule(pick=picks)
    def arrive_again(self, pick: int) -> None:
        self._arrive(picked(self.known, pick))

    @rule(pick=picks)
    def leave(self, pick: int) -> None:
        party = picked(self.known, pick)
        assert self.do("SELECT leave_barrier('b', %s)", party.attempt) == (self.model.leave(party),)

    @precondition(lambda self: self.model.waiting)
    @rule(pick=picks)
    def die(self, pick: int) -> None:
        """Let a party that waits send no heartbeat any more."""
        party = picked(self.model.waiting, pick)
        self._connection.execute(
            "UPDATE lock_clients SET seen_until = clock_timestamp() WHERE client = %s", [party.client]
        )
        self.model.dead.add(party)

    @rule()
    def crash(self) -> None:
        """Leave what a crash or a failover leaves of an unlogged table."""
        self._connection.execute("DELETE FROM barrier_waiters")
        self.model.waiting = []


class LatchMachine(_Machine):
    """The model: what remains, who has counted, and who waits."""

    @initialize(count=st.integers(1, 6))
    def start(self, count: int) -> None:
        self.count = self.remaining = count
        self.counted: list[uuid.UUID] = []
        self.known = [Party(), Party(), Party()]
        self.waiting: set[Party] = set()

    def compare(self) -> None:
        assert self.do("SELECT latch_remaining('l', %s)", self.count) == (self.remaining,)
        assert self.waiters() == len(self.waiting)

    def _expect_count(self, by: int, attempt: uuid.UUID | None, counts: bool) -> None:
        before = self.remaining
        if counts:
            self.remaining = max(before - by, 0)
        reply = self.do("SELECT remaining, opened FROM count_down('l', %s, %s, %s)", self.count, by, attempt)
        assert reply == (self.remaining, before > 0 and self.remaining == 0)
        if reply[1]:
            assert self.do("SELECT wake_waiters('latch', 'l')") == (len(self.waiting),)

    @rule(by=st.integers(1, 3))
    def count_down(self, by: int) -> None:
        self.counted.append(uuid.uuid4())
        self._expect_count(by, self.counted[-1], True)

    @rule()
    def count_without_an_attempt(self) -> None:
        self._expect_count(1, None, True)

    @precondition(lambda self: self.counted)
    @rule(by=st.integers(1, 3), pick=picks)
    def count_again(self, by: int, pick: int) -> None:
        """Repeat a count whose reply was lost."""
        self._expect_count(by, picked(self.counted, pick), False)

    def _wait(self, party: Party) -> None:
        fresh = self.remaining > 0 and party not in self.waiting
        reply = self.do(
            "SELECT remaining, fresh FROM await_latch('l', %s, %s, %s)", self.count, party.attempt, party.client
        )
        assert reply == (self.remaining, fresh)
        if self.remaining:
            self.waiting.add(party)
        else:
            self.waiting.discard(party)

    @rule()
    def wait(self) -> None:
        self.known = [*self.known[-5:], Party()]
        self._wait(self.known[-1])

    @rule(pick=picks)
    def wait_again(self, pick: int) -> None:
        self._wait(picked(self.known, pick))

    @rule(pick=picks)
    def abandon(self, pick: int) -> None:
        party = picked(self.known, pick)
        assert self.do("SELECT abandon('latch:l', %s)", party.attempt) == (party in self.waiting,)
        self.waiting.discard(party)

    @precondition(lambda self: self.remaining == 0)
    @rule()
    def delete(self) -> None:
        """Close an open latch: the next call creates it again."""
        assert self.do("SELECT delete_latch('l')") == (True,)
        self.remaining = self.count
        self.counted = []
        self.waiting = set()
