"""The database in memory: the meaning of the SQL functions of read-write locks and semaphores.

Written after dblock/sql/shared_locks, function by function and under the same names. What the functions check of their
arguments is left out, and so are names that are used for locks of two kinds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dblock.errors import InvalidArgument, PermitsDiffer
from dblock.testing.database.store import Store, describe_kind
from dblock.testing.database.tables import HEADS, Row, Ticket

SHARE_KINDS = {"read": "reader", "write": "writer", None: "permit"}
EXCLUDING = {"read": ("writer",), "write": ("reader", "writer"), None: ("permit",)}
"""The kinds of shares that exclude a grant, by its mode."""


class Shares(NamedTuple):
    """The reply of look_at_shares."""

    held: int
    expires_at: float | None
    next_check: float
    watched: bool


class Answer(NamedTuple):
    """The reply of acquire_shared and of downgrade."""

    granted: bool
    token: int | None = None
    expires_at: float | None = None
    remaining: float = 0.0
    ticket: int | None = None
    first: bool = False
    watched: bool = False
    fresh: bool | None = None
    share: str | None = None
    permit: int | None = None


class SharedStore(Store):
    """One database with plain and shared locks in it."""

    # The shares of a lock.

    def shares(self, head: str, kinds: Sequence[str] = ("reader", "writer", "permit")) -> list[Row]:
        return [row for row in self.tables.rows.values() if row.head == head and row.kind in kinds]

    def held_shares(self, head: str, kinds: Sequence[str]) -> list[Row]:
        return [row for row in self.shares(head, kinds) if row.expires_at > self.now()]

    def look_at_shares(self, head: str, kinds: Sequence[str], look: bool, takeover: bool) -> Shares:
        shortest = math.inf
        held = self.held_shares(head, kinds)
        if look or takeover:
            for presence in sorted({row.presence for row in held if row.presence is not None}):
                grace = self.remaining_grace(presence)
                if grace is not None and grace <= 0 and takeover:
                    for row in held:
                        if row.presence == presence:
                            self.free(row, "died", presence)
                elif grace is not None:
                    shortest = min(shortest, grace)
            held = self.held_shares(head, kinds)
        if not held:
            return Shares(0, None, 0.0, False)
        expires_at = min(row.expires_at for row in held)
        watched = any(row.presence is not None for row in held)
        return Shares(len(held), expires_at, max(min(expires_at - self.now(), shortest), 0.0), watched)

    def lowest_free_share(self, head: str, kind: str, below: int) -> int | None:
        rows = {row.permit: row for row in self.shares(head, [kind]) if row.permit is not None and row.permit < below}
        free = [number for number, row in rows.items() if row.expires_at <= self.now()]
        if free:
            return min(free)
        number = next(number for number in range(len(rows) + 1) if number not in rows)
        return number if number < below else None

    def take_share(self, head: str, kind: str, number: int | None) -> Row:
        name = f"{head}#{'writer' if kind == 'writer' else f'reader-{number}' if kind == 'reader' else number}"
        return self.tables.rows.setdefault(name, Row(name, kind=kind, head=head, permit=number))

    def grant_share(self, head: Row, share: Row, ttl: float, attempt: str | None, presence: str | None) -> None:
        """Grant a share. Only this function mints tokens of shared locks."""
        if share.expires_at > -math.inf:
            self.record_event(share, "expired", share.expires_at)
        share.token = head.token = self.mint_shared(head, attempt)
        share.minted_start, head.released_at = head.minted_start, self.now()
        share.attempt, share.presence, share.holder = attempt, presence, None
        share.released_at, share.forced_at = -math.inf, None
        share.ttl, share.granted_at = ttl, self.now()
        share.expires_at = self.now() + ttl
        self.durable = True
        self.observer.granted(share, None, True)

    def mint_shared(self, head: Row, attempt: str | None) -> int:
        """Return the next token of a shared lock, whichever share it is for."""
        return self.mint(head)

    # The queue of a lock.

    def live_tickets(
        self, name: str, enough: int, wanted: str | None = None, before: int | None = None, prune: bool = False
    ) -> list[Ticket]:
        found: list[Ticket] = []
        alive: set[str] = set()
        dead: set[str | None] = set()
        away: set[str] = set()
        for ticket in list(self.tables.tickets.get(name, ())):
            if len(found) >= enough:
                break
            if (wanted is not None and ticket.mode != wanted) or (before is not None and ticket.number >= before):
                continue
            presence = ticket.presence
            if presence in away:
                continue
            if ticket.client not in dead and (presence is None or presence not in dead):
                if self.tables.clients.get(ticket.client, -math.inf) <= self.now():
                    dead.add(ticket.client)
                else:
                    unknown = presence is None or presence in alive
                    grace = None if presence is None or unknown else self.remaining_grace(presence)
                    if grace is None:
                        alive.update([presence] if presence is not None else [])
                        found.append(ticket)
                        continue
                    assert presence is not None
                    if grace > 0:
                        away.add(presence)
                        continue
                    dead.add(presence)
            if prune:
                self.remove(ticket, "dead")
        return found

    def wake_shared(self, head: str) -> None:
        """Wake the waiters of a shared lock that can be granted now."""
        if not self.durable:
            self.notify_shared(head)

    def notify_shared(self, name: str) -> None:
        head = self.tables.rows.get(name)
        if head is None or not head.waiting:
            return
        if head.kind == "semaphore":
            assert head.permits is not None
            free = head.permits - self.look_at_shares(name, ["permit"], False, False).held
            self.notify_each(self.live_tickets(name, free))
            return
        first = self.live_tickets(name, 1)
        if not first or self.look_at_shares(name, EXCLUDING[first[0].mode], False, False).held:
            return
        if first[0].mode == "write":
            self.notify_each(first)
            return
        writers = self.live_tickets(name, 1, "write")
        last = writers[0].number if writers else math.inf
        line = self.tables.tickets.get(name, [])
        self.notify_each([ticket for ticket in line if ticket.mode == "read" and ticket.number < last])

    def notify_each(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self.notify(ticket.client, ticket.attempt)

    def wake_if_free(self, name: str) -> None:
        row = self.tables.rows.get(name)
        if row is not None and row.kind is not None:
            if row.waiting or row.head is not None:
                self.wake_shared(row.head or name)
        else:
            super().wake_if_free(name)

    def positions(self, name: str, client: str) -> list[tuple[str, float, bool]]:
        """Return the tickets of a client that can be granted now or are next."""
        head = self.tables.rows.get(name)
        if head is None or head.kind is None:
            return super().positions(name, client)
        line = self.tables.tickets.get(name, [])
        if not any(ticket.client == client for ticket in line):
            return []
        if head.kind == "semaphore":
            assert head.permits is not None
            shares = self.look_at_shares(name, ["permit"], True, False)
            free = max(head.permits - shares.held, 0)
            return [
                (ticket.attempt, 0.0, False) if place <= free else (ticket.attempt, shares.next_check, shares.watched)
                for place, ticket in enumerate(self.live_tickets(name, free + 1), 1)
                if ticket.client == client
            ]
        writers = self.live_tickets(name, 1, "write")
        if writers and writers[0].client == client and self.live_tickets(name, 1)[0] is writers[0]:
            shares = self.look_at_shares(name, EXCLUDING["write"], True, False)
            return [(writers[0].attempt, shares.next_check, shares.watched)]
        shares = self.look_at_shares(name, EXCLUDING["read"], True, False)
        last = writers[0].number if writers else math.inf
        readers = [
            (ticket.attempt, shares.next_check, shares.watched)
            for ticket in line
            if ticket.client == client and ticket.mode == "read" and ticket.number < last
        ]
        return readers[:1] if shares.next_check > 0 else readers

    # What a client calls.

    def acquire_shared(
        self,
        name: str,
        kind: str,
        mode: str | None,
        permits: int | None,
        ttl: float,
        attempt: str,
        client: str | None = None,
        presence: str | None = None,
        had_ticket: bool = False,
    ) -> Answer:
        head = self.tables.rows.get(name)
        if head is None:
            if kind == "semaphore" and permits is None:
                raise InvalidArgument(f"There is no semaphore {name!r}. Say how many permits it has.")
            head = self.tables.rows[name] = Row(name, released_at=self.now(), kind=kind, permits=permits)
        if head.kind != kind:
            if head.kind is not None or (kind == "semaphore" and permits is None) or not self.is_unused(head):
                self.refuse_kind(head, describe_kind(kind))
            head.kind, head.permits, head.waiting = kind, permits, False
        mine = self.share_of(name, SHARE_KINDS[mode], attempt)
        if mine is not None:
            for ticket in self.tickets_of(name, attempt):
                self.remove(ticket, "redeemed")
            return self.found_again(mine, ttl)
        own = next(iter(self.tickets_of(name, attempt)), None)
        if permits is not None and permits != head.permits and own is None and not had_ticket:
            raise PermitsDiffer(name, head.permits or 0, permits)
        takeover = had_ticket or client is None or not head.waiting
        shares = self.look_at_shares(name, self.excluding(mode), takeover, takeover)
        free = self.free_shares(head, mode, shares.held, client is None)
        ahead = 0
        if head.waiting:
            enough = free + 1 if mode is None else 1
            wanted = "write" if mode == "read" else None
            ahead = len(self.live_tickets(name, enough, wanted, self.limit(mode, own), had_ticket or free > 0))
        if ahead < free if mode is None else free > 0 and ahead == 0:
            number = None if mode == "write" else self.share_number(head, mode)
            assert mode == "write" or number is not None
            share = self.take_share(name, SHARE_KINDS[mode], number)
            self.grant_share(head, share, ttl, attempt, presence)
            if head.waiting:
                if own is not None:
                    self.remove(own, "redeemed")
                    head.last_served_ticket = max(head.last_served_ticket, own.number)
                head.waiting = bool(self.tables.tickets.get(name))
            return Answer(True, share.token, share.expires_at, ttl, share=share.name, permit=share.permit)
        first = ahead <= free if mode is None else ahead == 0
        fresh = own is None and client is not None
        if client is not None:
            if own is None:
                self.lock_or_create_queue(name)
                own = self.line_up(head, attempt, client, presence)
                own.mode, head.waiting = mode, True
            elif presence is not None:
                own.presence = presence
            self.touch_client(client)
        number = None if own is None else own.number
        return Answer(False, None, shares.expires_at, shares.next_check, number, first, shares.watched, fresh)

    def is_unused(self, row: Row) -> bool:
        """Return whether a plain lock was never granted and has no live waiter."""
        if row.token != 0 or row.expires_at > -math.inf:
            return False
        self.lock_or_create_queue(row.name)
        self.first_in_queue(row.name, prune=True)
        self.queues[row.name] += 1
        return not self.tables.tickets.get(row.name)

    def share_of(self, name: str, kind: str, attempt: str | None) -> Row | None:
        """Return the share that an attempt holds."""
        held = self.held_shares(name, [kind])
        return next((row for row in held if attempt is not None and row.attempt == attempt), None)

    def found_again(self, mine: Row, ttl: float) -> Answer:
        """Reply to a retry whose first call was granted a share."""
        self.durable = True
        left = self.left_of_own(mine, ttl, mine.expires_at - self.now())
        return Answer(True, mine.token, mine.expires_at, left, share=mine.name, permit=mine.permit)

    def excluding(self, mode: str | None) -> Sequence[str]:
        """Return the kinds of shares that exclude a grant."""
        return EXCLUDING[mode]

    def free_shares(self, head: Row, mode: str | None, held: int, tries: bool) -> int:
        """Return how many shares are free for the waiters at the front."""
        return max((head.permits or 0) - held, 0) if mode is None else int(held == 0)

    def limit(self, mode: str | None, own: Ticket | None) -> int | None:
        """Return the ticket before which waiters are ahead."""
        return None if own is None else own.number

    def share_number(self, head: Row, mode: str | None) -> int | None:
        """Return the number of the share to grant to a reader or for a permit."""
        below = head.permits if mode is None else 1 << 31
        return self.lowest_free_share(head.name, SHARE_KINDS[mode], below or 0)

    def downgrade(self, name: str, token: int, attempt: str, ttl: float, presence: str | None) -> Answer:
        head = self.tables.rows.get(name)
        if head is None:
            return Answer(False)
        if head.kind != "read-write":
            self.refuse_kind(head, "a read-write lock")
        mine = self.share_of(name, "reader", attempt)
        if mine is not None:
            return self.found_again(mine, ttl)
        writer = self.tables.rows.get(f"{name}#writer")
        if writer is None or not self.may_downgrade(writer, token):
            return Answer(False)
        share = self.take_share(name, "reader", self.lowest_free_share(name, "reader", 1 << 31))
        holder, meta = writer.holder, writer.meta
        self.free(writer, "downgraded", token)
        self.grant_share(head, share, ttl, attempt, presence if presence is not None else writer.presence)
        share.holder, share.meta = holder, meta
        return Answer(True, share.token, share.expires_at, ttl, share=share.name, permit=share.permit)

    def may_downgrade(self, writer: Row, token: int) -> bool:
        return writer.token == token and writer.expires_at > self.now() and writer.forced_at is None

    def resize_semaphore(self, name: str, permits: int) -> int | None:
        head = self.tables.rows.get(name)
        if head is None:
            raise InvalidArgument(f"There is no semaphore {name!r}.")
        if head.kind != "semaphore":
            self.refuse_kind(head, "a semaphore")
        before, head.permits = head.permits, permits
        self.durable = True
        if permits > (before or 0):
            self.notify_shared(name)
        return before

    def shared_state(self, name: str) -> tuple[str | None, int | None, int | None, list[Row]]:
        """Return the kind, the number of permits, how many of them are available, and the holders' shares."""
        head = self.tables.rows.get(name)
        if head is not None and head.kind is None and (head.token > 0 or head.expires_at > -math.inf):
            return "plain", None, None, []
        head = head if head is not None and head.kind in HEADS else None
        held = self.held_shares(name, ["reader", "writer", "permit"])
        graces = {one: self.remaining_grace(one) for one in {row.presence for row in held} if one is not None}
        gone = {presence for presence, grace in graces.items() if grace is not None and grace <= 0}
        live = sorted((row for row in held if row.presence not in gone), key=lambda row: row.token)
        if head is None:
            return None, None, None, live
        return head.kind, head.permits, None if head.permits is None else max(head.permits - len(live), 0), live

    # What is done with a share as with every lock.

    def release(self, name: str, token: int) -> bool:
        released = super().release(name, token)
        head = self.tables.rows[name].head if released else None
        if head is not None:
            self.wake_shared(head)
        return released

    def abandon(self, name: str, attempt: str, only_ticket: bool = False) -> bool:
        head = self.tables.rows.get(name)
        if head is None or head.kind not in HEADS:
            return super().abandon(name, attempt, only_ticket)
        own = self.tickets_of(name, attempt)
        for ticket in own:
            self.remove(ticket, "abandoned")
        held = [] if only_ticket else self.shares_of(name, attempt)
        for row in held:
            self.free(row, "abandoned", attempt)
        if own or held:
            self.wake_if_free(name)
        return bool(own or held)

    def shares_of(self, name: str, attempt: str) -> list[Row]:
        """Return what an attempt holds of a lock."""
        return [row for row in self.held_shares(name, ["reader", "writer", "permit"]) if row.attempt == attempt]

    def is_idle(self, row: Row, since: float) -> bool:
        return super().is_idle(row, since) and not (row.kind in HEADS and self.shares(row.name))
