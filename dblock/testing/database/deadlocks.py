"""The database in memory: the meaning of the SQL functions that look for deadlocks.

Written after dblock/sql/deadlocks, function by function and under the same names. Left out are the sessions of users'
transactions, of which there are none here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dblock._core.effects import Row
from dblock.testing.database.columns import boolean, items, text
from dblock.testing.database.several.store import SeveralStore
from dblock.testing.database.tables import Ticket

MOST_VISITED = 500


class Wait(NamedTuple):
    """One wait of a cycle: a ticket, and the token that is in its way."""

    ticket: Ticket
    token: int


class DeadlockStore(SeveralStore):
    """One database in which waits that form a cycle are found."""

    def tokens_in_the_way(self, name: str, attempt: str) -> Iterator[int]:
        """Yield the tokens of the grants that a ticket waits for."""
        now, tables = self.now(), self.tables
        held = [
            row
            for row in tables.rows.values()
            if name in (row.name, row.head) and row.expires_at > now and row.forced_at is None
        ]
        line = tables.tickets.get(name, ())
        own = next((ticket for ticket in line if ticket.attempt == attempt), None)
        write_ahead = own is not None and (
            own.mode == "write"
            or any(one.mode == "write" and one.number < own.number and self.lives(one) for one in line)
        )
        permits = [row.token for row in held if row.kind == "permit"]
        for row in held:
            if row.kind == "reader" and not write_ahead:
                continue
            if row.kind == "permit" and not self.one_waiter_has_all(name, row.token, permits):
                continue
            yield row.token

    def one_waiter_has_all(self, name: str, token: int, permits: Sequence[int]) -> bool:
        """Return whether the thread or task of one waiter has this permit and all others of a semaphore."""
        enough = self.tables.rows[name].permits or 0
        return any(
            token in holds and sum(one in holds for one in permits) >= enough
            for holds in self.tables.waiting_holds.values()
        )

    def waits_with(self, tokens: Iterable[int]) -> Iterator[tuple[int, Ticket]]:
        """Yield the live tickets of the threads and tasks that hold these tokens."""
        for token in tokens:
            for attempt, holds in self.tables.waiting_holds.items():
                for ticket in self.tickets_of(holds.get(token, ""), attempt):
                    if self.lives(ticket):
                        yield token, ticket

    def find_cycle(self, name: str, attempt: str) -> list[Wait]:
        """Return the shortest cycle of waits that leads through this ticket, in order."""
        visited = [(ticket, -1, 0) for ticket in self.tickets_of(name, attempt)]
        seen, here = {attempt}, 0
        while here < min(len(visited), MOST_VISITED):
            at = visited[here][0]
            for token, ticket in self.waits_with(list(self.tokens_in_the_way(at.name, at.attempt))):
                if (ticket.attempt, ticket.name) == (attempt, name):
                    return self.way_back(visited, here, token)
                if ticket.attempt not in seen:
                    seen.add(ticket.attempt)
                    visited.append((ticket, here, token))
            here += 1
        return []

    def way_back(self, visited: Sequence[tuple[Ticket, int, int]], here: int, closing: int) -> list[Wait]:
        way: list[Wait] = []
        token = closing
        while here >= 0:
            ticket, parent, by = visited[here]
            way.insert(0, Wait(ticket, token))
            token, here = by, parent
        return [] if any(not self.is_live(wait.ticket) for wait in way) else way

    def look_for_deadlock(
        self, name: str, attempt: str, holds: Sequence[int], ended: Sequence[str] = ()
    ) -> tuple[bool, list[dict[str, object]] | None]:
        noted = self.tables.waiting_holds
        for one in ended:
            noted.pop(one, None)
        if not holds or not self.tickets_of(name, attempt):
            return False, None
        noted[attempt] = dict.fromkeys(sorted(set(holds))[:1000], name)
        cycle = self.find_cycle(name, attempt)
        if not cycle:
            return False, None
        youngest = max((wait.ticket for wait in cycle), key=lambda ticket: (ticket.since, ticket.attempt))
        described = [self.describe(wait) for wait in cycle]
        if youngest.attempt != attempt:
            self.notify(youngest.client, f"deadlock {youngest.attempt}")
            return False, described
        victim = self.abandon(name, attempt, only_ticket=True)
        noted.pop(attempt, None)
        return victim, described

    def describe(self, wait: Wait) -> dict[str, object]:
        lock, token = wait.ticket.name, wait.token
        holder = next(
            (
                row.holder
                for row in self.tables.rows.values()
                if lock in (row.name, row.head) and row.token == token and row.expires_at > float("-inf")
            ),
            None,
        )
        return {
            "waiter": wait.ticket.holder,
            "lock": lock,
            "holder": holder,
            "token": token if token > 0 else None,
            "session": None,
            "blocker": None,
        }


def execute_look(store: DeadlockStore, args: tuple[str | None, ...], sql: bytes) -> Row:
    """Execute the statement that looks for a deadlock on the store."""
    name, attempt, holds, ended = args
    victim, cycle = store.look_for_deadlock(text(name), text(attempt), [int(one) for one in items(holds)], items(ended))
    return boolean(victim), None if cycle is None else json.dumps(cycle)
