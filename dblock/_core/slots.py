"""Schedules: what a schedule is, and the flows that claim a slot and report its end.

The database decides which slot runs, by its own clock, in one call that also grants the lock of the run. This process
computes the slots of a cron expression when the database asks for them. The database stores them as the plan that all
hosts share.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Final, NamedTuple

from dblock._core.acquire import TRUST, LockFlows
from dblock._core.effects import Call, Flow, Sleep
from dblock._core.lease_flows import LeaseFlows
from dblock._core.lease_state import LeaseState
from dblock._core.options import (
    DEFAULT_TTL,
    TTL_MAX,
    TTL_MIN,
    Seconds,
    brief,
    check_seconds,
    interval,
    is_text,
)
from dblock._core.replies import Grant, array
from dblock.errors import DblockError, InvalidArgument, Unavailable

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

NAME_BYTES = 400
PERIOD_MIN, PERIOD_MAX = 0.1, 366 * 86_400.0
GRACE_MAX = 366 * 86_400.0
CATCH_UP = ("none", "latest", "all")
OVERLAP = ("skip", "queue", "allow")
DELIVERY = ("at-most-once", "at-least-once")

QUEUE_POLL = 0.1
"""Seconds between two calls of a host whose slot is queued behind a run. There is one such host for each schedule."""

RETRY_END = 0.5
"""Seconds between two tries to report the end of a run to a database that does not reply."""

Plan = Callable[[datetime, datetime], Sequence[int]]
"""Returns slots of a cron expression, as seconds since 1970: those after the first moment, some beyond the second."""


class Skipped(enum.Enum):
    """The result of a call that did not run its function: no slot was due, another host has it, or a lock was held."""

    SKIPPED = "skipped"

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "dblock.SKIPPED"

    __str__ = __repr__


SKIPPED: Final = Skipped.SKIPPED


@dataclass(frozen=True)
class Definition:
    """A schedule's name and options, checked."""

    name: str
    every: float | None
    cron: str | None
    tz: str | None
    delay: float | None
    catch_up: str
    overlap: str
    delivery: str
    grace: float | None
    at_least: float | None
    at_most: float | None
    ttl: float
    plan: Plan | None = field(default=None, compare=False)
    """Computes the slots of the cron expression."""

    @property
    def stands_by(self) -> bool:
        """Whether another host runs a slot again whose runner died."""
        return self.delivery == "at-least-once"

    @property
    def keep_alive(self) -> bool:
        """Whether the lease of a run is renewed: not if it ends at a fixed time."""
        return self.at_most is None


def check_definition(
    name: str,
    *,
    every: Seconds | None = None,
    cron: str | None = None,
    tz: str | None = None,
    delay: Seconds | None = None,
    catch_up: str = "none",
    overlap: str = "skip",
    delivery: str = "at-most-once",
    grace: Seconds | None = None,
    at_least: Seconds | None = None,
    at_most: Seconds | None = None,
    ttl: Seconds = DEFAULT_TTL,
    planner: Callable[[str, str, str], Plan],
) -> Definition:
    """Check all options against their limits, or raise InvalidArgument that names the bad one.

    `planner` checks a cron expression and its time zone, and returns what computes its slots.
    """
    if callable(name):
        raise InvalidArgument('The decorator needs a name and a schedule. Write @client.once("NAME", every=…).')
    if not is_text(name) or not 1 <= len(name.encode()) <= NAME_BYTES:
        raise InvalidArgument(f"A schedule's name is text of 1 to {NAME_BYTES} bytes without NUL; got {brief(name)}.")
    given = [option for option in (every, cron, delay) if option is not None]
    if len(given) != 1:
        raise InvalidArgument(
            f"Schedule {name!a:.80} takes exactly one of every=, cron= and delay=; {len(given)} were given."
        )
    if tz is not None and cron is None:
        raise InvalidArgument(
            f"Schedule {name!a:.80} has a time zone and no cron expression. Give tz only together with cron."
        )
    for option, value, allowed in (
        ("catch_up", catch_up, CATCH_UP),
        ("overlap", overlap, OVERLAP),
        ("delivery", delivery, DELIVERY),
    ):
        if value not in allowed:
            raise InvalidArgument(
                f"{option} of schedule {name!a:.80} is one of {', '.join(allowed)}; got {brief(value)}."
            )
    if overlap == "allow" and at_least is not None:
        raise InvalidArgument(f"Schedule {name!a:.80} lets its runs overlap, so it cannot have an at_least.")
    lease = ttl if at_most is None else at_most
    zone = "UTC" if tz is None else tz
    return Definition(
        name,
        _within(name, "every", every, PERIOD_MIN, PERIOD_MAX),
        cron,
        None if cron is None else zone,
        _within(name, "delay", delay, PERIOD_MIN, PERIOD_MAX),
        catch_up,
        overlap,
        delivery,
        _within(name, "grace", grace, 0, GRACE_MAX),
        _within(name, "at_least", at_least, 0, 86_400),
        _within(name, "at_most", at_most, TTL_MIN, TTL_MAX),
        _within(name, "ttl", lease, TTL_MIN, TTL_MAX) or DEFAULT_TTL,
        None if cron is None else planner(name, cron, zone),
    )


def _within(name: str, option: str, value: Seconds | None, least: float, most: float) -> float | None:
    if value is None:
        return None
    seconds = check_seconds(f"{option} of schedule {name!a:.80}", value)
    if not least <= seconds <= most:
        raise InvalidArgument(
            f"{option} of schedule {name!a:.80} lies between {least:g} s and {_limit(most)}; got {seconds:g} s."
        )
    return seconds


def _limit(seconds: float) -> str:
    return f"{seconds / 86_400:g} days" if seconds > 86_400 else f"{seconds / 3600:g} h"


class Claim(NamedTuple):
    """The reply to a claim."""

    decision: str
    """One of: run, queued, running, skipped, paused, none."""
    grant: Grant | None
    slot: datetime | None
    """The slot to run, or else the newest one that is decided."""
    number: int
    """Which run of the slot it is: more than 1 if a runner died."""
    wait: float
    """Seconds after which another claim may find something else."""


class SlotOutcome(NamedTuple):
    """What the ledger knows about a slot."""

    outcome: str | None
    """None while the slot runs. One of: succeeded, failed, died, queued, skipped, missed."""
    exit_code: int | None
    error: str | None
    alive: bool


class SlotFlows:
    """The flows of one schedule."""

    def __init__(self, service: LockFlows, definition: Definition) -> None:
        self._flows = service
        self.definition = definition

    def claim(self, attempt: str) -> Flow[Claim]:
        """Ask which slot to run. If the slot is queued behind an active run, wait for the end of that run."""
        while True:
            claim = yield from self.claim_now(attempt)
            if claim.decision != "queued":
                return claim
            yield Sleep(QUEUE_POLL)

    def claim_now(self, attempt: str) -> Flow[Claim]:
        """Ask which slot to run, and compute the next slots of a cron expression if the database needs them."""
        plan: str | None = None
        plan_from: str | None = None
        while True:
            sent_at = self._flows.clock()
            presence = self._flows._valid_presence(sent_at)
            one = self.definition
            row = yield Call(
                self._flows.statements.claim_slot,
                (
                    one.name,
                    _interval(one.every),
                    one.cron,
                    one.tz,
                    _interval(one.delay),
                    one.catch_up,
                    one.overlap,
                    one.delivery,
                    _interval(one.grace),
                    _interval(one.at_least),
                    interval(one.ttl),
                    self._flows.holder_name(),
                    attempt,
                    presence.name if presence else None,
                    plan,
                    plan_from,
                ),
            )
            decision, lock, token, expires_at, remaining, number, wait, slot, asked_at, planned_until = row
            if decision != "plan" or one.plan is None:
                break
            plan = array(map(str, one.plan(_moment(planned_until), _moment(asked_at))))
            plan_from = planned_until
        grant: Grant | None = None
        if decision == "run":
            left = float(remaining)
            grant = Grant(lock, int(token), float(expires_at), sent_at + left * TRUST, sent_at, presence)
            grant = yield from self._flows._in_time(grant)
            if grant is None:
                # The reply took longer than the lease. The run is over before it has begun.
                decision = "none"
        return Claim(
            decision,
            grant,
            None if slot is None else _moment(slot),
            int(number or 0),
            math.inf if wait is None else max(float(wait), 0.0),
        )

    def end(
        self, state: LeaseState, outcome: str, exit_code: int | None = None, error: str | None = None
    ) -> Flow[str | None]:
        """Report how a run ended, and release its lock. The result is None if the lease was lost before.

        While the database does not reply, the report is retried until the lease is lost.
        """
        code = None if exit_code is None else str(exit_code)
        args = (
            self.definition.name,
            str(state.token),
            outcome,
            code,
            None if error is None else error.replace("\0", "?"),
        )
        # Not believed from the first report on, which may have released the lock although its reply was lost. The lease
        # is still renewed.
        may_be_done = False
        with state.leaving():
            while True:
                try:
                    (recorded,) = yield Call(self._flows.statements.end_slot, args)
                    break
                except DblockError as error:
                    error.may_be_done = may_be_done = may_be_done or error.may_be_done
                    is_over = state.lost() is not None or self._flows.clock() >= state.trusted_until
                    if is_over or not isinstance(error, Unavailable):
                        raise
                yield Sleep(RETRY_END)
        if recorded is None:
            yield from LeaseFlows(self._flows, state).learn_why()
            return None
        state.let_go()
        state.release_confirmed()
        return str(recorded)

    def outcome(self, slot: datetime) -> Flow[SlotOutcome | None]:
        """Ask what the ledger knows about a slot. The result is None if the slot is not decided."""
        args = (self.definition.name, str((slot - EPOCH) // timedelta(microseconds=1)))
        row = yield Call(self._flows.statements.slot_outcome, args)
        if row is None:
            return None
        outcome, exit_code, error, alive = row
        return SlotOutcome(outcome, None if exit_code is None else int(exit_code), error, alive == "t")

    def abandon(self, attempt: str) -> Flow[None]:
        """Give back the grant of a claim whose caller leaves. A run that may overlap others ends at its deadline."""
        yield from self._flows.abandon(f"once:{self.definition.name}", attempt)


def _interval(seconds: float | None) -> str | None:
    return None if seconds is None else interval(seconds)


def _moment(microseconds: str | None) -> datetime:
    return EPOCH + timedelta(microseconds=int(microseconds or 0))
