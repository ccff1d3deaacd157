"""The ledger of schedules: which slot runs, in which session, and what is recorded of the others."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest

from tests.support import mutants
from tests.support.sessions import Session, Sessions
from tests.support.still_clock import NOON, StillClock
from tests.support.tokens import T1, T2, T3

pytestmark = pytest.mark.usefixtures("known_tokens")

HOURLY = "every => '1 hour'"


def claim(session: Session, definition: str = HOURLY, more: str = "", *, ttl: str = "30 s") -> tuple[Any, ...]:
    """Ask for a slot; return the decision, the hour and minute of the slot, and the token."""
    return tuple(session.do(claiming(definition, more, ttl)))


def claiming(definition: str = HOURLY, more: str = "", ttl: str = "30 s") -> str:
    options = f", {more}" if more else ""
    return (
        "SELECT decision, to_char(slot AT TIME ZONE 'UTC', 'HH24:MI'), token"
        f" FROM claim_slot('job', {definition}, ttl => '{ttl}'{options})"
    )


def end(session: Session, token: int, outcome: str = "succeeded") -> str | None:
    """End a run; return what was recorded."""
    (recorded,) = session.do("SELECT end_slot('job', %s, %s, 0)", token, outcome)
    return None if recorded is None else str(recorded)


def ledger(owner: psycopg.Connection) -> list[str]:
    """Return the rows of the ledger, the oldest first: first slot, number of slots, outcome."""
    rows = owner.execute(
        "SELECT to_char(slot AT TIME ZONE 'UTC', 'HH24:MI'), slots, coalesce(outcome, 'running') FROM slot_runs"
        " WHERE name = 'job' ORDER BY run"
    ).fetchall()
    return [f"{slot} {outcome}" + (f" x{slots}" if slots > 1 else "") for slot, slots, outcome in rows]


def test_slot_is_run_once_however_many_ask(sessions: Sessions, clock: StillClock, owner: psycopg.Connection) -> None:
    one, two = sessions.open(), sessions.open()
    assert claim(one) == ("run", "12:00", T1)
    assert claim(two) == ("running", "12:00", None)
    assert end(one, T1) == "succeeded"
    assert claim(two) == ("none", "12:00", None), "the run was short, and the host is late"
    clock.at("12:59:59")
    assert claim(two) == ("none", "12:00", None)
    clock.at("13:00")
    assert claim(two) == ("run", "13:00", T2)
    assert ledger(owner) == ["12:00 succeeded", "13:00 running"]


def test_two_claimers_of_one_slot_get_one_grant(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    one, two = sessions.open(), sessions.open()
    one.do("BEGIN")
    assert claim(one) == ("run", "12:00", T1)
    second = two.start(claiming())
    two.wait_until_blocked()
    one.do("COMMIT")
    assert second.result(60) == ("running", "12:00", None)
    assert ledger(owner) == ["12:00 running"]


def test_claimer_that_comes_while_a_short_run_ends_does_not_run_it_again(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    one, two = sessions.open(), sessions.open()
    end(one, claim(one)[2])
    clock.at("13:00")
    one.do("BEGIN")
    assert claim(one) == ("run", "13:00", T2)
    second = two.start(claiming())
    two.wait_until_blocked()
    assert end(one, T2) == "succeeded"
    one.do("COMMIT")
    assert second.result(60) == ("none", "13:00", None), "the lock is free again, and the slot is decided"
    assert ledger(owner) == ["12:00 succeeded", "13:00 succeeded"]


def test_claimer_that_rolls_back_leaves_the_slot_to_the_next(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    one, two = sessions.open(), sessions.open()
    claim(one, more="attempt => NULL")
    end(one, T1)
    clock.at("13:00")
    one.do("BEGIN")
    assert claim(one)[:2] == ("run", "13:00")
    second = two.start(claiming())
    two.wait_until_blocked()
    one.do("ROLLBACK")
    assert second.result(60)[:2] == ("run", "13:00"), "neither the slot nor a grant was left behind"
    assert ledger(owner) == ["12:00 succeeded", "13:00 running"]


@pytest.mark.parametrize(
    ("delivery", "decision", "rows"),
    [
        ("at-most-once", ("none", "12:00", None), ["12:00 died"]),
        ("at-least-once", ("run", "12:00", T2), ["12:00 died", "12:00 running"]),
    ],
)
def test_claimer_that_dies_before_its_first_instruction_is_recorded(
    sessions: Sessions,
    clock: StillClock,
    owner: psycopg.Connection,
    delivery: str,
    decision: tuple[Any, ...],
    rows: list[str],
) -> None:
    session = sessions.open()
    assert claim(session, more=f"delivery => '{delivery}'")[0] == "run"
    clock.advance(29)
    assert claim(session, more=f"delivery => '{delivery}'")[0] == "running"
    clock.advance(1)
    assert claim(session, more=f"delivery => '{delivery}'") == decision
    assert ledger(owner) == rows
    assert end(session, T1) is None, "the stale run records nothing"
    assert ledger(owner) == rows


def test_stale_end_does_not_touch_the_run_of_the_next_grant(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    session, again = sessions.open(), "delivery => 'at-least-once'"
    claim(session, more=again)
    clock.advance(31)
    assert end(session, T1) is None, "the lease has expired, though no other host has noticed"
    assert claim(session, more=again) == ("run", "12:00", T2)
    assert end(session, T1) is None
    assert end(session, T2, "failed") == "failed"
    assert ledger(owner) == ["12:00 died", "12:00 failed"]
    assert claim(session, more=again)[0] == "none", "a failure is an outcome, and is not retried"


def test_end_is_recorded_and_the_lock_released_together(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    one, two = sessions.open(), sessions.open()
    claim(one)
    one.do("BEGIN")
    assert end(one, T1) == "succeeded"
    clock.at("13:00")
    second = two.start(claiming())
    two.wait_until_blocked()
    one.do("ROLLBACK")
    assert second.result(60)[0] == "run", "the first run was not ended, and its lease is over"
    assert ledger(owner)[0] == "12:00 died"


def test_end_that_is_sent_twice_returns_the_first_outcome(sessions: Sessions, clock: StillClock) -> None:
    session = sessions.open()
    claim(session)
    assert end(session, T1, "failed") == "failed"
    assert end(session, T1, "succeeded") == "failed"


def test_open_proof_of_a_lease_keeps_its_run_from_being_recorded_as_died(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    runner, other = sessions.open(), sessions.open()
    claim(runner)
    runner.do("BEGIN")
    assert runner.do("SELECT assert_held('once:job', %s)", T1) == (True,)
    clock.at("13:00")
    assert claim(other)[0] in ("skipped", "running"), "the write of the first run may still be committed"
    assert ledger(owner)[0] == "12:00 running"
    runner.do("COMMIT")
    clock.at("14:00")
    assert claim(other)[:2] == ("run", "14:00")


def test_claim_waits_for_a_renewal_that_has_locked_the_row(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    # The claim waits for a second, which is too short for a machine that stands still.
    mutants.replace(owner, mutants.altered("10_claim_slot.sql", "'1s'", "'60s'"))
    clock.govern()
    keeper, session = sessions.open(), sessions.open()
    end(session, claim(session)[2])
    clock.at("13:00")
    keeper.do("BEGIN")
    keeper.do("SELECT FROM distributed_locks WHERE name = 'once:job' FOR NO KEY UPDATE")
    asked = session.start(claiming())
    session.wait_until_blocked()
    keeper.do("COMMIT")
    assert asked.result(60)[:2] == ("run", "13:00"), "a slot that is due is not skipped for it"


def test_lost_reply_is_found_by_its_attempt(sessions: Sessions, clock: StillClock, owner: psycopg.Connection) -> None:
    one, two = sessions.open(), sessions.open()
    mine = f"attempt => '{uuid.uuid4()}'"
    assert claim(one, more=mine) == ("run", "12:00", T1)
    assert claim(two, more=mine) == ("run", "12:00", T1), "the same grant"
    assert claim(two, more=f"attempt => '{uuid.uuid4()}'")[0] == "running"
    assert ledger(owner) == ["12:00 running"]


def test_new_schedule_starts_with_a_slot_of_the_last_minute_or_the_next(sessions: Sessions, clock: StillClock) -> None:
    session = sessions.open()
    clock.at("12:00:40")
    assert claim(session)[:2] == ("run", "12:00"), "the tick of cron comes after its slot"
    clock.at("12:01:01")
    other = "SELECT decision FROM claim_slot('other', every => '1 hour', catch_up => 'all')"
    assert session.do(other) == ("none",), "what was due before it existed is not caught up"


def test_change_of_the_interval_runs_no_slot_twice(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    session = sessions.open()
    end(session, claim(session)[2])
    assert claim(session, "every => '15 minutes'")[:2] == ("none", "12:00")
    clock.at("12:14:59")
    assert claim(session, "every => '15 minutes'")[0] == "none"
    clock.at("12:15:01")
    assert claim(session, "every => '15 minutes'")[:2] == ("run", "12:15")
    end(session, T2)
    assert claim(session)[:2] == ("none", "12:15"), "back again, in a rolling deploy"
    clock.at("13:00")
    assert claim(session)[:2] == ("run", "13:00")
    assert ledger(owner) == ["12:00 succeeded", "12:15 succeeded", "13:00 running"]
    events = owner.execute("SELECT event FROM schedule_events ORDER BY number").fetchall()
    assert [event for (event,) in events] == ["registered", "changed", "changed"]


def test_change_that_comes_with_a_slot_does_not_lose_it(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    session = sessions.open()
    end(session, claim(session)[2])
    clock.at("15:00:01")
    assert claim(session, "every => '15 minutes'")[:2] == ("run", "15:00"), "both definitions have this slot"
    end(session, T2)
    clock.at("15:15:01")
    assert claim(session)[:2] == ("none", "15:00"), "a host with the old definition asks first, in a rolling deploy"
    assert claim(session, "every => '15 minutes'")[:2] == ("run", "15:15")
    assert ledger(owner) == ["12:00 succeeded", "13:00 missed x2", "15:00 succeeded", "15:15 running"]


@pytest.mark.parametrize(
    ("catch_up", "runs", "rows"),
    [
        ("none", [], ["12:00 succeeded", "13:00 missed x6"]),
        ("latest", ["18:00"], ["12:00 succeeded", "13:00 missed x5", "18:00 succeeded"]),
        ("all", ["13:00", "14:00", "15:00", "16:00", "17:00", "18:00"], None),
    ],
)
def test_slots_without_a_host_are_caught_up_as_the_schedule_says(
    sessions: Sessions,
    clock: StillClock,
    owner: psycopg.Connection,
    catch_up: str,
    runs: list[str],
    rows: list[str] | None,
) -> None:
    session, how = sessions.open(), f"catch_up => '{catch_up}'"
    end(session, claim(session, more=how)[2])
    clock.at("18:30")
    seen = []
    while (reply := claim(session, more=how))[0] == "run":
        seen.append(reply[1])
        assert end(session, reply[2]) == "succeeded"
    assert seen == runs
    assert ledger(owner) == (rows or [f"{hour}:00 succeeded" for hour in range(12, 19)])


def test_ten_thousand_missed_slots_are_decided_at_once(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    session, minutely = sessions.open(), "every => '1 minute'"
    end(session, claim(session, minutely)[2])
    clock.advance(10_001 * 60)
    assert claim(session, minutely, "catch_up => 'latest'")[0] == "run"
    row = owner.execute("SELECT slots, last_slot - slot FROM slot_runs WHERE outcome = 'missed'").fetchone()
    assert row == (10_000, timedelta(minutes=9_999))


def test_slot_is_run_late_only_within_its_grace(sessions: Sessions, clock: StillClock) -> None:
    session = sessions.open()
    end(session, claim(session)[2])
    clock.at("13:10")
    assert claim(session)[:2] == ("run", "13:00"), "half the interval, but ten minutes at most"
    end(session, T2)
    clock.at("14:00:06")
    assert claim(session, more="grace => '5 s'")[:2] == ("none", "14:00")


def test_slot_that_is_due_during_a_run_is_skipped(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    one, two = sessions.open(), sessions.open()
    claim(one, ttl="5 hours")
    for hour in ("13:00", "14:00"):
        clock.at(hour)
        assert claim(two, ttl="5 hours")[:2] == ("skipped", hour)
    clock.at("14:10")
    end(one, T1)
    assert claim(two)[0] == "none"
    clock.at("15:00")
    assert claim(two)[:2] == ("run", "15:00")
    assert ledger(owner) == ["12:00 succeeded", "13:00 skipped x2", "15:00 running"]


def test_slots_that_passed_during_a_run_are_skipped_also_if_no_host_asked(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    session = sessions.open()
    claim(session, ttl="5 hours")
    clock.at("14:10")
    end(session, T1)
    assert claim(session)[0] == "skipped"
    assert ledger(owner) == ["12:00 succeeded", "13:00 skipped x2"]


def test_queue_holds_one_slot_which_starts_when_the_run_ends(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    one, two, three = sessions.open(), sessions.open(), sessions.open()
    mine, queue = f"attempt => '{uuid.uuid4()}'", "overlap => 'queue'"
    claim(one, more=queue, ttl="5 hours")
    clock.at("13:00")
    assert claim(two, more=f"{queue}, {mine}") == ("queued", "13:00", None)
    assert claim(two, more=f"{queue}, {mine}") == ("queued", "13:00", None), "a lost reply"
    assert claim(three, more=f"{queue}, attempt => '{uuid.uuid4()}'")[0] == "running", "the queue is full"
    clock.at("14:00")
    assert claim(three, more=f"{queue}, attempt => '{uuid.uuid4()}'")[:2] == ("skipped", "14:00")
    clock.at("14:10")
    end(one, T1)
    assert claim(two, more=f"{queue}, {mine}") == ("run", "13:00", T2)
    assert ledger(owner) == ["12:00 succeeded", "13:00 running", "14:00 skipped"]


def test_row_of_skipped_slots_has_no_gap_for_a_slot_that_ran(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    session, queue = sessions.open(), "overlap => 'queue'"
    claim(session, more=queue, ttl="5 hours")
    clock.at("13:00")
    claim(session, more=f"{queue}, attempt => '{uuid.uuid4()}'")
    clock.at("14:00")
    assert claim(session, more=queue)[:2] == ("skipped", "14:00")
    end(session, T1)
    assert claim(session, more=queue, ttl="5 hours") == ("run", "13:00", T2)
    clock.at("16:30")
    end(session, T2)
    assert claim(session, more=queue) == ("run", "15:00", T3), "the first slot that was due during the run"
    assert sorted(ledger(owner)) == [
        "12:00 succeeded",
        "13:00 succeeded",
        "14:00 skipped",
        "15:00 running",
        "16:00 skipped",
    ]


def test_queued_slot_whose_caller_died_is_run_by_another(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    one, two, three = sessions.open(), sessions.open(), sessions.open()
    queue, mine = "overlap => 'queue'", f"attempt => '{uuid.uuid4()}'"
    claim(one, more=queue, ttl="5 hours")
    clock.at("13:00")
    assert claim(two, more=f"{queue}, {mine}")[0] == "queued"
    clock.at("13:20")
    end(one, T1)
    assert claim(three, more=queue) == ("run", "13:00", T2)
    assert claim(two, more=f"{queue}, {mine}")[0] == "running", "the one that queued finds its slot taken"
    assert ledger(owner) == ["12:00 succeeded", "13:00 running"]


def test_queued_slot_that_no_host_started_in_time_is_missed(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    one, two = sessions.open(), sessions.open()
    queue = "overlap => 'queue'"
    claim(one, more=queue, ttl="5 hours")
    clock.at("13:00")
    assert claim(two, more=f"{queue}, attempt => '{uuid.uuid4()}'")[0] == "queued"
    clock.at("13:20")
    end(one, T1)
    clock.at("13:40")
    assert claim(two, more=queue)[0] == "none"
    assert ledger(owner) == ["12:00 succeeded", "13:00 missed"]


def test_runs_that_may_overlap_have_locks_of_their_own(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    session, allow = sessions.open(), "overlap => 'allow'"
    assert claim(session, more=allow, ttl="5 hours") == ("run", "12:00", T1)
    clock.at("13:00")
    assert claim(session, more=allow, ttl="5 hours") == ("run", "13:00", T2)
    assert claim(session, more=allow)[0] == "running"
    assert end(session, T2) == "succeeded"
    assert end(session, T1) == "succeeded"
    locks = owner.execute("SELECT name FROM distributed_locks ORDER BY name").fetchall()
    assert [name for (name,) in locks] == [f"once:job@2026-11-16T{hour}:00:00.000000Z" for hour in (12, 13)]


def test_backlog_is_left_to_its_runner_and_not_skipped(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    one, two, everything = sessions.open(), sessions.open(), "catch_up => 'all'"
    end(one, claim(one, more=everything)[2])
    clock.at("15:00")
    assert claim(one, more=everything)[:2] == ("run", "13:00")
    assert claim(two, more=everything)[0] == "running"
    end(one, T2)
    assert claim(two, more=everything)[:2] == ("run", "14:00")
    assert ledger(owner)[1:] == ["13:00 succeeded", "14:00 running"]


def test_delay_counts_from_the_end_of_the_last_run(sessions: Sessions, clock: StillClock) -> None:
    session, delay = sessions.open(), "delay => '10 minutes'"
    assert claim(session, delay) == ("run", "12:00", T1), "a new one is due at once"
    clock.advance(20)
    assert claim(session, delay)[0] == "running"
    end(session, T1)
    clock.at("12:10:19")
    assert claim(session, delay)[0] == "none"
    clock.at("12:10:20")
    assert claim(session, delay) == ("run", "12:10", T2)
    clock.at("12:15")
    assert claim(session, delay)[0] == "none", "the runner died when its lease expired, at 12:10:50"
    clock.at("12:20:49")
    assert claim(session, delay)[0] == "none"
    clock.at("12:20:50")
    assert claim(session, delay) == ("run", "12:20", T3)


def test_delay_continues_after_the_clock_was_set_back_during_a_run(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    session, delay = sessions.open(), "delay => '10 s'"
    claim(session, delay)
    clock.at("11:50")
    assert end(session, T1) == "succeeded"
    assert session.do("SELECT to_char(next_slot AT TIME ZONE 'UTC', 'HH24:MI:SS') FROM list_schedules('job')") == (
        "12:00:10",
    ), "after the slot that has run, so that the schedule becomes overdue if no host asks"
    clock.at("12:00:10")
    assert claim(session, delay)[0] == "run"


def test_changed_delay_starts_after_the_decided_slots_of_a_clock_that_was_ahead(
    sessions: Sessions, clock: StillClock
) -> None:
    session = sessions.open()
    end(session, claim(session)[2])
    clock.at("15:30")
    assert claim(session)[:2] == ("none", "15:00"), "missed"
    clock.at("12:10")
    assert claim(session, "delay => '10 s'")[0] == "none"
    clock.at("15:00:01")
    assert claim(session, "delay => '10 s'")[0] == "run"


def test_at_least_keeps_the_next_slot_from_starting_early(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    session, minutely, hold = sessions.open(), "every => '1 minute'", "at_least => '90 s'"
    end(session, claim(session, minutely, hold)[2])
    clock.at("12:01")
    assert claim(session, minutely, hold)[0] == "skipped"
    clock.at("12:02")
    assert claim(session, minutely, hold)[:2] == ("run", "12:02")


def test_cron_asks_for_a_plan_and_every_host_sees_the_same_one(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    session, daily = sessions.open(), "cron => '30 2 * * *', zone => 'Europe/Berlin'"
    decision, _, _ = claim(session, daily)
    assert decision == "plan"
    (since,) = session.do(f"SELECT planned_until FROM claim_slot('job', {daily})")
    plan = [NOON + timedelta(hours=hours) for hours in (0, 1, 2)]
    wrong = ",".join(str(NOON + timedelta(minutes=minutes)) for minutes in (7, 14, 21))
    stale = f"plan => '{{{wrong}}}', plan_from => '{since - timedelta(seconds=1)}'"
    assert claim(session, daily, stale)[0] == "plan", "a plan that starts elsewhere is ignored"
    given = f"plan => '{{{','.join(map(str, plan))}}}', plan_from => '{since}'"
    assert claim(session, daily, given)[:2] == ("run", "12:00")
    end(session, T1)
    assert claim(session, daily)[:2] == ("none", "12:00")
    assert claim(session, daily, given)[:2] == ("none", "12:00"), "the same plan again changes nothing"
    clock.at("13:00")
    assert claim(session, daily)[0] == "plan", "two slots ahead must be known, so that a missed one is overdue"


def test_pause_and_resume_record_actor_and_reason(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    session = sessions.open()
    end(session, claim(session)[2])
    assert session.do("SELECT pause_schedule('job', 'ann', 'disk is full')") == (True,)
    assert session.do("SELECT pause_schedule('job', 'bob', 'me too')") == (False,)
    clock.at("13:00")
    assert claim(session)[0] == "paused"
    assert session.do("SELECT overdue_since FROM list_schedules('job')") == (None,)
    clock.at("13:59:59")
    assert session.do("SELECT resume_schedule('job', 'ann', 'disk is empty')") == (True,)
    assert claim(session, more="catch_up => 'all'")[0] == "none", "slots of the pause are not caught up"
    clock.at("14:00")
    assert claim(session, more="catch_up => 'all'")[:2] == ("run", "14:00")
    rows = owner.execute("SELECT event, split_part(actor, ' as ', 1), reason FROM schedule_events ORDER BY number")
    assert rows.fetchall()[1:] == [("paused", "ann", "disk is full"), ("resumed", "ann", "disk is empty")]


def test_run_now_runs_once_and_leaves_the_slots_alone(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    session = sessions.open()
    claim(session)
    clock.at("12:20")
    assert session.do("SELECT run_schedule('job', 'ann', 'again')") == (True,)
    assert session.do("SELECT run_schedule('job', 'ann', 'again')") == (False,), "one is waiting already"
    assert claim(session, more="delivery => 'at-least-once'")[:2] == ("run", "12:00"), "first the slot that died"
    end(session, T2)
    assert claim(session)[:2] == ("run", "12:20")
    end(session, T3)
    assert claim(session)[0] == "none"
    clock.at("13:00")
    assert claim(session)[:2] == ("run", "13:00")
    assert ledger(owner) == ["12:00 died", "12:00 succeeded", "12:20 succeeded", "13:00 running"]


def test_run_now_works_while_the_schedule_is_paused(sessions: Sessions, clock: StillClock) -> None:
    session = sessions.open()
    end(session, claim(session)[2])
    session.do("SELECT pause_schedule('job')")
    clock.at("13:00")
    session.do("SELECT run_schedule('job')")
    assert claim(session)[:2] == ("run", "13:00")
    end(session, T2)
    assert claim(session)[0] == "paused"


def test_run_now_does_not_wait_for_a_dead_run_that_the_pause_holds_back(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    session, again = sessions.open(), "delivery => 'at-least-once'"
    claim(session, more=again)
    session.do("SELECT pause_schedule('job')")
    clock.at("12:10")
    assert claim(session, more=again)[0] == "paused"
    session.do("SELECT run_schedule('job')")
    assert claim(session, more=again) == ("run", "12:10", T2), "the run that the operator asked for"
    assert claim(session, more=again)[0] == "paused", "the dead run does not start during the pause"
    session.do("SELECT resume_schedule('job')")
    assert claim(session, more=again)[0] == "running", "one run at a time"
    end(session, T2)
    assert claim(session, more=again) == ("run", "12:00", T3)
    assert ledger(owner) == ["12:00 died", "12:10 succeeded", "12:00 running"]


def test_schedule_is_overdue_once_its_slot_and_grace_have_passed(sessions: Sessions, clock: StillClock) -> None:
    session = sessions.open()
    overdue = "SELECT to_char(overdue_since AT TIME ZONE 'UTC', 'HH24:MI') FROM list_schedules('job')"
    end(session, claim(session)[2])
    clock.at("13:10")
    assert session.do(overdue) == (None,)
    clock.at("13:10:01")
    assert session.do(overdue) == ("13:10",)
    claim(session)
    assert session.do(overdue) == (None,), "it was recorded as missed, so a host is alive"


def test_schedule_whose_decided_slots_lie_ahead_is_overdue(sessions: Sessions, clock: StillClock) -> None:
    """The server's clock was a day ahead, and was corrected."""
    session = sessions.open()
    end(session, claim(session)[2])
    clock.advance(86_400)
    end(session, claim(session)[2])
    clock.advance(-86_400 + 3600)
    assert claim(session)[0] == "none"
    assert session.do("SELECT overdue_since FROM list_schedules('job')") != (None,)
    clock.advance(86_400 - 3600 - 600)
    assert session.do("SELECT overdue_since FROM list_schedules('job')") == (None,)


def test_run_that_did_not_report_its_end_is_overdue(sessions: Sessions, clock: StillClock) -> None:
    session = sessions.open()
    claim(session)
    overdue = "SELECT to_char(overdue_since AT TIME ZONE 'UTC', 'HH24:MI:SS'), running FROM list_schedules('job')"
    assert session.do(overdue) == (None, 1)
    clock.at("12:05")
    assert session.do(overdue) == ("12:00:30", 0)


def test_deleted_schedule_is_not_overdue_any_more(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    session = sessions.open()
    claim(session)
    assert session.do("SELECT delete_schedule('job', 'ann', 'not needed')") == (True,)
    assert session.do("SELECT name FROM list_schedules()") is None
    assert ledger(owner) == []
    assert end(session, T1) is None
    assert session.do("SELECT delete_schedule('job')") == (False,)


def test_outcome_of_a_slot_is_known_to_all(sessions: Sessions, clock: StillClock) -> None:
    session = sessions.open()
    ask = "SELECT outcome, exit_code, alive FROM slot_outcome('job', %s)"
    claim(session)
    assert session.do(ask, NOON) == (None, None, True)
    session.do("SELECT end_slot('job', %s, 'failed', 3, 'no disk')", T1)
    assert session.do(ask, NOON) == ("failed", 3, False)
    assert session.do(ask, NOON + timedelta(hours=1)) is None
    clock.at("15:30")
    claim(session)
    assert session.do(ask, NOON + timedelta(hours=2)) == ("missed", None, False)


def test_caller_that_finds_nothing_to_decide_writes_nothing(sessions: Sessions, clock: StillClock) -> None:
    one, two = sessions.open(), sessions.open()
    claim(one)
    two.do("BEGIN")
    assert claim(two)[0] == "running"
    assert two.do("SELECT pg_current_xact_id_if_assigned()") == (None,)
    end(one, T1)
    assert claim(two)[0] == "none"
    assert two.do("SELECT pg_current_xact_id_if_assigned()") == (None,)
    two.do("COMMIT")


INVALID = [
    "'job'", "'job', every => '1 h', delay => '1 h'", "'job', every => '0'", "'', every => '1 h'",
    "'job', cron => '* * * * *'", "'job', every => '1 h', overlap => 'some'", "'job', every => '1 h', ttl => '0'",
    "'job', every => '1 h', overlap => 'allow', at_least => '1 s'", "repeat('x', 401), every => '1 h'",
]  # fmt: skip


def test_invalid_definition_is_refused(sessions: Sessions) -> None:
    session = sessions.open()
    for arguments in INVALID:
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            session.do(f"SELECT decision FROM claim_slot({arguments})")


def test_slots_of_every_interval_are_its_multiples_since_1970(sessions: Sessions, clock: StillClock) -> None:
    session = sessions.open()
    for seconds in (0.1, 0.25, 7, 3600, 86_400, 604_800):
        (slot,) = session.do(
            f"SELECT next_slot FROM claim_slot('every {seconds}', every => '{seconds} s', catch_up => 'none')"
        )
        past = (slot - datetime(1970, 1, 1, tzinfo=timezone.utc)).total_seconds()
        assert past == pytest.approx(round(past / seconds) * seconds, abs=1e-6)
        assert 0 < (slot - clock.now).total_seconds() <= seconds
