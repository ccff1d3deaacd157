"""The database in memory: the meaning of dblock's SQL functions, each of them executed at one instant.

Written after dblock/sql, function by function and under the same names. Row locks are left out: no two transactions run
at once here, so nothing is ever `busy`, and calls are executed in the order in which they arrive. `test_simulation.py`
compares the replies with those of Postgres.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, NoReturn

from dblock.errors import WrongKind
from dblock.testing.database.queue import Queues
from dblock.testing.database.tables import HEADS, Row, Ticket

SECOND = 1_000_000
"""The clock's ticks in a second, each of them a token."""


class Tried(NamedTuple):
    """The reply of try_acquire."""

    granted: bool
    token: int | None
    expires_at: float | None
    remaining: float
    waiting: bool


class Asked(NamedTuple):
    """The reply of acquire."""

    granted: bool
    token: int | None
    expires_at: float | None
    remaining: float
    ticket: int | None = None
    first: bool | None = None
    watched: bool | None = None
    fresh: bool | None = None


class Store(Queues):
    """One database with one dblock in it."""

    # Granting.

    def try_acquire(
        self,
        name: str,
        ttl: float,
        attempt: str | None,
        durable: bool = True,
        presence: str | None = None,
        fair: bool = True,
        ticket: int | None = None,
    ) -> Tried:
        in_line = fair and ticket is None
        looks = 0
        while True:
            row = self.tables.rows.get(name)
            now = self.now()
            if row is not None and row.expires_at <= now and not (row.waiting and in_line) and row.kind is None:
                if ticket is not None and not self.redeem(row, attempt, ticket):
                    return Tried(False, None, None, 0.0, True)
                self.grant(row, ttl, attempt, durable, presence, fair, ticket, now)
                return Tried(True, row.token, row.expires_at, ttl, False)
            if row is None:
                self.tables.rows[name] = Row(name)
                continue
            if row.kind is not None:
                self.refuse_kind(row, "a plain lock")
            remaining = max(row.expires_at - now, 0.0)
            granted = remaining > 0 and attempt is not None and row.attempt == attempt
            waiting = remaining == 0 and row.waiting and in_line
            looks += 1
            if looks == 1 and waiting:
                if self.queue_is_empty(name):
                    continue
            elif looks == 1 and remaining == 0:
                continue
            elif looks == 1 and not granted and row.presence is not None and self.may_take_over(row, attempt):
                grace = self.remaining_grace(row.presence)
                if grace is not None and grace <= 0:
                    self.free(row, "died", row.presence)
                    continue
                if grace is not None:
                    remaining = min(remaining, grace)
            if granted and durable:
                self.durable = True
            left = self.left_of_own(row, ttl, remaining) if granted else remaining
            return Tried(granted, row.token if granted else None, _if_held(row.expires_at, now), left, waiting)

    def may_take_over(self, row: Row, attempt: str | None) -> bool:
        """Return whether a try checks if the holder is dead. One without an attempt leaves that to live waiters."""
        return attempt is not None or not row.waiting or not self.live_queue(row.name)

    def refuse_kind(self, row: Row, asked: str) -> NoReturn:
        """Refuse a request for a name that has another kind."""
        raise WrongKind(f"Lock {row.name!r} is {describe_kind(row.kind, row.head)}. It cannot be used as {asked}.")

    def left_of_own(self, row: Row, ttl: float, remaining: float) -> float:
        """Return the time that is left of a grant that a retry finds to be its own."""
        return remaining

    def redeem(self, row: Row, attempt: str | None, number: int) -> bool:
        """Redeem this attempt's ticket. Return False if it is gone or another ticket is ahead."""
        line = self.tables.tickets.get(row.name, [])
        for ticket in line:
            if ticket.number == number and ticket.attempt == attempt:
                self.remove(ticket, "redeemed")
                return True
            if ticket.number > row.last_served_ticket:
                return False
        return False

    def grant(
        self,
        row: Row,
        ttl: float,
        attempt: str | None,
        durable: bool,
        presence: str | None,
        fair: bool,
        ticket: int | None,
        now: float,
    ) -> None:
        """Grant a free lock. Only this function mints tokens."""
        if row.expires_at > float("-inf"):
            self.record_event(row, "expired", row.expires_at)
        row.token = self.mint(row) if durable else -1 - self.chance.randrange(1 << 52)
        row.attempt, row.presence, row.holder = attempt, presence, None
        row.last_served_ticket = row.last_served_ticket if ticket is None else ticket
        row.released_at, row.forced_at = float("-inf"), None
        row.ttl, row.granted_at, row.expires_at = ttl, now, now + ttl
        self.durable = self.durable or durable
        self.observer.granted(row, ticket, fair)

    def mint(self, row: Row) -> int:
        """Return the next token, which is above the last one of the lock and at most a second behind the clock."""
        while True:
            if row.minted_start == self.incarnation:
                self.tables.sequence += 1
                if self.tables.sequence > row.token and self.follows_the_clock(self.tables.sequence):
                    return self.tables.sequence
            self.catch_up_tokens(row.token)
            row.minted_start = self.incarnation

    def follows_the_clock(self, token: int) -> bool:
        return token >= self.now() * SECOND - SECOND

    def catch_up_tokens(self, above: int) -> None:
        """Move the tokens up to the clock, if they are too low, and above a number."""
        highest, clock, started = (
            self.tables.sequence,
            round(self.now() * SECOND),
            self.tables.server_start == self.incarnation,
        )
        if not self.follows_the_clock(highest) or (highest < clock and not started):
            target = clock
        else:
            target = highest if started else highest + SECOND
        if above >= target:
            target = max(above, highest + SECOND)
        self.tables.sequence, self.tables.server_start = target, self.incarnation

    def acquire(
        self,
        name: str,
        ttl: float,
        attempt: str,
        client: str,
        durable: bool = True,
        fair: bool = True,
        presence: str | None = None,
        had_ticket: bool = False,
    ) -> Asked:
        self.lock_or_create_queue(name)
        row = self.tables.rows.setdefault(name, Row(name))
        if row.kind is not None:
            self.refuse_kind(row, "a plain lock")
        was_held_by, until, was_waiting, mark = row.attempt, row.expires_at, row.waiting, row.presence
        free = until <= self.now()
        grace: float | None = None
        if not free and mark is not None and was_held_by != attempt and (had_ticket or not was_waiting):
            grace = self.remaining_grace(mark)
            if grace is not None and grace <= 0:
                self.free(row, "died", mark)
                free = True
        first = True
        if free and was_waiting:
            line = self.tables.tickets.get(name)
            if line:
                first = line[0].attempt == attempt
                if not first and had_ticket:
                    found = self.first_in_queue(name, prune=True)
                    first = found is None or found.attempt == attempt
        if (free and (first or not fair)) or (not free and was_held_by == attempt):
            answer = self.try_acquire(name, ttl, attempt, durable, presence, fair=False)
            if answer.granted:
                for ticket in self.tickets_of(name, attempt):
                    self.remove(ticket, "redeemed")
                return Asked(True, answer.token, answer.expires_at, answer.remaining, first=first)
        own = self.tickets_of(name, attempt)
        if own:
            (ticket,) = own
            self.queues[name] += not had_ticket
            ticket.presence = presence if presence is not None else ticket.presence
        else:
            ticket = self.line_up(row, attempt, client, presence)
        if was_waiting:
            first = free and first
        else:
            row.waiting = True
        self.touch_client(client)
        now = self.now()
        remaining = max(until - now, 0.0)
        if grace is not None and grace > 0:
            remaining = min(remaining, grace)
        watched = mark is not None and until > now
        return Asked(False, None, _if_held(until, now), remaining, ticket.number, first, watched, not own)

    def line_up(self, row: Row, attempt: str, client: str, presence: str | None) -> Ticket:
        """Add a ticket at the end of the queue."""
        line = self.tables.tickets.setdefault(row.name, [])
        self.queues[row.name] += 1
        line.append(Ticket(row.name, self.queues[row.name], attempt, client, presence, self.now()))
        return line[-1]

    # Extending and freeing.

    def renew_all(
        self, grants: Iterable[tuple[str, int, float]], presence: str | None = None
    ) -> tuple[float, list[tuple[int, str]]]:
        """Extend these grants. Return the moment, and the position (from 1) and reason of each that was missed."""
        now = self.now()
        missed = []
        for place, (name, token, ttl) in enumerate(grants, 1):
            row = self.tables.rows.get(name)
            if row is None or row.token != token:
                missed.append((place, "superseded"))
            elif row.expires_at == float("-inf"):
                missed.append((place, "released"))
            elif row.expires_at <= now:
                missed.append((place, "expired"))
            elif row.forced_at is not None:
                missed.append((place, "forced"))
            else:
                self.extend(row, token, ttl)
                row.presence = presence if presence is not None else row.presence
            self.durable = self.durable or token > 0
        return now, missed

    def extend(self, row: Row, token: int, ttl: float) -> None:
        now, before = self.now(), row.expires_at
        row.expires_at = max(min(row.expires_at, now + row.ttl), now + ttl)
        row.ttl = max(row.ttl, ttl)
        self.observer.extended(row, token, before)

    def release(self, name: str, token: int) -> bool:
        row = self.tables.rows.get(name)
        if row is None or row.token != token or row.expires_at <= self.now():
            return False
        self.free(row, "released", token)
        if row.waiting:
            self.wake_next(name)
        return True

    def release_all(self, grants: Iterable[tuple[str, int]]) -> int:
        """Free these. Return how many were freed."""
        return sum([self.release(name, token) for name, token in grants])

    def abandon(self, name: str, attempt: str, only_ticket: bool = False) -> bool:
        row = self.tables.rows.get(name)
        gave_back = False
        if row is not None and row.attempt == attempt and row.expires_at > self.now() and not only_ticket:
            self.free(row, "abandoned", attempt)
            gave_back = True
        own = self.tickets_of(name, attempt)
        if (gave_back and row is not None and row.waiting) or own:
            for ticket in own:
                self.remove(ticket, "abandoned")
            gave_back = True
            self.wake_if_free(name)
        return gave_back

    def force_release(self, name: str, token: int, now: bool = False) -> bool:
        row = self.tables.rows.get(name)
        if row is None or row.token != token or row.expires_at <= self.now():
            return False
        if now:
            self.free(row, "forced_now", token)
        else:
            self.record_event(row, "forced", self.now())
            row.forced_at = self.now()
        self.durable = True
        return True

    def free(self, row: Row, why: str, by: int | str | None) -> None:
        """Free a lock, whatever its holder."""
        self.observer.freed(row, why, by)
        if why in ("died", "forced_now"):
            self.record_event(row, why, self.now())
        row.expires_at, row.released_at, row.attempt, row.holder = float("-inf"), self.now(), None, None

    def record_event(self, row: Row, event: str, at: float) -> None:
        """Record how the grant in a lock's row ended, or that it was forced. Only the newest event is kept."""
        self.tables.history[row.name, row.token] = event, at

    # Inspecting.

    def holder(self, name: str) -> Row | None:
        """Return the grant of the holder; of several holders, the one that was granted first."""
        now = self.now()
        held = [row for row in self.tables.rows.values() if name in (row.name, row.head) and row.expires_at > now]
        return min(held, key=lambda row: row.granted_at or 0.0, default=None)

    def live_queue(self, name: str) -> list[Ticket]:
        """Return the tickets of the live clients, in order."""
        clients, now = self.tables.clients, self.now()
        return [one for one in self.tables.tickets.get(name, ()) if clients.get(one.client, float("-inf")) > now]

    # For the operator.

    def reap(self, idle: float) -> int:
        now, tables = self.now(), self.tables
        for line in list(tables.tickets.values()):
            for ticket in list(line):
                if tables.clients.get(ticket.client, float("-inf")) <= now - idle and ticket.since <= now - idle:
                    self.remove(ticket, "reaped")
        for attempt, holds in list(tables.waiting_holds.items()):
            kept = {token: name for token, name in holds.items() if self.tickets_of(name, attempt)}
            tables.waiting_holds[attempt] = kept
            if not kept:
                del tables.waiting_holds[attempt]
        long_ago = now - max(idle, 60.0)
        tables.clients = {client: until for client, until in tables.clients.items() if until > long_ago}
        for name, mark in list(self.marks.items()):
            if mark.incarnation != self.incarnation or (mark.gone_since is not None and mark.gone_since <= long_ago):
                del self.marks[name]
            elif mark.gone_since is None and mark.session != self.session and mark.session not in self.sessions:
                mark.gone_since = now
        # The heads of shared locks are looked at before their queues: such a head goes with the next run.
        waited_for = {row.name for row in tables.rows.values() if row.kind in HEADS and row.waiting}
        for row in list(tables.rows.values()):
            heard = (tables.clients.get(ticket.client, now) > now for ticket in tables.tickets.get(row.name, ()))
            if row.waiting and row.expires_at <= now and not any(heard):
                self.queue_is_empty(row.name)
        gone = 0
        # The head of a shared lock comes last: it stays while a share of it has a row.
        for row in sorted(tables.rows.values(), key=lambda row: row.kind in HEADS):
            if row.name in waited_for or not self.is_idle(row, now - idle):
                continue
            gone += 1
            self.observer.reaped(row)
            if row.expires_at > float("-inf"):
                self.record_event(row, "expired", row.expires_at)
            del tables.rows[row.name]
            self.queues.pop(row.name, None)
        self.durable = True
        return gone

    def is_idle(self, row: Row, since: float) -> bool:
        """Return whether a lock has been free since then and has no waiters."""
        return row.expires_at <= since and not row.waiting and row.released_at <= since


def _if_held(until: float, now: float) -> float | None:
    return until if until > now else None


def describe_kind(kind: str | None, head: str | None = None) -> str:
    """Return what a row of distributed_locks is, in words for a message."""
    words = {
        "read-write": "a read-write lock",
        "semaphore": "a semaphore",
        "reader": f"a reader's share of the read-write lock {head!r}",
        "writer": f"the writer's share of the read-write lock {head!r}",
        "permit": f"a permit of the semaphore {head!r}",
    }
    return words.get(kind or "", "a plain lock")
