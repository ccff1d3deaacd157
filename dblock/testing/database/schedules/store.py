"""The database in memory: the meaning of the SQL functions of schedules.

Written after dblock/sql/schedules, function by function and under the same names. Left out are cron expressions, the
overlaps `queue` and `allow`, `at_least`, pauses and runs that an operator asks for, and how much of the ledger is kept.
Moments are whole microseconds, as Postgres has them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from dblock.testing.database.store import Store
from dblock.testing.database.tables import Schedule, SlotRun

SECOND = 1_000_000
MINUTE = 60 * SECOND
NEVER = -(1 << 62)
"""A moment before all others."""


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


class Definition(NamedTuple):
    """What a caller says about a schedule."""

    name: str
    kind: str
    period: int
    catch_up: str
    delivery: str
    grace: int | None


class Slots(NamedTuple):
    """How many slots lie in a part of time, and the first and last of them."""

    slots: int
    first: int | None = None
    last: int | None = None


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


def slots_between(s: Schedule, after: int, until: int) -> Slots:
    if s.kind == "every":
        low, high = after // s.period + 1, until // s.period
        return Slots(high - low + 1, low * s.period, high * s.period) if high >= low else Slots(0)
    first = s.since if s.last_ended_at is None else max(s.last_ended_at + s.period, s.since)
    return Slots(1, first, first) if after < first <= until else Slots(0)


def undecided_after(s: Schedule) -> int:
    return max(NEVER if s.decided_until is None else s.decided_until, s.since - 1)


def slot_after(s: Schedule, after: int) -> int | None:
    return slots_between(s, after, after + s.period if s.kind == "every" else -NEVER).first


def slot_grace(s: Schedule) -> int:
    return s.grace if s.grace is not None else min(s.period // 2, 10 * MINUTE)


def latest(*moments: int | None) -> int | None:
    """Return the latest of the moments that are known."""
    return max((moment for moment in moments if moment is not None), default=None)


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
        self, wanted: Definition, ttl: float, holder: str | None, attempt: str | None, presence: str | None
    ) -> Claimed:
        reply = self.find_reply(wanted, ttl, holder, attempt, presence)
        self.observer.replied(attempt, reply)
        return reply

    def find_reply(
        self, wanted: Definition, ttl: float, holder: str | None, attempt: str | None, presence: str | None
    ) -> Claimed:
        """Decide what claim_slot replies."""
        store, asked_at = self._store, self.now()
        s = store.tables.schedules.get(wanted.name)
        if s is not None and _defines(s) == wanted:
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
        return self.decide(s, ttl, holder, attempt, presence, asked_at)

    def look_at_schedule(self, s: Schedule, attempt: str | None, asked_at: int) -> Claimed | None:
        """Reply without a change, if there is nothing to decide."""
        alive, slot = 1e9, None
        for run in self.ledger(s.name):
            if run.outcome is None:
                is_own = attempt is not None and run.attempt == attempt
                alive = 0.0 if is_own else min(alive, self.run_is_alive_for(run))
                if alive <= 0:
                    return None
                slot = run.slot
        due = slots_between(s, undecided_after(s), asked_at)
        if due.slots and not (slot is not None and (s.kind == "delay" or s.catch_up == "all")):
            return None
        decision, wait = "none" if slot is None else "running", alive
        if s.kind != "delay" or slot is None:
            slot = slot if s.decided_until is None else s.decided_until
            upcoming = slot_after(s, max(asked_at, undecided_after(s)))
            wait = alive if upcoming is None else min(alive, upcoming / SECOND - asked_at / SECOND)
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
        if is_new or (s.kind, s.period) != (wanted.kind, wanted.period):
            starts_at = asked_at - min(MINUTE, wanted.period) + 1
            if wanted.kind == "delay":
                starts_at = asked_at if s.decided_until is None else max(asked_at, s.decided_until + 1)
            if not is_new:
                due = slots_between(s, undecided_after(s), asked_at)
                if due.last is not None and due.last >= starts_at:
                    due = slots_between(s, undecided_after(s), due.last - 1)
                if s.kind != "delay":
                    self.record_unrun_slots(s, "missed", due)
                s.decided_until = latest(s.decided_until, due.last)
            s.kind, s.period, s.since = wanted.kind, wanted.period, starts_at
        s.catch_up, s.delivery, s.grace = wanted.catch_up, wanted.delivery, wanted.grace

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

    def choose(self, s: Schedule, busy_until: int, asked_at: int) -> int | None:
        """Return the slot to run, if there is one."""
        due = slots_between(s, undecided_after(s), asked_at)
        late = slots_between(s, max(undecided_after(s), busy_until), asked_at)
        if due.slots and (s.kind == "delay" or s.catch_up == "all"):
            return due.first
        if late.last is not None and (s.catch_up != "none" or asked_at <= late.last + slot_grace(s)):
            return late.last
        return None

    def decide(
        self, s: Schedule, ttl: float, holder: str | None, attempt: str | None, presence: str | None, asked_at: int
    ) -> Claimed:
        """Decide about the newest slots, with the schedule's row locked."""
        active, again, again_ended = self.find_active(s, asked_at)
        if s.catch_up == "all" or s.kind == "delay":
            busy_until = NEVER
        elif active is not None:
            busy_until = asked_at
        else:
            busy_until = NEVER if s.last_ended_at is None else min(s.last_ended_at, asked_at)
        overlapped = slots_between(s, undecided_after(s), busy_until)
        late = slots_between(s, max(undecided_after(s), busy_until), asked_at)
        if again is not None:
            chosen: int | None = again.slot
        else:
            chosen = None if active is not None else self.choose(s, busy_until, asked_at)
        lock, token, expires_at, remaining = f"once:{s.name}", 0, 0.0, 0.0
        if chosen is not None:
            reply = self._store.try_acquire(lock, ttl, attempt, True, presence, fair=False)
            if not reply.granted or reply.token is None or reply.expires_at is None:
                return Claimed("running", asked_at, s.decided_until, reply.remaining)
            self._store.tables.rows[lock].holder = self._store.tables.rows[lock].holder or holder
            token, expires_at, remaining = reply.token, reply.expires_at, reply.remaining
        if again is None and s.catch_up != "all" and s.kind != "delay":
            self.record_unrun_slots(s, "skipped", overlapped)
            s.decided_until = latest(s.decided_until, overlapped.last)
            before = asked_at if chosen is None else chosen - 1
            earlier = slots_between(s, max(undecided_after(s), busy_until), before)
            self.record_unrun_slots(s, "missed", earlier if late.slots else Slots(0))
            s.decided_until = latest(s.decided_until, late.last)
        elif chosen is not None and again is None:
            s.decided_until = latest(s.decided_until, chosen)
        if chosen is None:
            decision = "skipped" if overlapped.slots else "none" if active is None else "running"
            slot = active.slot if s.kind == "delay" and active is not None else s.decided_until
            upcoming = slot_after(s, max(asked_at, undecided_after(s)))
            return Claimed(
                decision, asked_at, slot, None if upcoming is None else upcoming / SECOND - asked_at / SECOND
            )
        number = 1 if again is None else again.number + 1
        if again is not None:
            self.end_run(s, again, "died", again_ended)
            s.last_ended_at = latest(s.last_ended_at, again_ended)
        s.last_claimed_at = asked_at
        run = self.record(SlotRun(0, s.name, chosen, chosen, 1, number, asked_at, lock, token, attempt))
        self.observer.claimed(s, run)
        return Claimed("run", asked_at, chosen, None, lock, token, expires_at, remaining, number)

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


def _defines(s: Schedule) -> Definition:
    return Definition(s.name, s.kind, s.period, s.catch_up, s.delivery, s.grace)
