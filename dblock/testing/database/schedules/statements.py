"""Execute the statements of dblock._core.slots on the store."""

from __future__ import annotations

from collections.abc import Callable

from dblock._core.effects import Row
from dblock.testing.database.columns import boolean, items, number, seconds, text
from dblock.testing.database.schedules.slots import SECOND, Definition
from dblock.testing.database.schedules.store import Schedules

Args = tuple["str | None", ...]


def _claim(schedules: Schedules, args: Args) -> Row:
    name, every, cron, zone, delay, catch_up, overlap, delivery, grace, at_least = args[:10]
    ttl, holder, attempt, presence, plan, plan_from = args[10:]
    kind = "every" if every is not None else "delay" if delay is not None else "cron"
    wanted = Definition(
        text(name),
        kind,
        _microseconds(every or delay) or 0,
        text(catch_up),
        text(delivery),
        _microseconds(grace),
        text(overlap),
        _microseconds(at_least),
        cron,
        zone,
    )
    planned = () if plan is None else [int(slot) * SECOND for slot in items(plan)]
    reply = schedules.claim_slot(
        wanted, seconds(ttl), holder, attempt, presence, planned, None if plan_from is None else int(plan_from)
    )
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
        number(reply.planned_until),
    )


def _end(schedules: Schedules, args: Args) -> Row:
    name, token, outcome, exit_code, error = args
    recorded = schedules.end_slot(text(name), int(text(token)), text(outcome))
    for run in schedules.ledger(text(name)) if recorded is not None else ():
        if run.token == int(text(token)) and run.error is None:
            run.exit_code, run.error = None if exit_code is None else int(exit_code), error
    return (recorded,)


def _outcome(schedules: Schedules, args: Args) -> Row | None:
    found = schedules.slot_outcome(text(args[0]), int(text(args[1])))
    if found is None:
        return None
    run, alive = found
    return run.outcome, number(run.exit_code), run.error, boolean(alive)


def _microseconds(interval: str | None) -> int | None:
    return None if interval is None else round(seconds(interval) * SECOND)


FUNCTIONS: dict[str, Callable[[Schedules, Args], Row | None]] = {
    "claim_slot": _claim,
    "end_slot": _end,
    "slot_outcome": _outcome,
}
