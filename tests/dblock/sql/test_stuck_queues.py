"""Queues and rows that another transaction keeps locked: no call waits for long, and no wake-up is lost for good."""

from __future__ import annotations

import time
import uuid

import psycopg
import pytest

from tests.support import mutants
from tests.support.eventually import eventually
from tests.support.machine import soon
from tests.support.sessions import Session, Sessions

HERE, THERE = uuid.UUID(int=0xC1), uuid.UUID(int=0xC2)
FIRST, SECOND, THIRD = (uuid.UUID(int=number) for number in (0xA1, 0xA2, 0xA3))

ACQUIRE = "SELECT granted, ticket, first FROM acquire('a', '30 s', 'me', NULL, %s, %s)"
HOLD = "SELECT token FROM try_acquire('a')"
TRY = "SELECT granted, waiting FROM try_acquire('a', attempt => gen_random_uuid())"
FREE = "SELECT release('a', (SELECT token FROM distributed_locks WHERE name = 'a'), durable => false)"
REDEEM = "SELECT granted FROM try_acquire('a', attempt => %s, ticket => %s)"
LOOK = "SELECT firsts, next_check FROM heartbeat(%s, '{a}')"


def notified(session: Session) -> list[str]:
    """Return the attempts that a session was notified of since the last time."""
    session.do("SELECT 1")
    return [one.payload for one in session.connection.notifies(timeout=0.2)]


def listener(sessions: Sessions) -> Session:
    session = sessions.open()
    for client in (HERE, THERE):
        session.do(f"LISTEN dblock_{client.hex}")
    return session


def hold_with_an_empty_queue(session: Session, ttl: str = "30 s") -> None:
    """Hold the lock, which is marked as waited for: the only waiter has left again."""
    session.do("SELECT try_acquire('a', %s)", ttl)
    session.do(ACQUIRE, FIRST, HERE)
    session.do("SELECT abandon('a', %s)", FIRST)
    assert session.do("SELECT waiting FROM distributed_locks") == (True,)


# A transaction that stays open after acquire() has locked the queue.


@pytest.mark.second_stage
def test_release_wakes_the_first_waiter_while_the_queue_is_locked(sessions: Sessions) -> None:
    careless, holder, heard = sessions.open(), sessions.open(), listener(sessions)
    holder.do(HOLD)
    holder.do(ACQUIRE, FIRST, HERE)
    careless.do("BEGIN")
    assert careless.do(ACQUIRE, SECOND, THERE) == (False, 2, False)
    with soon(0.3):
        assert holder.do(FREE) == (True,)
    assert notified(heard) == [str(FIRST)]
    with soon(0.3):
        assert holder.do(REDEEM, FIRST, 1) == (True,), "a ticket is redeemed without the queue"


@pytest.mark.second_stage
def test_release_does_not_wait_for_a_client_that_joins_without_end(sessions: Sessions) -> None:
    newcomer, holder, heard = sessions.open(), sessions.open(), listener(sessions)
    hold_with_an_empty_queue(holder)
    newcomer.do("BEGIN")
    assert newcomer.do(ACQUIRE, SECOND, THERE) == (False, 2, False)
    with soon(0.3):
        assert holder.do(FREE) == (True,)
    newcomer.do("COMMIT")
    assert notified(heard) == []
    assert holder.do(LOOK, THERE) == ([SECOND], [0]), "the waiter's heartbeat finds the lock free"


@pytest.mark.second_stage
@pytest.mark.alone
def test_call_that_queues_reports_a_locked_queue_soon(sessions: Sessions) -> None:
    careless, other = sessions.open(), sessions.open()
    other.do(HOLD)
    other.do(ACQUIRE, FIRST, HERE)
    careless.do("BEGIN")
    careless.do(ACQUIRE, SECOND, THERE)
    for wait in ("true", "false"):
        with soon(0.2):
            assert other.do(ACQUIRE[:-1] + f", wait => {wait})", THIRD, HERE) == (False, None, False)
    with soon(0.3):
        assert other.do("SELECT abandon('a', %s)", FIRST) == (True,)
    with soon(0.3):
        other.do("SELECT leave_queue(%s)", HERE)
    assert other.do("SHOW lock_timeout") == ("0",)


@pytest.mark.second_stage
@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("07_queue.sql", "lock_queue(wake_past_the_dead.name, 10)", "lock_queue(wake_past_the_dead.name, 1000)"),
        ("11_acquire.sql", "'20ms'", "'1s'"),
    ],
)
def test_tests_of_a_locked_queue_catch_a_longer_wait(
    sessions: Sessions, owner: psycopg.Connection, file: str, right: str, wrong: str
) -> None:
    mutants.replace(owner, mutants.altered(file, right, wrong))
    test = (
        test_release_does_not_wait_for_a_client_that_joins_without_end
        if file == "07_queue.sql"
        else test_call_that_queues_reports_a_locked_queue_soon
    )
    with pytest.raises(AssertionError, match=r"took [01]\.\d+ s"):
        test(sessions)


@pytest.mark.second_stage
def test_calls_of_a_client_do_not_wait_for_its_open_transaction(sessions: Sessions) -> None:
    """A client calls acquire() in a transaction that stays open, and queues for another lock in another session."""
    careless, other = sessions.open(), sessions.open()
    other.do(HOLD)
    other.do("SELECT token FROM try_acquire('b')")
    careless.do("BEGIN")
    careless.do("SELECT ticket FROM acquire('b', '30 s', 'me', NULL, %s, %s)", FIRST, HERE)
    asking = other.start(ACQUIRE, SECOND, HERE)
    try:
        with soon(0.3):
            assert asking.result(60) == (False, 1, True)
            assert other.do("SELECT tickets FROM heartbeat(%s, '{}')", HERE) == (1,)
    finally:
        careless.do("ROLLBACK")


@pytest.mark.second_stage
def test_call_that_queues_does_not_wait_for_a_dead_client_that_redeems_its_ticket(
    sessions: Sessions, owner: psycopg.Connection
) -> None:
    """The dead client's transaction is still open, for example because its commit waits for a standby."""
    frozen, waiter, newcomer = sessions.open(), sessions.open(), sessions.open()
    frozen.do(HOLD)
    frozen.do(ACQUIRE, FIRST, HERE)
    waiter.do(ACQUIRE, SECOND, THERE)
    frozen.do(FREE)
    frozen.do("BEGIN")
    assert frozen.do(REDEEM, FIRST, 1) == (True,)
    owner.execute("UPDATE dblock.lock_clients SET seen_until = '-infinity' WHERE client = %s", [HERE])
    asking = waiter.start(ACQUIRE.replace("%s, %s", "%s, %s, had_ticket => true"), SECOND, THERE)
    try:
        with soon(0.3):
            assert asking.result(60) == (False, 2, True)
            assert newcomer.do(ACQUIRE, THIRD, THERE) == (False, 3, False), "the queue is not locked"
    finally:
        frozen.do("ROLLBACK")
    assert waiter.do(ACQUIRE.replace("%s, %s", "%s, %s, had_ticket => true"), SECOND, THERE)[0], "no ticket is ahead"


@pytest.mark.second_stage
@pytest.mark.alone
@pytest.mark.parametrize("asking", ["try_acquire('new', attempt => %s)", "try_acquire('new')"])
def test_first_grant_of_a_name_that_is_being_granted_is_refused_soon(sessions: Sessions, asking: str) -> None:
    first, second = sessions.open(), sessions.open()
    first.do("BEGIN")
    assert first.do("SELECT granted FROM try_acquire('new')") == (True,)
    with soon(0.2):
        reply = second.do(f"SELECT granted, remaining FROM {asking}", *([FIRST] if "%s" in asking else []))
    assert reply == (False, 0)
    first.do("COMMIT")
    assert second.do("SELECT granted, remaining > 20 FROM try_acquire('new')") == (False, True)


@pytest.mark.second_stage
@pytest.mark.parametrize("row", ["new", "old"])
def test_retry_of_a_grant_waits_for_two_seconds_at_most(sessions: Sessions, row: str) -> None:
    first, second = sessions.open(), sessions.open()
    if row == "old":
        first.do("SELECT release('a', (SELECT token FROM try_acquire('a')))")
    first.do("BEGIN")
    first.do(HOLD)
    with soon(2.5), pytest.raises(psycopg.errors.LockNotAvailable):
        second.do("SELECT granted FROM try_acquire('a', attempt => %s, retry => true)", FIRST)


# A waiter that leaves while the lock is released.


def leave_during_a_release(sessions: Sessions, owner: psycopg.Connection, wrong: bool = False) -> list[str]:
    """Let the first waiter leave while a release that notifies it is uncommitted. Return the notified attempts."""
    # Leaving waits only 20 ms for the release: too short for a test to see it wait.
    patient = mutants.altered("06_free_lock.sql", "'20ms'", "'60s'")
    if wrong:
        patient = mutants.altered("14_abandon.sql", "lock_row_briefly(abandon.name)", "true")
    mutants.replace(owner, patient)
    holder, leaver, heard = sessions.open(), sessions.open(), listener(sessions)
    holder.do(HOLD)
    holder.do(ACQUIRE, FIRST, HERE)
    holder.do(ACQUIRE, SECOND, THERE)
    holder.do("BEGIN")
    assert holder.do(FREE) == (True,)
    leaving = leaver.start("SELECT abandon('a', %s)", FIRST)
    if wrong:
        assert leaving.result(60) == (True,)
    else:
        leaver.wait_until_blocked()
    holder.do("COMMIT")
    assert leaving.result(60) == (True,)
    return notified(heard)


def test_waiter_that_leaves_during_a_release_wakes_the_next_one(sessions: Sessions, owner: psycopg.Connection) -> None:
    assert leave_during_a_release(sessions, owner) == [str(FIRST), str(SECOND)]


def test_leaving_test_catches_a_waiter_that_does_not_look_at_the_lock(
    sessions: Sessions, owner: psycopg.Connection
) -> None:
    assert leave_during_a_release(sessions, owner, wrong=True) == [str(FIRST)]


def test_release_while_the_first_waiter_leaves_wakes_the_next_one(sessions: Sessions) -> None:
    holder, leaver, heard = sessions.open(), sessions.open(), listener(sessions)
    holder.do(HOLD)
    holder.do(ACQUIRE, FIRST, HERE)
    holder.do(ACQUIRE, SECOND, THERE)
    leaver.do("BEGIN")
    assert leaver.do("SELECT abandon('a', %s)", FIRST) == (True,)
    freeing = holder.start(FREE)
    holder.wait_until_blocked()
    leaver.do("COMMIT")
    assert freeing.result(60) == (True,)
    assert notified(heard) == [str(SECOND)]


@pytest.mark.second_stage
def test_waiter_leaves_a_lock_whose_row_stays_locked(sessions: Sessions) -> None:
    user, leaver = sessions.open(), sessions.open()
    user.do(HOLD)
    user.do(ACQUIRE, FIRST, HERE)
    user.do("BEGIN")
    user.do("SELECT release('a', (SELECT token FROM distributed_locks))")
    with soon(0.3):
        assert leaver.do("SELECT abandon('a', %s)", FIRST) == (True,)
    assert leaver.do("SELECT count(*) FROM lock_tickets") == (0,)
    user.do("COMMIT")
    assert leaver.do(TRY) == (True, False)


# The row of a queue.


def test_queue_whose_row_was_lost_continues_its_numbers(sessions: Sessions, owner: psycopg.Connection) -> None:
    session = sessions.open()
    session.do(HOLD)
    session.do(ACQUIRE, FIRST, HERE)
    session.do(ACQUIRE, SECOND, HERE)
    owner.execute("TRUNCATE lock_queues")  # as a crash of the server does
    assert session.do(ACQUIRE, THIRD, THERE) == (False, 3, False)
    session.do(FREE)
    for attempt, ticket in ((FIRST, 1), (SECOND, 2), (THIRD, 3)):
        assert session.do(REDEEM, attempt, ticket) == (True,)
        session.do(FREE)
    owner.execute("TRUNCATE lock_queues")
    session.do(HOLD)
    assert session.do(ACQUIRE, FIRST, HERE) == (False, 4, True), "higher than every ticket that was served"


@pytest.mark.second_stage
def test_reaper_deletes_the_queues_of_idle_locks(sessions: Sessions, owner: psycopg.Connection) -> None:
    session, joining = sessions.open(), sessions.open()
    session.do(HOLD)
    session.do(ACQUIRE, FIRST, HERE)
    session.do("SELECT abandon('a', %s)", FIRST)
    session.do(FREE)
    owner.execute("INSERT INTO lock_queues VALUES ('without a lock', 7), ('locked', 7)")
    joining.do("BEGIN")
    joining.do("SELECT lock_queue('locked', 1)")
    with soon(0.3):
        assert session.do("SELECT reap('0 s')") == (1,)
    assert session.do("SELECT array_agg(name) FROM lock_queues") == (["locked"],)


# Dead waiters and dead holders, as a call without an attempt sees them.


def test_plain_try_takes_a_lock_that_only_dead_clients_wait_for(sessions: Sessions) -> None:
    session = sessions.open()
    for beginning in ("SELECT 1", "BEGIN"):
        session.do(HOLD)
        session.do(ACQUIRE, FIRST, HERE)
        session.do("SELECT release('a', (SELECT token FROM distributed_locks))")
        session.do(beginning)
        assert session.do("SELECT granted, waiting FROM try_acquire('a')") == (False, True)
        session.do("COMMIT" if beginning == "BEGIN" else "SELECT 1")
        session.do("UPDATE lock_clients SET seen_until = clock_timestamp()")
        session.do(beginning)
        assert session.do("SELECT granted, waiting FROM try_acquire('a')") == (True, False), beginning
        session.do("COMMIT" if beginning == "BEGIN" else "SELECT 1")
        session.do(FREE)


@pytest.mark.second_stage
@pytest.mark.parametrize("by", ["", "dead holder's key is taken"])
def test_plain_try_takes_the_lock_of_a_dead_holder(sessions: Sessions, by: str) -> None:
    """Any role can wait for an advisory key that it sees in pg_locks, and has it when the holder's session ends."""
    holder, taker, outsider = sessions.open(), sessions.open(), sessions.open()
    holder.do("SELECT register_presence(%s, '200 ms')", HERE)
    holder.do("SELECT try_acquire('a', presence => %s)", HERE)
    if by:
        (key,) = taker.do("SELECT advisory_key FROM lock_presence")
        waiting = outsider.start("SELECT pg_advisory_lock(%s)", key)
        outsider.wait_until_blocked()
    assert taker.do("SELECT granted FROM try_acquire('a')") == (False,)
    time.sleep(0.3)
    assert taker.do("SELECT granted FROM try_acquire('a')") == (False,), "the holder's session is open"
    holder.close()
    if by:
        waiting.result(60)
    with soon(1.0):
        eventually(lambda: taker.do("SELECT granted FROM try_acquire('a')") == (True,), "the grant")
    if by:
        assert outsider.do("SELECT pg_advisory_unlock_all()") == ("",)


def test_session_that_came_after_older_statistics_is_not_gone(sessions: Sessions) -> None:
    """In one transaction, Postgres reads the list of sessions once."""
    taker = sessions.open()
    taker.do("BEGIN")
    taker.do("SELECT count(*) FROM pg_stat_activity")
    holder = sessions.open()
    holder.do("SELECT register_presence(%s, '1 hour')", HERE)
    holder.do("SELECT try_acquire('a', presence => %s)", HERE)
    assert taker.do(TRY) == (False, False)
    assert taker.do("SELECT gone_since FROM lock_presence") == (None,)
