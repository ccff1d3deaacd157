"""The database in memory: definitions of schedules, and which slots they have. Moments are whole microseconds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from dblock.testing.database.tables import Schedule

SECOND = 1_000_000
MINUTE = 60 * SECOND
NEVER = -(1 << 62)
"""A moment before all others."""

FAR_OFF = 36_525 * 86_400 * SECOND
"""How far ahead a plan may reach."""

MOST_PLANNED = 100_000


class Definition(NamedTuple):
    """What a caller says about a schedule."""

    name: str
    kind: str
    period: int
    """0 for a cron expression."""
    catch_up: str
    delivery: str
    grace: int | None
    overlap: str = "skip"
    at_least: int | None = None
    expression: str | None = None
    zone: str | None = None

    def same_slots(self, other: Definition) -> bool:
        """Return whether two definitions have the same slots."""
        mine, theirs = ((one.kind, one.period, one.expression, one.zone) for one in (self, other))
        return mine == theirs


def definition(s: Schedule) -> Definition:
    """Return the definition that a schedule has."""
    return Definition(*(getattr(s, name) for name in Definition._fields))


class Slots(NamedTuple):
    """How many slots lie in a part of time, and the first and last of them."""

    slots: int
    first: int | None = None
    last: int | None = None


def slots_between(s: Schedule, after: int, until: int) -> Slots:
    if s.kind == "every":
        low, high = after // s.period + 1, until // s.period
        return Slots(high - low + 1, low * s.period, high * s.period) if high >= low else Slots(0)
    if s.kind == "cron":
        low, high = bisect_right(s.upcoming, after), bisect_right(s.upcoming, until)
        return Slots(high - low, s.upcoming[low], s.upcoming[high - 1]) if high > low else Slots(0)
    first = s.since if s.last_ended_at is None else max(s.last_ended_at + s.period, s.since)
    return Slots(1, first, first) if after < first <= until else Slots(0)


def undecided_after(s: Schedule) -> int:
    return max(NEVER if s.decided_until is None else s.decided_until, s.since - 1)


def slot_after(s: Schedule, after: int) -> int | None:
    return slots_between(s, after, after + s.period if s.kind == "every" else -NEVER).first


def slot_grace(s: Schedule, slot: int = 0) -> int:
    if s.grace is not None:
        return s.grace
    following = slot + s.period if s.period else slot_after(s, slot)
    return 10 * MINUTE if following is None else min((following - slot) // 2, 10 * MINUTE)


def free_again_at(s: Schedule) -> int | None:
    """Return when the next run may start, `at_least` after the last start."""
    return None if s.last_claimed_at is None or s.at_least is None else s.last_claimed_at + s.at_least


def plan_suffices(s: Schedule, moment: int) -> bool:
    return s.kind != "cron" or len(s.upcoming) - bisect_right(s.upcoming, moment) >= 2


def extend_plan(s: Schedule, plan: Iterable[int], asked_at: int) -> None:
    planned_until = NEVER if s.planned_until is None else s.planned_until
    known = {slot for slot in s.upcoming if slot > undecided_after(s)}
    new = {slot for slot in plan if planned_until < slot < asked_at + FAR_OFF}
    s.upcoming = sorted(known | new)[:MOST_PLANNED]
    s.planned_until = latest(s.planned_until, *s.upcoming[-1:])


def run_lock(s: Schedule, slot: int) -> str:
    if s.overlap != "allow":
        return f"once:{s.name}"
    moment = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=slot)
    return f"once:{s.name}@{moment:%Y-%m-%dT%H:%M:%S.%fZ}"


def latest(*moments: int | None) -> int | None:
    """Return the latest of the moments that are known."""
    return max((moment for moment in moments if moment is not None), default=None)
