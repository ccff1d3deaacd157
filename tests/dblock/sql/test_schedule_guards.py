"""What the functions of schedules refuse, keep and delete: one test for each check."""

from __future__ import annotations

import uuid

import psycopg
import pytest

from tests.dblock.sql.test_schedules import HOURLY, claim, claiming, end, ledger
from tests.support.sessions import END_GRACE, Sessions
from tests.support.still_clock import StillClock
from tests.support.tokens import T1

pytestmark = pytest.mark.usefixtures("known_tokens")


def test_later_plan_adds_no_slot_before_its_beginning(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    session, cron = sessions.open(), "cron => '0 * * * *', zone => 'UTC'"
    assert claim(session, cron)[0] == "plan"
    for first, last in (("2026-11-16 12:00", "2026-11-16 13:00"), ("2026-11-16 12:30", "2026-11-16 16:30")):
        (planned_until,) = session.do("SELECT planned_until FROM schedules")
        plan = f"generate_series(timestamptz '{first}+00', '{last}+00', '1 hour')"
        claim(session, cron, f"plan_from => '{planned_until}', plan => ARRAY(SELECT {plan})")
    (upcoming,) = session.do(
        "SELECT array_agg(to_char(u AT TIME ZONE 'UTC', 'HH24:MI')) FROM schedules, unnest(upcoming) AS u"
    )
    assert upcoming == ["12:00", "13:00", "13:30", "14:30", "15:30", "16:30"], "and not 12:30"


def test_dead_runs_that_may_overlap_run_again_in_order(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    session, how = sessions.open(), "overlap => 'allow', delivery => 'at-least-once'"
    claim(session, more=how, ttl="2 hours")
    clock.at("13:00")
    claim(session, more=how, ttl="1 hour")
    clock.at("14:00")
    assert claim(session, more=how)[:2] == ("run", "12:00")
    assert claim(session, more=how)[:2] == ("run", "13:00")
    assert claim(session, more=how)[:2] == ("run", "14:00")
    numbers = owner.execute("SELECT number FROM slot_runs ORDER BY run").fetchall()
    assert [number for (number,) in numbers] == [1, 1, 2, 2, 1], "the reruns are counted"


def test_client_that_queues_for_the_lock_of_a_run_does_not_hold_up_its_slots(
    sessions: Sessions, clock: StillClock
) -> None:
    session, other = sessions.open(), sessions.open()
    claim(session)
    other.do("SELECT acquire('once:job', attempt => %s, client => %s)", uuid.uuid4(), uuid.uuid4())
    end(session, T1)
    clock.at("13:00")
    other.do("UPDATE lock_clients SET seen_until = 'infinity'")
    assert claim(session)[:2] == ("run", "13:00")


def test_run_whose_session_is_gone_is_taken_over_before_its_lease_ends(
    sessions: Sessions, owner: psycopg.Connection
) -> None:
    runner, other, presence = sessions.open(), sessions.open(), uuid.uuid4()
    how = "delivery => 'at-least-once', catch_up => 'latest'"
    runner.do("SELECT register_presence(%s, '1 hour')", presence)
    runner.do("SELECT run_schedule('job') FROM claim_slot('job', delay => '1 hour')")
    owner.execute("UPDATE slot_runs SET outcome = 'succeeded'")
    owner.execute("UPDATE distributed_locks SET expires_at = '-infinity'")
    asking = claiming("delay => '1 hour'", how)
    assert runner.do(asking.replace("ttl =>", f"presence => '{presence}', ttl =>"))[0] == "run"
    assert other.do(asking)[0] == "running"
    runner.end()
    assert other.do(asking)[0] == "running", "its grace has begun"
    other.do(END_GRACE)
    assert other.do(asking)[0] == "run", "the dead run keeps its slot"
    assert [row.split()[-1] for row in ledger(owner)] == ["succeeded", "died", "running"]


def test_ledger_keeps_its_newest_rows_and_every_run_that_is_active(
    sessions: Sessions, clock: StillClock, owner: psycopg.Connection
) -> None:
    session, how = sessions.open(), "overlap => 'allow'"
    claim(session, more=how, ttl="2 hours")
    owner.execute(
        "INSERT INTO slot_runs (name, slot, last_slot, slots, number, outcome, claimed_at)"
        " SELECT 'job', now(), now(), 1, 0, 'missed', now() FROM generate_series(1, 600)"
    )
    clock.at("13:00")
    assert claim(session, more=how)[0] == "run"
    counts = owner.execute("SELECT outcome, count(*) FROM slot_runs GROUP BY 1 ORDER BY 1").fetchall()
    assert counts == [("missed", 499), (None, 2)]


def test_history_keeps_the_newest_hundred_events(sessions: Sessions, clock: StillClock) -> None:
    session = sessions.open()
    claim(session)
    session.do(
        "SELECT count(*) FROM generate_series(1, 60),"
        " LATERAL (SELECT pause_schedule('job') WHERE generate_series > 0) AS p,"
        " LATERAL (SELECT resume_schedule('job') WHERE p IS NOT NULL) AS r"
    )
    assert session.do("SELECT count(*), count(*) FILTER (WHERE event = 'registered') FROM schedule_events") == (100, 0)


def test_schedule_that_is_paused_or_runs_is_not_overdue(sessions: Sessions, clock: StillClock) -> None:
    session, overdue = sessions.open(), "SELECT overdue_since IS NOT NULL FROM list_schedules('job')"
    claim(session, ttl="2 hours")
    clock.at("13:30")
    assert session.do(overdue) == (False,), "the active run keeps the slot waiting"
    end(session, T1)
    clock.at("14:30")
    assert session.do(overdue) == (True,)
    session.do("SELECT pause_schedule('job')")
    assert session.do(overdue) == (False,)


def test_end_locks_the_row_of_the_schedule_before_the_row_of_the_lock(sessions: Sessions, clock: StillClock) -> None:
    """A claim locks them in this order too, so neither waits for the other without end."""
    runner, other = sessions.open(), sessions.open()
    claim(runner)
    other.do("BEGIN")
    other.do("SELECT FROM schedules FOR NO KEY UPDATE")
    report = runner.start("SELECT end_slot('job', %s, 'succeeded')", T1)
    runner.wait_until_blocked()
    other.do("SELECT FROM distributed_locks FOR UPDATE NOWAIT")
    other.do("COMMIT")
    assert report.result(60) == ("succeeded",)


def test_claim_under_an_older_snapshot_decides_nothing_by_it(sessions: Sessions, clock: StillClock) -> None:
    session, other = sessions.open(), sessions.open()
    end(session, claim(session)[2])
    session.do("BEGIN ISOLATION LEVEL REPEATABLE READ")
    session.do("SELECT FROM schedules")
    other.do("SELECT run_schedule('job')")
    with pytest.raises(psycopg.errors.SerializationFailure):
        session.do(claiming(HOURLY))
    session.do("ROLLBACK")
    assert claim(session)[0] == "run"
