"""What happened between two looks at the database.

Guarantee: nothing here asks or prints; the same two looks always tell the same. A look is a picture of the locks that
are held or waited for. What was so short that no look has seen it is told only if the database has noted it: leases
that ran out, holders that died, what was forced; these come from the history. The same end is told once, though it
may be seen by a look and be noted later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime

from dblock.admin.inspect import Event, LockState, Waiter

SURE = 0.5
"""Seconds by which clocks and answers may be off when a deadline is compared with the time since a look."""
REMEMBERED = 10_000


@dataclass(frozen=True)
class Refusal:
    """A write that a fence has refused, or only warned of."""

    number: int
    at: datetime
    resource: str
    offered: int | None
    stored: int | None
    who: str | None
    refused: bool


@dataclass(frozen=True)
class Opened:
    """One lock, looked at closely."""

    name: str
    lock: LockState | None
    line: list[Waiter]
    history: list[Event]


@dataclass(frozen=True)
class Look:
    """What one look at the database has seen."""

    at: float
    """By this process's clock, when the answer had come."""
    when: datetime
    locks: list[LockState]
    """Those that are held or waited for."""
    more: bool = False
    """Whether there were more than were asked for."""
    gone: dict[str, LockState] = field(default_factory=dict)
    """What has become of locks that could have been freed or have run out since the look before."""
    history: list[Event] = field(default_factory=list)
    refusals: list[Refusal] | None = None
    """The latest; None where there is no fence, or none that may be looked at."""
    opened: Opened | None = None


@dataclass(frozen=True)
class Happening:
    """Something that happened to a lock, or that a fence refused."""

    at: datetime
    kind: str
    """One of: granted, handed_over, freed, ran_out, died, forced, forced_now, refused, warned."""
    name: str
    """The lock's, or the resource's."""
    token: int | None = None
    holder: str | None = None
    """Whom it befell: the new holder of what was granted, the former of what is over."""
    before: str | None = None
    """The former holder of what was handed over."""
    actor: str | None = None
    reason: str | None = None
    stored: int | None = None
    """The token that was in the way of one that was refused."""


NOTED = {"expired": "ran_out", "died": "died", "forced": "forced", "forced_now": "forced_now"}
"""What of the history is told. Grants and releases, where they are noted at all, are seen by the looks."""


class Fresh:
    """Tells which of numbered notes are new, though they may become visible out of order."""

    def __init__(self, first: Iterable[int]) -> None:
        self._seen = set(first)
        # Whatever is older was there before, and may come to light again when others are deleted.
        self._oldest = max(self._seen, default=0) - 100 if self._seen else 0

    def is_new(self, number: int) -> bool:
        """Tell whether this one was not there before; asked once, it is not new any more."""
        if number <= self._oldest or number in self._seen:
            return False
        self._seen.add(number)
        if len(self._seen) > REMEMBERED:
            self._oldest = max(self._seen) - REMEMBERED // 2
            self._seen = {one for one in self._seen if one > self._oldest}
        return True


class Happenings:
    """Follows looks, and tells what happened from each to the next."""

    def __init__(self, first: Look, fits: Callable[[str], object] = lambda name: True) -> None:
        self.last = first
        self._fits = fits
        self._notes = Fresh(one.number for one in first.history)
        self._refusals: Fresh | None = None
        self._know_refusals(first)
        self._over: dict[tuple[str, int | None], None] = {}
        """The grants that were told to have run out, until the database notes it with the next grant."""

    def follow(self, look: Look) -> list[Happening]:
        """Take in the next look, and return what happened, in order."""
        notes = [one for one in reversed(look.history) if self._notes.is_new(one.number)]
        noted = [told for one in notes if (told := self._told(one))]
        ended = {grant_of(one) for one in noted if one.kind in ("died", "forced_now", "ran_out")}
        before = {lock.name: lock for lock in self.last.locks}
        after = {lock.name: lock for lock in look.locks}
        seen: list[Happening] = []
        for name, was in before.items():
            if (is_now := after.get(name)) is not None:
                seen += self._changed(look, was, is_now, ended)
            elif was.state != "free" and (name, was.token) not in ended and not (look.more or self.last.more):
                seen.append(self._ended(look, was))
        for name, lock in after.items():
            if name not in before and lock.state != "free" and not (look.more or self.last.more):
                seen.append(Happening(look.when, "granted", name, lock.token, lock.holder))
        refused = self._refused(look)
        self.last = look
        return [*noted, *seen, *refused]

    def _changed(
        self, look: Look, was: LockState, is_now: LockState, ended: set[tuple[str, int | None]]
    ) -> list[Happening]:
        if is_now.state != "free" and grant(is_now) != grant(was):
            before = was.holder if was.state != "free" else None
            return [Happening(look.when, "handed_over", is_now.name, is_now.token, is_now.holder, before)]
        if is_now.state == "free" and was.state != "free" and (was.name, was.token) not in ended:
            # Freed, and those who wait have not come yet.
            return [self._ended(look, was, is_now)]
        return []

    def _ended(self, look: Look, was: LockState, found: LockState | None = None) -> Happening:
        found = found or look.gone.get(was.name)
        if found is not None and grant(found) == grant(was):
            ran_out = found.released_at is None
        else:
            ran_out = found is None and is_doubtful(was, self.last.at, look.at)
        if not ran_out:
            return Happening(look.when, "freed", was.name, was.token, was.holder)
        told = Happening(look.when, "ran_out", was.name, was.token, was.holder)
        self._over[grant_of(told)] = None
        if len(self._over) > REMEMBERED:
            del self._over[next(iter(self._over))]
        return told

    def _told(self, event: Event) -> Happening | None:
        told = told_by(event) if self._fits(event.name) else None
        if told is not None and told.kind == "ran_out" and grant_of(told) in self._over:
            del self._over[grant_of(told)]
            return None
        return told

    def _know_refusals(self, look: Look) -> None:
        if self._refusals is None and look.refusals is not None:
            self._refusals = Fresh(one.number for one in look.refusals)

    def _refused(self, look: Look) -> list[Happening]:
        if self._refusals is None or look.refusals is None:
            self._know_refusals(look)
            return []
        return [refused_by(one) for one in reversed(look.refusals) if self._refusals.is_new(one.number)]


def told_by(event: Event) -> Happening | None:
    """Return what a note in the history tells, if it is one that is told."""
    if event.event not in NOTED:
        return None
    return Happening(
        event.at, NOTED[event.event], event.name, event.token, event.holder, actor=event.actor, reason=event.reason
    )


def refused_by(one: Refusal) -> Happening:
    """Return a refusal as something that happened."""
    kind = "refused" if one.refused else "warned"
    return Happening(one.at, kind, one.resource, one.offered, one.who, stored=one.stored)


def grant_of(told: Happening) -> tuple[str, int | None]:
    """Return which grant something happened to."""
    return (told.name, told.token)


def grant(lock: LockState) -> tuple[int | None, datetime | None]:
    """Return what tells one grant of a lock from another: the token, or for one without it when it was made."""
    return (lock.token, lock.granted_at if lock.token is None else None)


def is_doubtful(lock: LockState, seen_at: float, now: float) -> bool:
    """Tell whether a lock that is gone may have run out: before its deadline it can only have been freed."""
    return lock.remaining <= now - seen_at + SURE


def doubtful(before: Look, locks: list[LockState], now: float, most: int = 20) -> list[str]:
    """Return the names of locks that are gone and of which only the database can tell how they ended."""
    there = {lock.name for lock in locks}
    gone = [lock for lock in before.locks if lock.name not in there and lock.state != "free"]
    return [lock.name for lock in gone if is_doubtful(lock, before.at, now)][:most]
