"""The database in memory: the meaning of the SQL functions for several locks.

Written after dblock/sql/several, function by function and under the same names. What the functions check of their
arguments is left out.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dblock.testing.database.shared_locks.store import SharedStore
from dblock.testing.database.store import Asked, Tried
from dblock.testing.database.tables import Ticket


class _NotGranted(Exception):
    """One of several locks cannot be granted, so none is."""


@dataclass
class AllReply:
    """The reply of acquire_all."""

    granted: list[Tried | Asked] = field(default_factory=list)
    refused: int | None = None
    remaining: float | None = None
    queued: Asked | None = None
    ticket: int | None = None
    cycle: int | None = None
    waiter: str | None = None
    wanted: int | None = None


@dataclass
class AnyReply:
    """The reply of acquire_any."""

    name: str | None = None
    granted: Tried | Asked | None = None
    remaining: float | None = None
    left_queues: int = 0
    queued: list[Asked] = field(default_factory=list)


class SeveralStore(SharedStore):
    """One database in which clients also ask for several locks at once."""

    def acquire_all(
        self,
        names: Sequence[str],
        ttl: float,
        attempt: str,
        client: str | None = None,
        presence: str | None = None,
        redeem: int | None = None,
        held: Sequence[str] = (),
        ordered: bool = False,
        places: Sequence[int | None] = (),
    ) -> AllReply:
        reply = AllReply()
        if client is None:
            with contextlib.suppress(_NotGranted), self.all_or_nothing(names):
                self.try_all(reply, names, ttl, attempt, presence)
            return reply
        with self.all_or_nothing(names):
            return self.take_in_order(reply, names, ttl, attempt, client, presence, redeem, held, ordered, places)

    def take_in_order(
        self,
        reply: AllReply,
        names: Sequence[str],
        ttl: float,
        attempt: str,
        client: str,
        presence: str | None,
        redeem: int | None,
        held: Sequence[str],
        ordered: bool,
        places: Sequence[int | None],
    ) -> AllReply:
        """Grant the first of these locks for as long as possible, and join the queue of the next one."""
        for one in names:
            tried = self.try_acquire(one, ttl, attempt, True, presence, ticket=redeem)
            if not tried.granted:
                queued = self.acquire(one, ttl, attempt, client, True, True, presence, redeem is not None)
                if not queued.granted:
                    return self.refuse(
                        reply, one, queued, attempt, [*held, *names[: len(reply.granted)]], ordered, places
                    )
                reply.granted.append(queued)
            else:
                reply.granted.append(tried)
            redeem = None
        return reply

    def try_all(self, reply: AllReply, names: Sequence[str], ttl: float, attempt: str, presence: str | None) -> None:
        """Grant all of these locks, or raise."""
        for one in names:
            tried = self.try_acquire(one, ttl, attempt, True, presence)
            if not tried.granted:
                # The grants before are undone. Their tokens were seen by no caller.
                reply.refused = len(reply.granted) + 1
                reply.granted = []
                reply.remaining = max(tried.remaining, 0.001) if tried.waiting else tried.remaining
                raise _NotGranted
            reply.granted.append(tried)

    @contextlib.contextmanager
    def all_or_nothing(self, names: Sequence[str]) -> Iterator[None]:
        """Undo what the body did to these locks and their queues if it raises, as a transaction does."""
        tables = self.tables
        before = {one: (copy.copy(tables.rows.get(one)), list(tables.tickets.get(one, ()))) for one in names}
        history, gone = dict(tables.history), [(mark, mark.gone_since) for mark in self.marks.values()]
        try:
            yield
        except BaseException:
            for name, (row, line) in before.items():
                if row is None:
                    tables.rows.pop(name, None)
                else:
                    tables.rows[name] = row
                if name in tables.tickets:
                    tables.tickets[name] = line
            tables.history = history
            for mark, since in gone:
                mark.gone_since = since
            raise

    def refuse(
        self,
        reply: AllReply,
        one: str,
        queued: Asked,
        attempt: str,
        held: Sequence[str],
        ordered: bool,
        places: Sequence[int | None],
    ) -> AllReply:
        """Complete the reply for the first lock that was not granted, in whose queue the attempt has a ticket."""
        reply.refused = len(reply.granted) + 1
        reply.queued, reply.remaining, reply.ticket = queued, queued.remaining, queued.ticket
        if queued.fresh:
            (ticket,) = self.tickets_of(one, attempt)
            place = places[reply.refused - 1] if reply.refused <= len(places) else None
            taken = {other.number for other in self.tables.tickets[one]}
            if place is not None and 0 < place < ticket.number and place not in taken:
                ticket.number = place
                self.tables.tickets[one].sort(key=lambda other: other.number)
            ticket.ordered = ordered
            reply.ticket = ticket.number
        if held:
            reply.wanted = self.first_wanted(held, attempt)
            lock, reply.waiter = self.lock_in_cycle(one, attempt)
            reply.cycle = held.index(lock) + 1 if lock in held else None
        return reply

    def lives(self, ticket: Ticket) -> bool:
        """Return whether the client of a ticket has sent a heartbeat lately."""
        return self.tables.clients.get(ticket.client, float("-inf")) > self.now()

    def holding_attempt(self, name: str) -> str | None:
        """Return the attempt that holds a lock."""
        row = self.tables.rows.get(name)
        return row.attempt if row is not None and row.expires_at > self.now() else None

    def lock_in_cycle(self, name: str, attempt: str) -> tuple[str | None, str | None]:
        """Return the lock that an attempt should give up, and the attempt that waits for it."""
        at, passed, waiter = name, set[str](), None
        while True:
            other = self.holding_attempt(at)
            if other is None or at in passed:
                return None, None
            if same_owner(other, attempt):
                return (at, waiter) if passed else (None, None)
            found = self.wait_of(other)
            if found is None:
                return None, None
            waiter = found.attempt
            passed.add(at)
            at = found.name

    def wait_of(self, held_by: str) -> Ticket | None:
        """Return the only ticket of the thread or task of a holder."""
        found = [
            ticket
            for line in self.tables.tickets.values()
            for ticket in line
            if same_owner(ticket.attempt, held_by) and self.lives(ticket)
        ]
        return found[0] if len(found) == 1 else None

    def first_wanted(self, names: Sequence[str], attempt: str) -> int | None:
        """Return the position of the first lock for which another attempt waits that may hold other locks."""
        for position, name in enumerate(names, 1):
            line = self.tables.tickets.get(name, ())
            if any(one.attempt != attempt and not one.ordered and self.lives(one) for one in line):
                return position
        return None

    def acquire_any(
        self,
        names: Sequence[str],
        ttl: float,
        attempt: str,
        client: str | None = None,
        presence: str | None = None,
        had_tickets: bool = False,
    ) -> AnyReply:
        with self.all_or_nothing(names):
            return self.take_one(AnyReply(), names, ttl, attempt, client, presence, had_tickets)

    def take_one(
        self,
        reply: AnyReply,
        names: Sequence[str],
        ttl: float,
        attempt: str,
        client: str | None,
        presence: str | None,
        had_tickets: bool,
    ) -> AnyReply:
        """Grant the first of these locks that is free, or join all their queues."""
        for one in sorted(names):
            self.lock_or_create_queue(one)
        own = next((one for one in names if self.holding_attempt(one) == attempt), None)
        for one in names if own is None else [own]:
            if had_tickets and own is None:
                continue
            tried = self.try_acquire(one, ttl, attempt, True, presence)
            if tried.granted:
                return self.granted_any(reply, names, one, tried, attempt)
            left = max(tried.remaining, 0.001) if tried.waiting else tried.remaining
            reply.remaining = left if reply.remaining is None else min(left, reply.remaining)
        if client is not None:
            for one in names:
                asked = self.acquire(one, ttl, attempt, client, True, True, presence, had_tickets)
                if asked.granted:
                    return self.granted_any(reply, names, one, asked, attempt)
                reply.queued.append(asked)
        return reply

    def granted_any(
        self, reply: AnyReply, names: Sequence[str], one: str, granted: Tried | Asked, attempt: str
    ) -> AnyReply:
        """Complete the reply for the lock that was granted, and leave the queues of the others."""
        reply.name, reply.granted, reply.remaining = one, granted, granted.remaining
        for name in names:
            for ticket in self.tickets_of(name, attempt):
                self.remove(ticket, "left")
                reply.left_queues += 1
        return reply

    def abandon_all(self, names: Sequence[str], attempt: str, only_tickets: bool = False) -> int:
        gave_back = 0
        for one in sorted(set(names)):
            if self.abandon(one, attempt, only_tickets):
                gave_back += 1
            elif only_tickets:
                self.wake_if_free(one)
        return gave_back

    def give_way(
        self,
        names: Sequence[str],
        attempt: str,
        waiter: str,
        client: str,
        presence: str | None = None,
        ordered: bool = False,
    ) -> int | None:
        at = names[0]
        others = self.tickets_of(at, waiter)
        if self.holding_attempt(at) != attempt or not others:
            self.abandon_all(names, attempt)
            return None
        row, line = self.tables.rows[at], self.tables.tickets[at]
        self.lock_or_create_queue(at)
        self.free(row, "gave way", attempt)
        self.queues[at] += 1
        if not self.tickets_of(at, attempt):
            line.append(Ticket(at, self.queues[at], attempt, client, presence, self.now(), ordered=ordered))
        self.touch_client(client)
        numbers, turn = [ticket.number for ticket in line], others[0].number

        def rank(ticket: Ticket) -> tuple[int, int]:
            if ticket.attempt in (waiter, attempt):
                return (2 if ticket.attempt == waiter else 3), ticket.number
            return (5 if ticket.number > turn else 4 if ticket.ordered else 1), ticket.number

        line.sort(key=rank)
        for number, ticket in zip(numbers, line, strict=True):
            ticket.number = number
        (own,) = self.tickets_of(at, attempt)
        self.wake_if_free(at)
        self.abandon_all(names[1:], attempt)
        return own.number

    def wake_set(self, name: str) -> bool:
        """Wake a caller of acquire_all that is in the way of a waiter for this lock."""
        at, passed = name, set[str]()
        while (other := self.holding_attempt(at)) is not None and at not in passed:
            found = self.wait_of(other)
            if found is None:
                break
            if found.attempt == other:
                self.notify(found.client, found.attempt)
                return True
            passed.add(at)
            at = found.name
        return False


def same_owner(one: str, other: str) -> bool:
    """Return whether two attempts are of one thread or task."""
    return one[:16] == other[:16]
