"""Work out what changed between two snapshots of the database.

Guarantee: nothing here queries or prints, and the same two snapshots always give the same changes. A snapshot holds the
locks that are held or waited for. A change that was too short for any snapshot is reported only if the database
recorded it in the history: expired leases, dead holders, forced releases. The same end of a grant is reported once,
although a snapshot may show it first and the history record it later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime

from dblock.admin.inspect import Event, LockState, Waiter

CLOCK_TOLERANCE = 0.5
"""Seconds by which clocks and replies may be off when a deadline is compared with the time since a snapshot."""
MAX_REMEMBERED = 10_000


@dataclass(frozen=True)
class Refusal:
    """A write that a fence has refused, or that a fence would refuse if it did more than warn."""

    number: int
    at: datetime
    resource: str
    offered: int | None
    stored: int | None
    writer: str | None
    refused: bool


@dataclass(frozen=True)
class LockDetail:
    """One lock with its queue and history."""

    name: str
    lock: LockState | None
    queue: list[Waiter]
    history: list[Event]
    shares: list[LockState] = field(default_factory=list)
    """The shares of a read-write lock or a semaphore that are held."""


@dataclass(frozen=True)
class Snapshot:
    """The state of the database at one poll."""

    at: float
    """This process's monotonic clock when the reply had arrived."""
    when: datetime
    locks: list[LockState]
    """The locks that are held or waited for."""
    more: bool = False
    """Whether there were more locks than the poll asked for."""
    gone: dict[str, LockState] = field(default_factory=dict)
    """The present state of locks that were held in the snapshot before and may have been freed or have expired."""
    history: list[Event] = field(default_factory=list)
    refusals: list[Refusal] | None = None
    """The latest refusals; None if there is no fence, or none that this role may see."""
    opened: LockDetail | None = None


@dataclass(frozen=True)
class Change:
    """A change of a lock, or a write that a fence refused."""

    at: datetime
    kind: str
    """One of: granted, handed_over, freed, expired, died, forced, forced_now, refused, warned."""
    name: str
    """The name of the lock or of the resource."""
    token: int | None = None
    holder: str | None = None
    """The new holder of a lock that was granted, or the former holder of one that ended."""
    before: str | None = None
    """The former holder of a lock that was handed over."""
    actor: str | None = None
    reason: str | None = None
    stored: int | None = None
    """The token because of which a write was refused."""


CHANGE_KINDS = {"expired": "expired", "died": "died", "forced": "forced", "forced_now": "forced_now"}
"""Events of the history that are reported. Recorded grants and releases are not: the snapshots show them."""


class NewNumbers:
    """Recognises new records by their number, although records may become visible out of order."""

    def __init__(self, first: Iterable[int]) -> None:
        self._seen = set(first)
        # Older records existed before the first snapshot. They reappear when newer records are deleted.
        self._oldest = max(self._seen, default=0) - 100 if self._seen else 0

    def is_new(self, number: int) -> bool:
        """Return whether this number is new. The next call with the same number returns False."""
        if number <= self._oldest or number in self._seen:
            return False
        self._seen.add(number)
        if len(self._seen) > MAX_REMEMBERED:
            self._oldest = max(self._seen) - MAX_REMEMBERED // 2
            self._seen = {seen for seen in self._seen if seen > self._oldest}
        return True


class ChangeTracker:
    """Compares each snapshot with the one before."""

    def __init__(self, first: Snapshot, matches: Callable[[str], object] = lambda name: True) -> None:
        self.last = first
        self._matches = matches
        self._event_numbers = NewNumbers(event.number for event in first.history)
        self._refusal_numbers: NewNumbers | None = None
        self._remember_refusals(first)
        self._reported_expired: dict[tuple[str, int | None], None] = {}
        """Grants that were reported as expired, until the database records that with the next grant."""

    def update(self, snapshot: Snapshot) -> list[Change]:
        """Compare the next snapshot with the last one, and return the changes in order."""
        events = [event for event in reversed(snapshot.history) if self._event_numbers.is_new(event.number)]
        recorded = [change for event in events if (change := self._recorded_change(event))]
        ended_grants = {grant_key(change) for change in recorded if change.kind in ("died", "forced_now", "expired")}
        # A grant of a read-write lock or a semaphore is a change of a share.
        before = {lock.name: lock for lock in self.last.locks if lock.held is None}
        after = {lock.name: lock for lock in snapshot.locks if lock.held is None}
        incomplete = snapshot.more or self.last.more
        observed: list[Change] = []
        for name, was in before.items():
            if (is_now := after.get(name)) is not None:
                observed += self._lock_changes(snapshot, was, is_now, ended_grants)
            elif was.state != "free" and (name, was.token) not in ended_grants and not incomplete:
                observed.append(self._end_of_grant(snapshot, was))
        for name, lock in after.items():
            if name not in before and lock.state != "free" and not incomplete:
                observed.append(Change(snapshot.when, "granted", name, lock.token, lock.holder))
        refused = self._new_refusals(snapshot)
        self.last = snapshot
        return [*recorded, *observed, *refused]

    def _lock_changes(
        self, snapshot: Snapshot, was: LockState, is_now: LockState, ended_grants: set[tuple[str, int | None]]
    ) -> list[Change]:
        if is_now.state != "free" and grant_id(is_now) != grant_id(was):
            before = was.holder if was.state != "free" else None
            return [Change(snapshot.when, "handed_over", is_now.name, is_now.token, is_now.holder, before)]
        if is_now.state == "free" and was.state != "free" and (was.name, was.token) not in ended_grants:
            # The lock was freed, and no waiter has claimed it yet.
            return [self._end_of_grant(snapshot, was, is_now)]
        return []

    def _end_of_grant(self, snapshot: Snapshot, was: LockState, found: LockState | None = None) -> Change:
        found = found or snapshot.gone.get(was.name)
        if found is not None and grant_id(found) == grant_id(was):
            expired = found.released_at is None
        else:
            expired = found is None and may_have_expired(was, self.last.at, snapshot.at)
        if not expired:
            return Change(snapshot.when, "freed", was.name, was.token, was.holder)
        change = Change(snapshot.when, "expired", was.name, was.token, was.holder)
        self._reported_expired[grant_key(change)] = None
        if len(self._reported_expired) > MAX_REMEMBERED:
            del self._reported_expired[next(iter(self._reported_expired))]
        return change

    def _recorded_change(self, event: Event) -> Change | None:
        change = change_from_event(event) if self._matches(event.name) else None
        if change is not None and change.kind == "expired" and grant_key(change) in self._reported_expired:
            del self._reported_expired[grant_key(change)]
            return None
        return change

    def _remember_refusals(self, snapshot: Snapshot) -> None:
        if self._refusal_numbers is None and snapshot.refusals is not None:
            self._refusal_numbers = NewNumbers(refusal.number for refusal in snapshot.refusals)

    def _new_refusals(self, snapshot: Snapshot) -> list[Change]:
        if self._refusal_numbers is None or snapshot.refusals is None:
            self._remember_refusals(snapshot)
            return []
        newest_last = reversed(snapshot.refusals)
        return [change_from_refusal(refusal) for refusal in newest_last if self._refusal_numbers.is_new(refusal.number)]


def change_from_event(event: Event) -> Change | None:
    """Return an event of the history as a change; None if that kind of event is not reported."""
    if event.event not in CHANGE_KINDS:
        return None
    kind = CHANGE_KINDS[event.event]
    return Change(event.at, kind, event.name, event.token, event.holder, actor=event.actor, reason=event.reason)


def change_from_refusal(refusal: Refusal) -> Change:
    """Return a refusal as a change."""
    kind = "refused" if refusal.refused else "warned"
    return Change(refusal.at, kind, refusal.resource, refusal.offered, refusal.writer, stored=refusal.stored)


def grant_key(change: Change) -> tuple[str, int | None]:
    """Return the lock name and token of the grant that changed."""
    return (change.name, change.token)


def grant_id(lock: LockState) -> tuple[int | None, datetime | None]:
    """Return what distinguishes two grants of a lock: the token, or the time of a grant without a token."""
    return (lock.token, lock.granted_at if lock.token is None else None)


def may_have_expired(lock: LockState, seen_at: float, now: float) -> bool:
    """Return whether a grant that has ended may have expired: before its deadline it can only have been freed."""
    return lock.remaining <= now - seen_at + CLOCK_TOLERANCE


def possibly_expired(before: Snapshot, locks: list[LockState], now: float, limit: int = 20) -> list[str]:
    """Return the names of locks that are gone and may have expired; only the database knows how they ended."""
    present = {lock.name for lock in locks}
    gone = [lock for lock in before.locks if lock.name not in present and lock.state != "free" and lock.held is None]
    return [lock.name for lock in gone if may_have_expired(lock, before.at, now)][:limit]
