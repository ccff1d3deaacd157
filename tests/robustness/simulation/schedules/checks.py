"""What must hold for a schedule at every step, beside what holds for every lock.

The checks keep their own record of the ledger. They do not rely on the store.

| check | what it finds |
|---|---|
| decided once | a slot that is decided twice or left out, or decided against the options of its schedule |
| at most once | a slot that runs twice under at-most-once, a body without a grant, or a retried claim that is refused |
| at least once | a slot under at-least-once whose runner died and that never ran to its end |
| run order | a run that begins before the last one is recorded as ended, or under a lower token |
| outcome | an outcome that is not what happened: a dead run that is not recorded as died, or a report that is lost |
"""

from __future__ import annotations

from dblock.testing.database.schedules.slots import Slots, slot_grace
from dblock.testing.database.schedules.store import Claimed
from dblock.testing.database.tables import Schedule, SlotRun
from tests.robustness.simulation.checks import Checks
from tests.robustness.simulation.world import Violation

REPORTED = ("succeeded", "failed")


class SlotChecks(Checks):
    """Observes every step of a schedule, and raises a Violation."""

    at_most_once = False
    """Whether a slot whose runner died is not run again."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._decided: dict[int, str] = {}
        """Each decided slot, and how: run, skipped or missed."""
        self._runs: dict[int, SlotRun] = {}
        """Each run by its token."""
        self._outcomes: dict[int, str] = {}
        self._open: int | None = None
        """The token of the run that is not recorded as ended."""
        self._last_end: int | None = None
        self._bodies: dict[int, list[int]] = {}
        """The tokens of the bodies that began, by slot."""
        self._finished: set[int] = set()
        self._reports: dict[int, str | None] = {}
        self._forgotten: set[int] = set()
        """Tokens and slots from before a promotion."""

    # What a host does.

    def started(self, slot: int, number: int, token: int) -> None:
        """Record that a body begins."""
        self.count("bodies")
        run = self._runs.get(token)
        if token not in self._forgotten and (run is None or (run.slot, run.number) != (slot, number)):
            raise Violation("at most once", f"a body of slot {slot} runs under {token}, which is {run}")
        before = self._bodies.setdefault(slot, [])
        if before and self.at_most_once and not self._forgotten & {slot, token}:
            raise Violation("at most once", f"slot {slot} runs again under {token}, after {before}")
        before.append(token)

    def finished(self, token: int) -> None:
        """Record that a body has returned."""
        self._finished.add(token)

    def reported(self, token: int, recorded: str | None) -> None:
        """Record what the database replied to the report of an end."""
        self._reports[token] = recorded

    # What the database does.

    def claimed(self, schedule: Schedule, run: SlotRun) -> None:
        self.count("runs")
        token, slot = run.token or 0, run.slot
        held = self._held.get(run.lock or "")
        if held is None or held[0] != token:
            raise Violation("at most once", f"slot {slot} runs under {token}, but {held} holds the lock")
        if self._open is not None:
            raise Violation("run order", f"{token} runs, and the end of {self._open} is not recorded")
        if token <= max(self._runs, default=0):
            raise Violation("run order", f"slot {slot} runs under {token}, after {max(self._runs)}")
        earlier = [one for one in self._runs.values() if one.slot == slot]
        if run.number == 1:
            self._decide(schedule, slot, "run")
            in_time = schedule.catch_up != "none" or run.claimed_at <= slot + slot_grace(schedule)
            if schedule.kind == "every" and not in_time:
                raise Violation("decided once", f"slot {slot} starts at {run.claimed_at}, later than its grace")
            if schedule.kind == "delay" and self._last_end is not None and slot < self._last_end + schedule.period:
                raise Violation("decided once", f"slot {slot} is due too soon after the last end, {self._last_end}")
        elif schedule.delivery == "at-most-once":
            raise Violation("at most once", f"slot {slot} runs for the {run.number}th time")
        elif [(one.number, self._outcomes.get(one.token or 0)) for one in earlier[-1:]] != [(run.number - 1, "died")]:
            raise Violation("outcome", f"slot {slot} runs again under {token}, but the last run is {earlier[-1:]}")
        else:
            self.count("runs again")
        if run.claimed_at < slot:
            raise Violation("decided once", f"slot {slot} runs before it is due, at {run.claimed_at}")
        self._runs[token], self._open = run, token

    def replied(self, attempt: str | None, reply: Claimed) -> None:
        own = None if self._open is None else self._runs[self._open]
        held = self._held.get(own.lock or "") if own is not None else None
        if own is None or own.attempt != attempt or held is None or held[0] != own.token or held[1] <= self.world.now:
            return
        if reply.token != own.token:
            raise Violation("at most once", f"the claim of {own} was retried, and the reply is {reply}")

    def _decide(self, schedule: Schedule, slot: int, how: str) -> None:
        if slot in self._decided:
            raise Violation("decided once", f"slot {slot} is {how}, and was {self._decided[slot]}")
        if self._decided and slot < max(self._decided):
            raise Violation("decided once", f"slot {slot} is decided after {max(self._decided)}")
        if schedule.kind == "every" and self._decided and slot != max(self._decided) + schedule.period:
            raise Violation("decided once", f"slot {slot} is decided, and those after {max(self._decided)} are not")
        self._decided[slot] = how

    def not_run(self, schedule: Schedule, outcome: str, found: Slots) -> None:
        assert found.first is not None
        self.count(f"slots {outcome}")
        if schedule.catch_up == "all" or schedule.kind == "delay":
            raise Violation("decided once", f"{found} {outcome}, although each slot runs")
        for number in range(found.slots):
            self._decide(schedule, found.first + number * schedule.period, outcome)

    def run_ended(self, schedule: Schedule, run: SlotRun) -> None:
        self.count(f"runs {run.outcome}")
        token = run.token or 0
        held = self._held.get(run.lock or "")
        alive = held is not None and held[0] == token and held[1] > self.world.now
        if alive:
            raise Violation("outcome", f"{token} is recorded as {run.outcome}, and holds the lock until {held}")
        if run.outcome == "succeeded" and token not in self._finished:
            raise Violation("outcome", f"{token} is recorded as succeeded, and its body has not returned")
        if run.outcome == "died" and self._reports.get(token) is not None and token not in self._forgotten:
            raise Violation("outcome", f"{token} is recorded as died, and has reported {self._reports[token]}")
        if token in self._outcomes and token not in self._forgotten:
            raise Violation("outcome", f"{token} is recorded as {run.outcome}, and was {self._outcomes[token]}")
        if run.ended_at is None or not run.claimed_at <= run.ended_at <= round(self.world.now * 1e6):
            raise Violation("outcome", f"{run} ended at an impossible moment")
        self._outcomes[token] = run.outcome or ""
        self._open = None if self._open == token else self._open
        self._last_end = max(self._last_end or run.ended_at, run.ended_at)

    def database_replaced(self) -> None:
        """Record that the database has forgotten something, and its state now. A crash keeps the whole ledger."""
        super().database_replaced()
        if self.database.promoted_at != self.world.now:
            return
        self._forgotten |= {*self._runs, *self._decided, *self._bodies}
        tables = self.database.store.tables
        self._runs = {run.token: run for run in tables.slot_runs if run.token is not None}
        self._outcomes = {token: run.outcome for token, run in self._runs.items() if run.outcome is not None}
        self._open = next((token for token, run in self._runs.items() if run.outcome is None), None)
        self._last_end = max((run.ended_at for run in self._runs.values() if run.ended_at is not None), default=None)
        self._decided = {}
        for run in tables.slot_runs:
            step = max((one.period for one in tables.schedules.values()), default=1)
            for slot in range(run.slot, run.last_slot + 1, step):
                self._decided[slot] = run.outcome or "run"

    # What must hold in the end.

    def check_ledger(self, schedule: Schedule) -> None:
        """Check the whole ledger after a calm time."""
        if self._open is not None:
            raise Violation("outcome", f"the run of {self._runs[self._open]} is over, and its end is not recorded")
        for token, run in self._runs.items():
            if token in self._forgotten:
                continue
            report, outcome = self._reports.get(token), self._outcomes[token]
            if report is not None and report != outcome:
                raise Violation("outcome", f"{token} has reported {report}, and the ledger says {outcome}")
            if token in self._reports and report is None and outcome in REPORTED:
                raise Violation("outcome", f"{token} was told that its lease was lost, and the ledger says {outcome}")
            last = [one for one in self._runs.values() if one.slot == run.slot][-1]
            if schedule.delivery == "at-least-once" and self._outcomes[last.token or 0] not in REPORTED:
                raise Violation("at least once", f"slot {run.slot} never ran to its end: {last}")
