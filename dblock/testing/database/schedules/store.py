"""The database in memory: the meaning of the SQL functions of schedules.

Written after dblock/sql/schedules, function by function and under the same names. Left out are pauses and runs that an
operator asks for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from dblock.testing.database.schedules.slots import (
    MINUTE,
    NEVER,
    SECOND,
    Definition,
    Slots,
    definition,
    extend_plan,
    free_again_at,
    latest,
    plan_suffices,
    run_lock,
    slot_after,
    slot_grace,
    slots_between,
    undecided_after,
)
from dblock.testing.database.store import Store
from dblock.testing.database.tables import Schedule, SlotRun

MOST_RUNS = 500
"""How many rows of the ledger each schedule keeps."""


class LedgerObserver(Protocol):
    """Learns of every change of the ledger, at the moment of the change."""

    def claimed(self, schedule: Schedule, run: SlotRun) -> None: ...

    def run_ended(self, schedule: Schedule, run: SlotRun) -> None: ...

    def not_run(self, schedule: Schedule, outcome: str, found: Slots) -> None: ...

    def replied(self, attempt: str | None, reply: Claimed) -> None: ...


class Ignored:
    """An observer that checks nothing."""

    def claimed(self, schedule: Schedule, run: SlotRun) -> None: ...

    def run_ended(self, schedule: Schedule, run: SlotRun) -> None: ...

    def not_run(self, schedule: Schedule, outcome: str, found: Slots) -> None: ...

    def replied(self, attempt: str | None, reply: Claimed) -> None: ...


class Claimed(NamedTuple):
    """The reply of claim_slot."""

    decision: str
    asked_at: int
    slot: int | None = None
    wait: float | None = None
    lock: str | None = None
    token: int | None = None
    expires_at: float | None = None
    remaining: float | None = None
    number: int | None = None
    planned_until: int | None = None


class Schedules:
    """The schedules in one database."""

    def __init__(self, store: Store, observer: LedgerObserver | None = None) -> None:
        self._store = store
        self.observer: LedgerObserver = observer or Ignored()

    def now(self) -> int:
        """Return the time in microseconds."""
        return round(self._store.now() * SECOND)

    def ledger(self, name: str) -> list[SlotRun]:
        """Return the rows of a schedule, oldest first."""
        return [run for run in self._store.tables.slot_runs if run.name == name]

    def record(self, run: SlotRun) -> SlotRun:
        """Add a row to the ledger."""
        runs = self._store.tables.slot_runs
        run.run = runs[-1].run + 1 if runs else 1
        runs.append(run)
        return run

    def end_run(self, s: Schedule, run: SlotRun, outcome: str, at: int) -> None:
        """Record how a run ended."""
        run.outcome, run.ended_at = outcome, at
        self.observer.run_ended(s, run)

    def run_is_over(self, run: SlotRun) -> bool:
        store = self._store
        row = store.tables.rows.get(run.lock or "")
        if row is None or row.token != run.token:
            return True
        if row.expires_at > store.now():
            grace = None if row.presence is None else store.remaining_grace(row.presence)
            if grace is None or grace > 0:
                return False
            store.free(row, "died", row.presence)
        return True

    def run_is_alive_for(self, run: SlotRun) -> float:
        store = self._store
        row = store.tables.rows.get(run.lock or "")
        if row is None or row.token != run.token:
            return 0.0
        seconds = row.expires_at - store.now()
        grace = store.remaining_grace(row.presence) if seconds > 0 and row.presence is not None else None
        return seconds if grace is None else min(seconds, grace)

    def record_unrun_slots(self, s: Schedule, outcome: str, found: Slots) -> None:
        if found.first is None or found.last is None:
            return
        self.observer.not_run(s, outcome, found)
        now, rows = self.now(), self.ledger(s.name)
        last = rows[-1] if rows else None
        if (
            last is not None
            and last.outcome == outcome
            and last.last_slot < found.first
            and not slots_between(s, last.last_slot, found.first - 1).slots
        ):
            last.slots, last.last_slot, last.ended_at = last.slots + found.slots, found.last, now
        else:
            self.record(SlotRun(0, s.name, found.first, found.last, found.slots, 0, now, outcome=outcome, ended_at=now))

    # What a client calls.

    def claim_slot(
        self,
        wanted: Definition,
        ttl: float,
        holder: str | None,
        attempt: str | None,
        presence: str | None,
        plan: Iterable[int] = (),
        plan_from: int | None = None,
    ) -> Claimed:
        reply = self.find_reply(wanted, ttl, holder, attempt, presence, plan, plan_from)
        self.observer.replied(attempt, reply)
        return reply

    def find_reply(
        self,
        wanted: Definition,
        ttl: float,
        holder: str | None,
        attempt: str | None,
        presence: str | None,
        plan: Iterable[int],
        plan_from: int | None,
    ) -> Claimed:
        """Decide what claim_slot replies."""
        store, asked_at = self._store, self.now()
        s = store.tables.schedules.get(wanted.name)
        if s is not None and definition(s) == wanted:
            reply = self.look_at_schedule(s, attempt, asked_at)
            if reply is not None:
                return reply
        is_new = s is None
        if s is None:
            s = Schedule(*wanted, since=asked_at)
            store.tables.schedules[s.name] = s
        own = self.own_run(s, attempt)
        if own is not None:
            row = store.tables.rows[own.lock or ""]
            store.durable = True
            left = row.expires_at - store.now()
            return Claimed("run", asked_at, own.slot, None, own.lock, own.token, row.expires_at, left, own.number)
        store.durable = True
        self.define_schedule(s, wanted, is_new, asked_at)
        if s.kind == "cron" and plan_from is not None and plan_from == s.planned_until:
            extend_plan(s, plan, asked_at)
        if not plan_suffices(s, asked_at):
            return Claimed("plan", asked_at, planned_until=s.planned_until)
        return self.decide(s, ttl, holder, attempt, presence, asked_at)

    def look_at_schedule(self, s: Schedule, attempt: str | None, asked_at: int) -> Claimed | None:
        """Reply without a change, if there is nothing to decide."""
        alive, slot = 1e9, None
        for run in self.ledger(s.name):
            if run.outcome in (None, "queued"):
                is_own = attempt is not None and run.attempt == attempt
                alive = 0.0 if is_own or run.outcome == "queued" else min(alive, self.run_is_alive_for(run))
                if alive <= 0:
                    return None
                slot = run.slot
        due = slots_between(s, undecided_after(s), asked_at)
        waits = s.kind == "delay" or (s.catch_up == "all" and s.overlap != "allow")
        if not plan_suffices(s, asked_at) or (due.slots and not (slot is not None and waits)):
            return None
        decision, wait = "none" if slot is None else "running", alive
        if s.kind != "delay" or slot is None:
            slot = slot if s.decided_until is None else s.decided_until
            upcoming = slot_after(s, max(asked_at, undecided_after(s)))
            wait = alive if upcoming is None else min(alive, (upcoming - asked_at) / SECOND)
        return Claimed(decision, asked_at, slot, wait)

    def own_run(self, s: Schedule, attempt: str | None) -> SlotRun | None:
        """Return the run of the caller's own earlier request, whose reply was lost."""
        for run in self.ledger(s.name):
            if attempt is not None and run.attempt == attempt and run.outcome is None:
                row = self._store.tables.rows.get(run.lock or "")
                if row is not None and row.token == run.token and row.expires_at > self._store.now():
                    return run
        return None

    def define_schedule(self, s: Schedule, wanted: Definition, is_new: bool, asked_at: int) -> None:
        if is_new or not wanted.same_slots(definition(s)):
            starts_at = asked_at - min(MINUTE, wanted.period or MINUTE) + 1
            if wanted.kind == "delay":
                starts_at = asked_at if s.decided_until is None else max(asked_at, s.decided_until + 1)
            if not is_new:
                due = slots_between(s, undecided_after(s), asked_at)
                if due.last is not None and due.last >= starts_at:
                    due = slots_between(s, undecided_after(s), due.last - 1)
                if s.kind != "delay":
                    self.record_unrun_slots(s, "missed", due)
                s.decided_until = latest(s.decided_until, due.last)
            s.since = starts_at
            s.upcoming = []
            s.planned_until = undecided_after(s) if wanted.kind == "cron" else None
        for name, value in zip(wanted._fields, wanted, strict=True):
            setattr(s, name, value)

    def find_active(self, s: Schedule, asked_at: int) -> tuple[SlotRun | None, SlotRun | None, int]:
        """Record the ends of runs that died. Return the active run, the run to repeat, and when that one ended."""
        active, again, again_ended = None, None, NEVER
        for run in self.ledger(s.name):
            if run.outcome is not None:
                continue
            row, ended = self._store.tables.rows.get(run.lock or ""), run.claimed_at
            if row is not None and row.token == run.token:
                at = row.released_at if row.expires_at == float("-inf") else row.expires_at
                ended = max(min(round(at * SECOND), asked_at), run.claimed_at)
            if again is not None or not self.run_is_over(run):
                active = run
            elif s.delivery == "at-least-once":
                again, again_ended = run, ended
            else:
                self.end_run(s, run, "died", ended)
                s.last_ended_at = latest(s.last_ended_at, ended)
        return active, again, again_ended

    def choose(self, s: Schedule, busy_until: int, first_waiting: int | None, asked_at: int) -> int | None:
        """Return the slot to run, if there is one."""
        due = slots_between(s, undecided_after(s), asked_at)
        late = slots_between(s, max(undecided_after(s), busy_until), asked_at)
        if first_waiting is not None:
            freed = latest(first_waiting, s.last_ended_at, free_again_at(s)) or 0
            if s.catch_up != "none" or asked_at <= freed + slot_grace(s, first_waiting):
                return first_waiting
        if due.slots and (s.kind == "delay" or s.catch_up == "all"):
            return due.first
        if late.last is not None and (s.catch_up != "none" or asked_at <= late.last + slot_grace(s, late.last)):
            return late.last
        return None

    def decide(
        self, s: Schedule, ttl: float, holder: str | None, attempt: str | None, presence: str | None, asked_at: int
    ) -> Claimed:
        """Decide about the newest slots, with the schedule's row locked."""
        active, again, again_ended = self.find_active(s, asked_at)
        queued = next((run for run in reversed(self.ledger(s.name)) if run.outcome == "queued"), None)
        free_at = free_again_at(s)
        blocked = (active is not None and s.overlap != "allow") or (free_at is not None and asked_at < free_at)
        if s.overlap == "allow" or s.catch_up == "all" or s.kind == "delay":
            busy_until = NEVER
        elif blocked:
            busy_until = asked_at
        else:
            ended = latest(s.last_ended_at, free_at)
            busy_until = NEVER if ended is None else min(ended, asked_at)
        overlapped = slots_between(s, undecided_after(s), busy_until)
        first_waiting = None
        if s.overlap == "queue":
            first_waiting = overlapped.first if queued is None else queued.slot
        if again is not None:
            chosen: int | None = again.slot
        else:
            chosen = None if blocked else self.choose(s, busy_until, first_waiting, asked_at)
        lock, token, expires_at, remaining = "", 0, 0.0, 0.0
        if chosen is not None:
            lock = run_lock(s, chosen)
            reply = self._store.try_acquire(lock, ttl, attempt, True, presence, fair=False)
            if not reply.granted or reply.token is None or reply.expires_at is None:
                return Claimed("running", asked_at, s.decided_until, reply.remaining)
            self._store.tables.rows[lock].holder = self._store.tables.rows[lock].holder or holder
            token, expires_at, remaining = reply.token, reply.expires_at, reply.remaining
        if again is None and s.catch_up != "all" and s.kind != "delay":
            queued = self.record_others(s, chosen, first_waiting, queued, blocked, busy_until, attempt, asked_at)
        elif chosen is not None and again is None:
            s.decided_until = latest(s.decided_until, chosen)
        if chosen is None:
            return self.nothing_to_run(s, active, queued, blocked, overlapped, attempt, asked_at)
        number = 1 if again is None else again.number + 1
        if again is not None:
            self.end_run(s, again, "died", again_ended)
            s.last_ended_at = latest(s.last_ended_at, again_ended)
        s.last_claimed_at = asked_at
        if queued is not None and chosen == queued.slot and again is None:
            run = queued
            run.outcome, run.number, run.claimed_at = None, 1, asked_at
            run.lock, run.token, run.attempt = lock, token, attempt
        else:
            run = self.record(SlotRun(0, s.name, chosen, chosen, 1, number, asked_at, lock, token, attempt))
        self.observer.claimed(s, run)
        self.forget_old_runs(s)
        return Claimed("run", asked_at, chosen, None, lock, token, expires_at, remaining, number)

    def forget_old_runs(self, s: Schedule) -> None:
        """Keep the newest rows of a schedule, and every run that is active."""
        rows = self.ledger(s.name)
        if len(rows) > MOST_RUNS:
            keep = rows[-MOST_RUNS].run
            tables = self._store.tables
            tables.slot_runs = [
                one
                for one in tables.slot_runs
                if one.name != s.name or one.run >= keep or one.outcome in (None, "queued")
            ]

    def record_others(
        self,
        s: Schedule,
        chosen: int | None,
        first_waiting: int | None,
        queued: SlotRun | None,
        blocked: bool,
        busy_until: int,
        attempt: str | None,
        asked_at: int,
    ) -> SlotRun | None:
        """Record the slots that do not run now. Return the slot that was queued, as the rest of the call sees it."""
        overlapped = slots_between(s, undecided_after(s), busy_until)
        late = slots_between(s, max(undecided_after(s), busy_until), asked_at)
        runs_first = chosen is not None and chosen == first_waiting
        if runs_first and queued is None:
            self.record_unrun_slots(s, "skipped", slots_between(s, first_waiting or 0, busy_until))
        elif s.overlap == "queue" and blocked and queued is None and first_waiting is not None:
            queued = self.queue(s, first_waiting, attempt, asked_at)
            self.record_unrun_slots(s, "skipped", slots_between(s, first_waiting, busy_until))
        else:
            self.record_unrun_slots(s, "skipped", overlapped)
            if queued is not None and not blocked and chosen != first_waiting:
                queued.outcome, queued.ended_at = "missed", asked_at
        s.decided_until = latest(s.decided_until, overlapped.last)
        if late.first is not None and runs_first:
            self.queue(s, late.first, None, asked_at)
            self.record_unrun_slots(s, "skipped", slots_between(s, late.first, asked_at))
        elif late.slots:
            before = asked_at if chosen is None else chosen - 1
            earlier = slots_between(s, max(undecided_after(s), busy_until), before)
            self.record_unrun_slots(s, "missed", earlier)
        s.decided_until = latest(s.decided_until, late.last)
        return queued

    def queue(self, s: Schedule, slot: int, attempt: str | None, asked_at: int) -> SlotRun:
        """Let a slot wait for the end of the active run."""
        return self.record(SlotRun(0, s.name, slot, slot, 1, 0, asked_at, attempt=attempt, outcome="queued"))

    def nothing_to_run(
        self,
        s: Schedule,
        active: SlotRun | None,
        queued: SlotRun | None,
        blocked: bool,
        overlapped: Slots,
        attempt: str | None,
        asked_at: int,
    ) -> Claimed:
        """Reply that the caller has nothing to run."""
        slot = active.slot if s.kind == "delay" and active is not None else s.decided_until
        if queued is not None and blocked and attempt is not None and queued.attempt == attempt:
            decision, slot = "queued", queued.slot
        elif overlapped.slots:
            decision = "skipped"
        else:
            decision = "running" if blocked else "none"
        upcoming = slot_after(s, max(asked_at, undecided_after(s)))
        return Claimed(decision, asked_at, slot, None if upcoming is None else (upcoming - asked_at) / SECOND)

    def end_slot(self, name: str, token: int, outcome: str) -> str | None:
        store = self._store
        store.durable = True
        run = next((run for run in self.ledger(name) if run.token == token), None)
        if run is None or run.outcome is not None:
            return run.outcome if run is not None and run.outcome in ("succeeded", "failed") else None
        if not store.release(run.lock or "", token):
            return None
        s = store.tables.schedules[name]
        ended = max(self.now(), run.claimed_at)
        self.end_run(s, run, outcome, ended)
        s.last_ended_at = ended
        return outcome

    def slot_outcome(self, name: str, slot: int) -> tuple[SlotRun, bool] | None:
        """Return the newest row of the ledger with this slot, and whether that run is alive."""
        for run in reversed(self.ledger(name)):
            if run.slot <= slot <= run.last_slot:
                row = self._store.tables.rows.get(run.lock or "")
                held = row is not None and row.token == run.token and row.expires_at > self._store.now()
                return run, run.outcome is None and held
        return None
