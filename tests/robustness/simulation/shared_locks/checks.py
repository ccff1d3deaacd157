"""What must hold of read-write locks and semaphores at every step, beside what holds for every lock.

The checks keep their own record of the shares. They do not rely on the store, except for the number of permits.

| check | what it finds |
|---|---|
| readers and writers | a reader beside a writer, or two writers |
| permits | more permits held than the semaphore has, a number out of range, or one that is held already |
| token order | a grant whose token is not higher than those of all shares of the lock before it |
| turn | a reader past a writer ahead of it, a writer past any waiter, a permit for which others come first |
| downgrade | another writer between a writer and the reader that it became |
| one grant | an attempt that has two shares of a lock |
| own renewal | a share that another process than its holder renews, or for longer than its own ttl |
| given up | a share that is held for an attempt that was given up |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dblock._core.lease_state import LeaseState
from dblock.testing.database.tables import HEADS, Row, Ticket
from tests.robustness.simulation.checks import FOUND_WITHIN, GHOSTS_WITHIN, WOKEN_WITHIN, Checks
from tests.robustness.simulation.client import Client
from tests.robustness.simulation.world import Violation, short


@dataclass
class Share:
    """A share that was granted, by the checks' own record."""

    head: str
    kind: str
    number: int | None
    attempt: str | None
    token: int
    ttl: float


class SharedChecks(Checks):
    """Observes every step of shared locks, and raises a Violation."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.askers: dict[str, Client] = {}
        """The process of each attempt."""
        self._shares: dict[str, Share] = {}
        self._downgrading: str | None = None
        self._grantable: dict[str, float] = {}
        """Since when each waiter could have been granted its share."""

    def _held_of(self, head: str, kinds: Sequence[str]) -> list[str]:
        now = self.world.now
        return [
            name
            for name, share in self._shares.items()
            if share.head == head and share.kind in kinds and self._held.get(name, (0, now))[1] > now
        ]

    # What the database does.

    def granted(self, row: Row, ticket: int | None, fair: bool) -> None:
        if row.head is None or row.kind is None:
            super().granted(row, ticket, fair)
            return
        name, head = row.name, row.head
        held = self._held_of(head, ["reader", "writer", "permit"])
        self.count(f"{row.kind}s")
        if row.kind == "permit":
            self._check_permit(row, held)
        elif (row.kind == "writer" and held) or f"{head}#writer" in held:
            raise Violation("readers and writers", f"{name}: granted under {row.token} beside {held}")
        if any(self._shares[one].attempt == row.attempt for one in held):
            raise Violation("one grant", f"{name}: granted to {short(row.attempt)}, which has another share")
        if row.token <= self._highest.get(head, 0):
            raise Violation("token order", f"{name}: {row.token} granted after {self._highest[head]} of {head}")
        downgrading, self._downgrading = self._downgrading, None
        if downgrading != head:
            self._check_share_turn(row, held)
        self._highest[head] = row.token
        self._shares[name] = Share(head, row.kind, row.permit, row.attempt, row.token, row.ttl)
        super().granted(row, None, False)

    def _check_permit(self, row: Row, held: list[str]) -> None:
        permits = self.database.store.tables.rows[str(row.head)].permits or 0
        if len(held) >= permits:
            raise Violation("permits", f"{row.name}: granted while {held} are held of {permits}")
        numbers = [self._shares[one].number for one in held]
        if row.permit is None or not 0 <= row.permit < permits or row.permit in numbers:
            raise Violation("permits", f"{row.name}: has number {row.permit} of {permits} beside {numbers}")

    def _check_share_turn(self, row: Row, held: list[str]) -> None:
        line = self._line(str(row.head))
        own = next((one.number for one in line if one.attempt == row.attempt), math.inf)
        ahead = [one for one in line if one.number < own and self._is_alive(one)]
        if row.kind == "reader":
            ahead = [one for one in ahead if one.mode == "write"]
        free = 1
        if row.kind == "permit":
            free = (self.database.store.tables.rows[str(row.head)].permits or 0) - len(held)
        if len(ahead) >= free:
            raise Violation("turn", f"{row.name}: granted to {short(row.attempt)} past {short(ahead[0].attempt)}")

    def extended(self, row: Row, token: int, before: float) -> None:
        super().extended(row, token, before)
        share = self._shares.get(row.name)
        if row.head is None or share is None:
            return
        asker, caller = self.askers.get(share.attempt or ""), self.database.caller
        if asker is not None and caller is not asker:
            raise Violation("own renewal", f"{row.name}: another process renews the share of {asker.name}")
        if row.expires_at > max(before, self.world.now + share.ttl) + 1e-6:
            raise Violation("own renewal", f"{row.name}: renewed for longer than {share.ttl} s, its own ttl: {row}")

    def freed(self, row: Row, why: str, by: int | str | None) -> None:
        super().freed(row, why, by)
        if why == "downgraded" and row.forced_at is not None:
            raise Violation("exact grant", f"{row.name}: downgraded by {by}, which was told to release: {row}")
        if row.head is not None:
            self._downgrading = row.head if why == "downgraded" else None
            self._woken[row.head] = why in ("released", "abandoned")

    def resized(self, name: str) -> None:
        """Record that a semaphore was made larger, which wakes waiters."""
        self._woken[name] = True

    def removed(self, ticket: Ticket, why: str) -> None:
        if why != "redeemed" or not self._is_shared(ticket.name):
            super().removed(ticket, why)

    def _is_shared(self, name: str) -> bool:
        row = self.database.store.tables.rows.get(name)
        return row is not None and row.kind in HEADS

    def database_replaced(self) -> None:
        """Record that the database has forgotten something, and its state now."""
        super().database_replaced()
        self._shares = {
            row.name: Share(row.head, str(row.kind), row.permit, row.attempt, row.token, row.ttl)
            for row in self.database.store.tables.rows.values()
            if row.head is not None
        }

    # What a process does.

    def gave_up(self, name: str, attempt: str) -> None:
        """Check that an attempt whose caller has left holds nothing."""
        held = self._held_of(name, ["reader", "writer", "permit"])
        left = [one for one in held if self._shares[one].attempt == attempt]
        if left:
            raise Violation("given up", f"{left} held for {short(attempt)}, which was given up")

    def downgraded(self, writer: LeaseState, reader: LeaseState) -> None:
        """Check that no other writer came between a writer and the reader that it became."""
        self.count("downgrades")
        last = self._shares.get(f"{writer.lock}#writer")
        if last is not None and writer.token < last.token < reader.token:
            raise Violation("downgrade", f"{writer.lock}: {last.token} between {writer.token} and {reader.token}")

    # What must happen in the end.

    def tick(self) -> None:
        """Find waiters that could have been granted their share for too long. In calm weather only."""
        now = self.world.now
        waiting: set[str] = set()
        for row in list(self.database.store.tables.rows.values()):
            if row.kind not in HEADS:
                continue
            alive = [one for one in self._line(row.name) if self._is_alive(one)]
            ghosts = [one for one in alive if one.attempt not in self.clients[one.client].waiters._waiters]
            for one in self._grantable_of(row, [one for one in alive if one not in ghosts]):
                waiting.add(one.attempt)
                since = max(self._grantable.setdefault(one.attempt, now), one.since)
                most = FOUND_WITHIN
                if any(ghost.number < one.number for ghost in ghosts):
                    most = GHOSTS_WITHIN
                elif self._woken.get(row.name) and self.clients[one.client].waiters.notifications_work:
                    most = WOKEN_WITHIN
                if now - since > most:
                    raise Violation(
                        "handed over",
                        f"{row.name}: {short(one.attempt)} of {self.clients[one.client].name} could have been granted"
                        f" it since {since:.3f}",
                    )
        handed = [since for attempt, since in self._grantable.items() if attempt not in waiting]
        self.handed_over += len(handed)
        self.slowest = max([self.slowest, *(now - since for since in handed)])
        self._grantable = {one: since for one, since in self._grantable.items() if one in waiting}

    def _grantable_of(self, head: Row, line: list[Ticket]) -> list[Ticket]:
        """Return the waiters that could be granted their share now."""
        if head.kind == "semaphore":
            return line[: max((head.permits or 0) - len(self._held_of(head.name, ["permit"])), 0)]
        if self._held_of(head.name, ["writer"]) or not line:
            return []
        if line[0].mode == "write":
            return [] if self._held_of(head.name, ["reader"]) else line[:1]
        writers = [place for place, one in enumerate(line) if one.mode == "write"]
        return line[: writers[0]] if writers else line
