"""The part of the store that is about queues and presences.

Written after dblock/sql: 05_presence, 07_queue, 12_heartbeat, 13_leave_queue, 40_register_presence and
41_withdraw_presence.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Protocol

from dblock.testing.database.tables import Mark, Row, Tables, Ticket

HEARD_FOR, HEARD_AGAIN = 3.0, 2.0
"""Seconds for which a heartbeat keeps a client alive, and the rest below which the next heartbeat extends them."""

LEFT_AFTER = 3.0
"""Seconds after which a ticket that its client does not name cannot have been taken during the call."""


class Observer(Protocol):
    """Learns of every change of grants and tickets, at the moment of the change."""

    def granted(self, row: Row, ticket: int | None, fair: bool) -> None: ...

    def extended(self, row: Row, token: int, before: float) -> None: ...

    def freed(self, row: Row, why: str, by: int | str | None) -> None: ...

    def removed(self, ticket: Ticket, why: str) -> None: ...

    def heard(self, client: str) -> None: ...

    def reaped(self, row: Row) -> None: ...


class Queues:
    """The queues of all locks, and the presences of waiters and holders."""

    def __init__(
        self,
        now: Callable[[], float],
        chance: random.Random,
        observer: Observer,
        notify: Callable[[str, str], object] = lambda client, attempt: None,
    ) -> None:
        self.now = now
        self.chance = chance
        self.observer = observer
        self.notify = notify
        """Sends an attempt's name over the channel of a client."""
        self.tables = Tables()
        self.queues: dict[str, int] = {}
        """The number of the last ticket of each queue. Unlogged: a crash forgets them."""
        self.marks: dict[str, Mark] = {}
        self.sessions: set[int] = set()
        """Sessions that hold a presence and have not ended."""
        self.session: int | None = None
        """The session of the call under way, if it is one of them."""
        self.incarnation = 1
        self.durable = False
        """Whether the call under way waits for the disk before its reply."""

    def tickets_of(self, name: str, attempt: str) -> list[Ticket]:
        return [ticket for ticket in self.tables.tickets.get(name, ()) if ticket.attempt == attempt]

    def remove(self, ticket: Ticket, why: str) -> None:
        self.observer.removed(ticket, why)
        self.tables.tickets[ticket.name].remove(ticket)

    def first_in_queue(self, name: str, prune: bool) -> Ticket | None:
        """Return the first live ticket. With `prune`, remove the dead tickets before it."""
        dead: set[str] = set()
        away: set[str] = set()
        for ticket in list(self.tables.tickets.get(name, ())):
            if ticket.presence in away:
                continue
            if ticket.client not in dead and ticket.presence not in dead:
                if self.tables.clients.get(ticket.client, float("-inf")) <= self.now():
                    dead.add(ticket.client)
                else:
                    grace = None if ticket.presence is None else self.remaining_grace(ticket.presence)
                    if grace is None or ticket.presence is None:
                        return ticket
                    if grace > 0:
                        away.add(ticket.presence)
                        continue
                    dead.add(ticket.presence)
            if prune:
                self.remove(ticket, "dead")
        return None

    def lock_or_create_queue(self, name: str) -> None:
        if name not in self.queues:
            line, row = self.tables.tickets.get(name), self.tables.rows.get(name)
            self.queues[name] = max(row.last_served_ticket if row else 0, line[-1].number if line else 0)

    def queue_is_empty(self, name: str) -> bool:
        self.lock_or_create_queue(name)
        if self.first_in_queue(name, prune=True) is not None or self.tables.tickets.get(name):
            return False
        self.tables.rows[name].waiting = False
        return True

    def wake_next(self, name: str) -> None:
        """Wake the first waiter of a lock that was freed just now."""
        if self.durable:
            return
        line = self.tables.tickets.get(name)
        if not line or not self.is_live(line[0]):
            self.lock_or_create_queue(name)
        found = self.first_in_queue(name, prune=True)
        if found is not None:
            self.notify(found.client, found.attempt)
        elif not self.tables.tickets.get(name):
            self.tables.rows[name].waiting = False

    def is_live(self, ticket: Ticket) -> bool:
        mark = self.marks.get(ticket.presence or "")
        counts = mark is not None and mark.incarnation == self.incarnation and mark.session != self.session
        ended = mark is not None and counts and mark.session not in self.sessions
        return self.tables.clients.get(ticket.client, float("-inf")) > self.now() and not ended

    def wake_if_free(self, name: str) -> None:
        row = self.tables.rows.get(name)
        if row is not None and row.waiting and row.expires_at <= self.now():
            self.wake_next(name)

    def touch_client(self, client: str) -> None:
        now, clients = self.now(), self.tables.clients
        self.observer.heard(client)
        if clients.get(client, float("-inf")) <= now + HEARD_AGAIN:
            clients[client] = max(now + HEARD_FOR, clients.get(client, now))

    def heartbeat(self, client: str, names: Iterable[str]) -> tuple[int, list[tuple[str, float, bool]]]:
        """Record a client's heartbeat. Return how many tickets it has, and which of them are first."""
        self.touch_client(client)
        places = sum(ticket.client == client for line in self.tables.tickets.values() for ticket in line)
        firsts: list[tuple[str, float, bool]] = []
        for name in names:
            firsts += self.positions(name, client)
        return places, firsts

    def positions(self, name: str, client: str) -> list[tuple[str, float, bool]]:
        """Return the ticket of a client that is first in a queue, the seconds to the next check, and `watched`."""
        row = self.tables.rows.get(name)
        found = None if row is None else self.first_in_queue(name, prune=False)
        if row is None or found is None or found.client != client:
            return []
        wait = max(row.expires_at - self.now(), 0.0)
        watched = wait > 0 and row.presence is not None
        if wait > 0 and row.presence is not None:
            grace = self.remaining_grace(row.presence)
            wait = wait if grace is None else max(min(wait, grace), 0.0)
        return [(found.attempt, wait, watched)]

    def leave_queue(self, client: str, presence: str | None = None, keep: frozenset[str] = frozenset()) -> None:
        for name in sorted(self.tables.tickets):
            gone = [
                ticket
                for ticket in self.tables.tickets[name]
                if ticket.client == client
                and ticket.attempt not in keep
                and (not keep or ticket.since < self.now() - LEFT_AFTER)
            ]
            for ticket in gone:
                self.remove(ticket, "left")
            if gone:
                self.wake_if_free(name)
        if not keep:
            self.tables.clients.pop(client, None)
            self.marks.pop(presence or "", None)

    # Presences.

    def remaining_grace(self, presence: str) -> float | None:
        mark = self.marks.get(presence)
        if mark is None or mark.incarnation != self.incarnation or mark.session == self.session:
            return None
        if mark.session in self.sessions:
            return None
        if mark.gone_since is None:
            mark.gone_since = self.now()
            return mark.grace
        return mark.gone_since + mark.grace - self.now()

    def register_presence(self, presence: str, grace: float) -> None:
        assert self.session is not None
        self.marks[presence] = Mark(self.session, self.incarnation, grace)

    def withdraw_presence(self, presence: str, grants: Iterable[tuple[str, int]]) -> list[int]:
        self.marks.pop(presence, None)
        rows, now = self.tables.rows, self.now()
        return [
            place
            for place, (name, token) in enumerate(grants, 1)
            if name not in rows or rows[name].token != token or rows[name].expires_at <= now
        ]
