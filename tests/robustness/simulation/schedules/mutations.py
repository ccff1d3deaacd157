"""Bugs of schedules to put into a run, one at a time. The checks must find each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dblock._core.effects import Flow, Sleep
from dblock._core.lease_state import LeaseState
from dblock._core.slots import SlotFlows
from dblock.testing.database.tables import Schedule
from tests.robustness.simulation.mutations import Bug, instead
from tests.robustness.simulation.process import performed
from tests.robustness.simulation.schedules.run import ScheduleRun

BUGS: dict[str, Bug[ScheduleRun]] = {}


def _bug(put: Bug[ScheduleRun]) -> Bug[ScheduleRun]:
    BUGS[put.__name__] = put
    return put


# In the place of the SQL functions.


def _treat_deaths_as(run: ScheduleRun, wrong: str) -> None:
    schedules = run.store.schedules
    find_active = schedules.find_active

    def find(s: Schedule, asked_at: int) -> Any:
        delivery, s.delivery = s.delivery, wrong
        found = find_active(s, asked_at)
        s.delivery = delivery
        return found

    schedules.find_active = find  # type: ignore[method-assign]


@_bug
def dead_run_repeated(run: ScheduleRun) -> Iterator[None]:
    """Run a slot again whose runner died, whatever the delivery."""
    _treat_deaths_as(run, "at-least-once")
    yield


@_bug
def dead_run_forgotten(run: ScheduleRun) -> Iterator[None]:
    """Record a run that died as died, and do not run its slot again, whatever the delivery."""
    _treat_deaths_as(run, "at-most-once")
    yield


@_bug
def dead_run_never_recorded(run: ScheduleRun) -> Iterator[None]:
    """Leave a run that died open in the ledger, and run the next slot."""
    schedules = run.store.schedules
    run_is_over = schedules.run_is_over

    def find(s: Schedule, asked_at: int) -> Any:
        runs = [one for one in schedules.ledger(s.name) if one.outcome is None]
        return next((one for one in runs if not run_is_over(one)), None), None, 0

    schedules.find_active = find  # type: ignore[method-assign]
    yield


@_bug
def claim_not_on_disk(run: ScheduleRun) -> Iterator[None]:
    """Reply before a decision is on disk."""
    schedules, store = run.store.schedules, run.store
    claim_slot = schedules.claim_slot

    def quick(*args: Any) -> Any:
        claimed = claim_slot(*args)
        store.durable = False
        return claimed

    schedules.claim_slot = quick  # type: ignore[method-assign,assignment]
    yield


@_bug
def end_by_any_token(run: ScheduleRun) -> Iterator[None]:
    """Record the end of a run although its lease was lost."""
    schedules = run.store.schedules
    end_slot = schedules.end_slot

    def end(name: str, token: int, outcome: str) -> str | None:
        recorded = end_slot(name, token, outcome)
        found = next((one for one in schedules.ledger(name) if one.token == token), None)
        if recorded is None and found is not None and found.outcome == "died":
            found.outcome = outcome
            schedules.observer.run_ended(run.store.tables.schedules[name], found)
            return outcome
        return recorded

    schedules.end_slot = end  # type: ignore[method-assign]
    yield


@_bug
def slots_left_out(run: ScheduleRun) -> Iterator[None]:
    """Record nothing about slots that do not run."""
    run.store.schedules.record_unrun_slots = lambda s, outcome, found: None  # type: ignore[method-assign]
    yield


@_bug
def own_run_not_recognised(run: ScheduleRun) -> Iterator[None]:
    """Take the retry of a claim, whose reply was lost, for the claim of another host: the slot does not run."""
    run.store.schedules.own_run = lambda s, attempt: None  # type: ignore[method-assign]
    yield


# In dblock's own code.


@_bug
def failed_report_taken_for_done(run: ScheduleRun) -> Iterator[None]:
    """Take the reply that nothing was recorded for a success."""

    def end(flows: SlotFlows, state: Any, outcome: str, *args: Any) -> Flow[str | None]:
        recorded = yield from before(flows, state, outcome, *args)
        return outcome if recorded is None else recorded

    with instead(SlotFlows, "end", end) as before:
        yield


@_bug
def believed_between_two_reports(run: ScheduleRun) -> Iterator[None]:
    """Believe in the lease again while a report has no reply, although the report may have released the lock."""

    def end(flows: SlotFlows, state: LeaseState, outcome: str) -> Flow[str | None]:
        def perform(effect: Any) -> Flow[Any]:
            if isinstance(effect, Sleep):
                state.leave_refused()
            return (yield effect)

        return performed(before(flows, state, outcome), perform)

    with instead(SlotFlows, "end", end) as before:
        yield
