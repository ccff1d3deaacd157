"""What must hold at every step of every run.

The checks keep their own record of what was granted, extended and freed. They do not rely on the store.

| check | what it finds |
|---|---|
| token order | a grant whose token is not higher than all before it of that lock |
| one holder | a grant of a lock that another holder has |
| one believer | two processes that may both trust their leases of one lock at one instant |
| trust | a lease that is trusted although the database does not hold the lock for it, or for longer than it does |
| exact grant | a release, renewal or loss that touches another grant than its own, or brings one back |
| told | a release that reports success for a lease that was lost before |
| fair | a grant past a live waiter in the queue, or a ticket taken from a live waiter |
| fence | a write that is accepted below one accepted or claimed before; or the holder's own refused |
| handed over | a free lock that has a waiter for longer than the hand-over may take |
| served | a waiter that waits forever |
| ghosts | a ticket without a waiter that is never removed |
| unexpected | an error that a loop of the client logged and survived |
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from dblock._core.lease_state import LeaseState
from dblock._core.options import LockOptions
from dblock.testing.database.tables import Row, Ticket
from tests.robustness.simulation.client import Client
from tests.robustness.simulation.database import Database
from tests.robustness.simulation.world import Violation, World, short

WOKEN_WITHIN = 0.3
"""Seconds within which a release hands the lock over, if the next waiter can be woken and nothing is in the way."""

GHOSTS_WITHIN = 5.0
"""The same where a ticket without a waiter is ahead, which its client must notice first."""

HEARD_LATELY = 2.0
"""Seconds for which a client counts as alive at least after a heartbeat."""

FOUND_WITHIN = 1.6
"""The same where the waiter must find out by itself: one check a second, and the time for some calls."""


class Checks:
    """Observes every step, and raises a Violation."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.database: Database
        self.clients: dict[str, Client] = {}
        """By the IDs under which the database knows them."""
        self.grants = 0
        self.handed_over = 0
        self.slowest = 0.0
        """The longest that a lock with a waiter was free in calm weather."""
        self.counts: dict[str, int] = {}
        """What a recipe did, by kind."""
        self.calm = False
        self._options: dict[str, LockOptions] = {}
        self._highest: dict[str, int] = {}
        self._held: dict[str, tuple[int, float]] = {}
        self._granted_at: dict[str, float] = {}
        self._states: list[tuple[Client, LeaseState]] = []
        self._excused: set[int] = set()
        self._endings: dict[int, tuple[str, float]] = {}
        self._redeemed: Ticket | None = None
        self._ended: dict[int, float] = {}
        self._heard: dict[str, float] = {}
        self._written: dict[str, tuple[int, int]] = {}
        self._claims_seen = 0
        self._refused: set[str] = set()
        self._crashed_at = -1.0
        self._free_since: dict[str, float] = {}
        self._woken: dict[str, bool] = {}

    # What a process does.

    def asks(self, attempt: str, options: LockOptions) -> None:
        """Record the options of an attempt."""
        self._options[attempt] = options

    def refused(self, attempt: str) -> None:
        """Check that a request whose error says that nothing was done has been granted nothing, and never will be."""
        self._refused.add(attempt)
        for row in self.database.store.tables.rows.values():
            if row.attempt == attempt and row.expires_at > self.world.now:
                raise Violation("undone", f"{row.name}: {short(attempt)} takes its request for refused, and has {row}")

    def holds(self, client: Client, state: LeaseState) -> None:
        """Record a lease that a process holds."""
        self._states.append((client, state))

    def released(self, client: Client, state: LeaseState, since: float) -> None:
        """Check that a lease that its holder takes for released was released, and not taken from the holder before.

        What happened to the lease after its holder began to release it is no loss: nothing relied on it any more.
        """
        how, at = self._endings.get(state.token, ("ended by itself", -math.inf))
        if how not in ("released", "abandoned") and at < since and not self._is_excused(client, state):
            raise Violation("told", f"{client.name} takes {state.name} under {state.token} for released, but it {how}")

    def count(self, kind: str) -> None:
        """Count what a recipe did."""
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def each(self) -> None:
        """Check every trusted lease, after every step."""
        if not self._states:
            return
        over = False
        now, rows = self.world.now, self.database.store.tables.rows
        for client, state in self._states:
            if client.dead or state.over or state.loss is not None or client.clock() >= state.trusted_until:
                over = True
                continue
            row = rows.get(state.name)
            if row is not None and row.token == state.token and row.expires_at > now:
                if client.when(state.trusted_until) > row.expires_at + 1e-6 and not self._is_excused(client, state):
                    raise Violation("trust", f"{client.name} believes in {state.name} for longer than it is {row}")
                continue
            if not self._is_excused(client, state) and believes(client, state):
                self._untrue(client, state)
        if over:
            self._states = [
                one
                for one in self._states
                if not (one[0].dead or one[1].over or one[1].loss or one[0].clock() >= one[1].trusted_until)
            ]

    def _untrue(self, client: Client, state: LeaseState) -> None:
        """Raise the Violation for a lease that is trusted wrongly."""
        for other, others in self._states:
            if others.name != state.name or others is state or other.dead or self._is_excused(other, others):
                continue
            if believes(other, others):
                both = f"{client.name} believes in token {state.token} and {other.name} in {others.token}"
                raise Violation("one believer", f"{state.name}: {both}")
        row = self.database.store.tables.rows.get(state.name)
        raise Violation("trust", f"{client.name} believes in {state.name} under {state.token}, but it is {row}")

    def _is_excused(self, client: Client, state: LeaseState) -> bool:
        """Return whether dblock promises nothing: forced at once, or forgotten by a standby or without durability."""
        if state.token in self._excused:
            return True
        forgotten = max(self.database.promoted_at, self._crashed_at if state.token < 0 else -1.0)
        return forgotten >= 0 and client.when(state.sent_at) <= forgotten

    # What the database does.

    def granted(self, row: Row, ticket: int | None, fair: bool) -> None:
        now, name = self.world.now, row.name
        self.grants += 1
        if row.attempt in self._refused:
            raise Violation("undone", f"{name}: granted to {short(row.attempt)}, which was told that it is refused")
        before = self._held.get(name)
        if before is not None and before[1] > now:
            raise Violation("one holder", f"{name}: granted under {row.token} while {before[0]} lasts")
        if row.token > 0:
            if row.token <= self._highest.get(name, 0):
                raise Violation("token order", f"{name}: {row.token} granted after {self._highest[name]}")
            self._highest[name] = row.token
        self._held[name] = (row.token, row.expires_at)
        self._granted_at[name] = now
        options = self._options.get(row.attempt or "")
        if options is None or options.fair:
            self._check_turn(row, ticket)
        free_since = self._free_since.pop(name, None)
        if self.calm and free_since is not None and ticket is not None:
            self.handed_over += 1
            self.slowest = max(self.slowest, now - free_since)

    def _check_turn(self, row: Row, ticket: int | None) -> None:
        line = self.database.store.tables.tickets.get(row.name, [])
        own = next((one.number for one in line if one.attempt == row.attempt), float("inf"))
        if ticket is not None:
            redeemed, self._redeemed = self._redeemed, None
            if redeemed is None or (redeemed.name, redeemed.number, redeemed.attempt) != (
                row.name,
                ticket,
                row.attempt,
            ):
                raise Violation("fair", f"{row.name}: {short(row.attempt)} redeems {ticket}, which is not there")
            own = ticket
        for one in line:
            if one.number < own and one.attempt != row.attempt and self._is_alive(one):
                raise Violation("fair", f"{row.name}: granted to {short(row.attempt)} past {short(one.attempt)}")

    def _is_alive(self, ticket: Ticket) -> bool:
        """Return whether its client is known to be alive: a recent heartbeat, and no session known to be lost."""
        store = self.database.store
        if self._heard.get(ticket.client, -HEARD_LATELY) + HEARD_LATELY <= self.world.now:
            return False
        mark = store.marks.get(ticket.presence or "")
        return mark is None or mark.incarnation != store.incarnation or mark.session in store.sessions

    def extended(self, row: Row, token: int, before: float) -> None:
        if token != row.token or before <= self.world.now or row.forced_at is not None:
            raise Violation("exact grant", f"{row.name}: {token} renewed, which had ended or is another's: {row}")
        if row.expires_at < before:
            raise Violation("exact grant", f"{row.name}: a renewal of {token} brings its end nearer")
        self._held[row.name] = (token, row.expires_at)

    def freed(self, row: Row, why: str, by: int | str | None) -> None:
        now, name = self.world.now, row.name
        named = {"released": row.token, "forced_now": row.token, "abandoned": row.attempt, "died": row.presence}
        named["downgraded"] = row.token
        if by != named[why] or row.expires_at <= now:
            raise Violation("exact grant", f"{name}: {why} by {by}, but it is {row}")
        if why == "died":
            mark = self.database.store.marks[str(by)]
            if mark.session in self.database.store.sessions or self._ended.get(mark.session, now) + mark.grace > now:
                raise Violation("exact grant", f"{name}: taken from {short(row.attempt)} as if it were dead")
        if why == "forced_now":
            self._excused.add(row.token)
        self._endings[row.token] = why, self.world.now
        self._held.pop(name, None)
        self._free_since[name] = now
        self._woken[name] = why in ("released", "abandoned")

    def removed(self, ticket: Ticket, why: str) -> None:
        if why == "redeemed":
            self._redeemed = ticket
            return
        if why in ("dead", "reaped") and self._is_alive(ticket):
            raise Violation("fair", f"{ticket.name}: {short(ticket.attempt)} lives, and loses its place ({why})")
        if ticket.name in self._free_since:
            self._free_since[ticket.name] = self.world.now

    def reaped(self, row: Row) -> None:
        if row.expires_at > self.world.now or any(map(self._is_alive, self._line(row.name))):
            raise Violation("exact grant", f"{row.name}: the reaper takes what is in use: {row}")

    def heard(self, client: str) -> None:
        self._heard[client] = self.world.now

    def session_ended(self, session: int) -> None:
        """Record when a session ended."""
        self._ended.setdefault(session, self.world.now)

    def database_replaced(self) -> None:
        """Record that the database has forgotten something, and its state now."""
        self._crashed_at = self.world.now
        self._held = {row.name: (row.token, row.expires_at) for row in self.database.store.tables.rows.values()}
        self._free_since.clear()
        self._heard.clear()

    # The resource.

    def written(self, resource: str, token: int, number: int, accepted: bool) -> None:
        """Look at what became of a write."""
        for claimed, at in self.database.fence.claimed[self._claims_seen :]:
            self._written[claimed] = max(self._written.get(claimed, (0, 0)), (at, 0))
        self._claims_seen = len(self.database.fence.claimed)
        highest = self._written.get(resource, (0, 0))
        if accepted:
            if (token, number) <= highest:
                raise Violation("fence", f"{resource}: write {number} under {token} accepted after {highest}")
            self._written[resource] = (token, number)
        elif highest[0] < token or highest[0] > max(self._highest.values(), default=0):
            raise Violation("fence", f"{resource}: write {number} under {token} refused, and nothing is newer")
        else:
            name = resource.removeprefix("behind ")
            held = self._held.get(name)
            # What a standby takes up again was perhaps released, and granted to others, where it did not see it.
            known = self._granted_at.get(name, -1.0) > self.database.promoted_at
            if known and held is not None and held[0] == token and held[1] > self.world.now and highest[0] > token:
                raise Violation("fence", f"{resource}: the holder's write under {token} refused after {highest}")

    # What must happen in the end.

    def tick(self) -> None:
        """Find locks that are free and have waiters for too long. In calm weather only."""
        now = self.world.now
        for row in list(self.database.store.tables.rows.values()):
            alive = [one for one in self._line(row.name) if self._is_alive(one)]
            # A message that was overtaken may have left a ticket without a waiter, for a while.
            real = [one for one in alive if one.attempt in self.clients[one.client].waiters._waiters]
            if row.expires_at > now or not real:
                self._free_since.pop(row.name, None)
                continue
            first, client = real[0], self.clients[real[0].client]
            since = max(self._free_since.setdefault(row.name, now), first.since)
            most = FOUND_WITHIN
            if first is not alive[0]:
                most = GHOSTS_WITHIN
            elif self._woken.get(row.name) and client.waiters.notifications_work:
                most = WOKEN_WITHIN
            if now - since > most:
                raise Violation(
                    "handed over",
                    f"{row.name}: free since {since:.3f}, and {short(first.attempt)} of {client.name} waits",
                )

    def _line(self, name: str) -> list[Ticket]:
        return self.database.store.tables.tickets.get(name, [])

    def ghosts(self) -> Iterator[Ticket]:
        """Return the tickets that are left when there are no waiters any more."""
        for line in self.database.store.tables.tickets.values():
            yield from line


def believes(client: Client, state: LeaseState) -> bool:
    """Return whether a process that checked its lease now would find it held. Change nothing."""
    now = client.clock()
    if state.over or state.left or state.loss is not None or now >= state.trusted_until:
        return False
    presence = state.presence
    if presence is None:
        return True
    looked_at = presence.seen_open_at
    stands = presence.stands(now)
    presence.seen_open_at = looked_at
    return stands
