"""Execute the statements of dblock._core.slots on the store."""

from __future__ import annotations

from collections.abc import Callable

from dblock._core.effects import Row
from dblock.testing.database.columns import UnknownStatement, number, seconds, text
from dblock.testing.database.schedules.store import SECOND, Definition, Schedules

Args = tuple["str | None", ...]


def _claim(schedules: Schedules, args: Args) -> Row:
    name, every, cron, zone, delay, catch_up, overlap, delivery, grace, at_least = args[:10]
    ttl, holder, attempt, presence, plan, plan_from = args[10:]
    if (cron, zone, overlap, at_least, plan, plan_from) != (None, None, "skip", None, None, None):
        raise UnknownStatement("schedules with cron, at_least, or an overlap other than skip")
    wanted = Definition(
        text(name),
        "delay" if every is None else "every",
        _microseconds(delay if every is None else every),
        text(catch_up),
        text(delivery),
        None if grace is None else _microseconds(grace),
    )
    reply = schedules.claim_slot(wanted, seconds(ttl), holder, attempt, presence)
    return (
        reply.decision,
        reply.lock,
        number(reply.token),
        number(reply.expires_at),
        number(reply.remaining),
        number(reply.number),
        number(reply.wait),
        number(reply.slot),
        number(reply.asked_at),
        None,
    )


def _end(schedules: Schedules, args: Args) -> Row:
    name, token, outcome, _, _ = args
    return (schedules.end_slot(text(name), int(text(token)), text(outcome)),)


def _microseconds(interval: str | None) -> int:
    return round(seconds(interval) * SECOND)


FUNCTIONS: dict[str, Callable[[Schedules, Args], Row]] = {"claim_slot": _claim, "end_slot": _end}
