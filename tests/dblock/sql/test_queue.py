"""The queue in SQL: its order, wake-ups, dead waiters, and the interleavings that could lose a waiter or a wake-up."""

from __future__ import annotations

import time
import uuid
from typing import Any

import psycopg
import pytest

from tests.support import mutants
from tests.support.machine import soon
from tests.support.sessions import END_GRACE, Session, Sessions
from tests.support.still_clock import StillClock
from tests.support.tokens import T1, T2

pytestmark = pytest.mark.usefixtures("known_tokens")

HERE, THERE = uuid.UUID(int=0xC1), uuid.UUID(int=0xC2)
FIRST, SECOND, THIRD = (uuid.UUID(int=number) for number in (0xA1, 0xA2, 0xA3))

ACQUIRE = "SELECT granted, ticket, first FROM acquire('a', '30 s', 'me', NULL, %s, %s)"
AGAIN = "SELECT granted, ticket, first FROM acquire('a', '30 s', 'me', NULL, %s, %s, had_ticket => true)"
REDEEM = "SELECT granted FROM try_acquire('a', '30 s', attempt => %s, ticket => %s)"
TRY = "SELECT granted, waiting FROM try_acquire('a', attempt => gen_random_uuid())"
FREE = "SELECT release('a', (SELECT token FROM distributed_locks WHERE name = 'a'), durable => false)"


def notifications(session: Session) -> list[tuple[str, str]]:
    """Return the notifications that a session has received so far: the client's channel and the payload."""
    session.do("SELECT 1")
    return [(one.channel, one.payload) for one in session.connection.notifies(timeout=0.2)]


def listen(session: Session, *clients: uuid.UUID) -> None:
    for client in clients:
        session.do(f"LISTEN dblock_{client.hex}")


def hold_with_three_waiters(session: Session) -> None:
    session.do("SELECT try_acquire('a')")
    assert session.do(ACQUIRE, FIRST, HERE) == (False, 1, True)
    assert session.do(ACQUIRE, SECOND, THERE) == (False, 2, False)
    assert session.do(ACQUIRE, THIRD, HERE) == (False, 3, False)


def test_release_wakes_only_the_first_waiter(sessions: Sessions) -> None:
    session, listener = sessions.open(), sessions.open()
    listen(listener, HERE, THERE)
    hold_with_three_waiters(session)
    for attempt, client, ticket in ((FIRST, HERE, 1), (SECOND, THERE, 2), (THIRD, HERE, 3)):
        session.do(FREE)
        assert notifications(listener) == [(f"dblock_{client.hex}", str(attempt))]
        assert session.do(REDEEM, attempt, ticket) == (True,)
    session.do(FREE)
    assert notifications(listener) == []
    assert session.do("SELECT count(*) FROM lock_tickets") == (0,)
    assert session.do(TRY) == (True, False), "the queue is empty"


def test_free_lock_is_reserved_for_the_queue(sessions: Sessions) -> None:
    session = sessions.open()
    hold_with_three_waiters(session)
    session.do(FREE)
    assert session.do(TRY) == (False, True)
    assert session.do(REDEEM, SECOND, 2) == (False,), "the waiter is not first"
    assert session.do(AGAIN, SECOND, THERE) == (False, 2, False)
    assert session.do(ACQUIRE, uuid.UUID(int=0xA4), THERE) == (False, 4, False)
    assert session.do("SELECT granted FROM try_acquire('a', fair => false)") == (True,), (
        "an unfair request may jump the queue"
    )


def test_release_wakes_a_waiter_that_has_waited_for_long(sessions: Sessions) -> None:
    session, listener = sessions.open(), sessions.open()
    listen(listener, HERE, THERE)
    hold_with_three_waiters(session)
    session.do("UPDATE lock_tickets SET since = since - interval '1 h'")
    session.do(FREE)
    assert notifications(listener) == [(f"dblock_{HERE.hex}", str(FIRST))]


def test_try_on_a_reserved_lock_does_not_delay_the_waiter_that_was_woken(sessions: Sessions) -> None:
    session, trying = sessions.open(), sessions.open()
    hold_with_three_waiters(session)
    session.do(FREE)
    trying.do("BEGIN")
    assert trying.do(TRY) == (False, True)
    assert session.do(REDEEM, FIRST, 1) == (True,), "the try has locked neither the lock nor its queue"
    trying.do("COMMIT")


def test_ticket_is_redeemed_after_the_tickets_ahead_were_given_up(sessions: Sessions) -> None:
    session = sessions.open()
    hold_with_three_waiters(session)
    session.do(FREE)
    assert session.do(REDEEM, THIRD, 3) == (False,)
    session.do("SELECT abandon('a', %s)", FIRST)
    assert session.do(REDEEM, THIRD, 3) == (False,)
    session.do("SELECT abandon('a', %s)", SECOND)
    assert session.do(REDEEM, THIRD, 3) == (True,)


def test_ticket_of_another_attempt_or_a_redeemed_ticket_is_refused(sessions: Sessions) -> None:
    session = sessions.open()
    hold_with_three_waiters(session)
    session.do(FREE)
    assert session.do(REDEEM, SECOND, 1) == (False,)
    assert session.do(REDEEM, FIRST, 1) == (True,)
    session.do(FREE)
    assert session.do(REDEEM, FIRST, 1) == (False,), "the ticket was redeemed before"


def test_retried_acquire_keeps_its_ticket(sessions: Sessions) -> None:
    session = sessions.open()
    hold_with_three_waiters(session)
    assert session.do(ACQUIRE, SECOND, THERE) == (False, 2, False)
    assert session.do(AGAIN, FIRST, HERE) == (False, 1, False)
    assert session.do("SELECT count(*) FROM lock_tickets") == (3,)


def test_grant_whose_reply_was_lost_is_found_by_the_retry(sessions: Sessions) -> None:
    session = sessions.open()
    hold_with_three_waiters(session)
    session.do(FREE)
    assert session.do(AGAIN, FIRST, HERE)[0] is True
    (token,) = session.do("SELECT token FROM acquire('a', '30 s', 'me', NULL, %s, %s)", FIRST, HERE)
    assert session.do("SELECT token FROM holder('a')") == (token,)
    assert session.do("SELECT count(*) FROM lock_tickets WHERE attempt = %s", FIRST) == (0,)


def test_waiter_that_leaves_the_queue_passes_a_free_lock_on(sessions: Sessions) -> None:
    session, listener = sessions.open(), sessions.open()
    hold_with_three_waiters(session)
    session.do(FREE)
    listen(listener, HERE, THERE)
    assert session.do("SELECT abandon('a', %s)", FIRST) == (True,)
    assert notifications(listener) == [(f"dblock_{THERE.hex}", str(SECOND))]
    session.do("SELECT leave_queue(%s)", THERE)
    assert notifications(listener) == [(f"dblock_{HERE.hex}", str(THIRD))]
    assert session.do("SELECT abandon('a', %s)", FIRST) == (False,), "the attempt has neither a ticket nor a grant"


def test_waiter_that_leaves_at_the_moment_of_its_grant_passes_the_lock_on(sessions: Sessions) -> None:
    session, listener = sessions.open(), sessions.open()
    hold_with_three_waiters(session)
    session.do(FREE)
    assert session.do(REDEEM, FIRST, 1) == (True,)
    listen(listener, THERE)
    assert session.do("SELECT abandon('a', %s, only_ticket => true)", FIRST) == (False,)
    assert session.do("SELECT count(*) FROM holder('a')") == (1,), "only_ticket leaves the grant alone"
    assert session.do("SELECT abandon('a', %s)", FIRST) == (True,)
    assert notifications(listener) == [(f"dblock_{THERE.hex}", str(SECOND))]


def test_queue_of_dead_clients_does_not_block_a_free_lock(sessions: Sessions) -> None:
    session = sessions.open()
    hold_with_three_waiters(session)
    session.do("UPDATE lock_clients SET seen_until = clock_timestamp()")
    session.do(FREE)
    assert session.do(TRY) == (True, False)
    assert session.do("SELECT count(*) FROM lock_tickets") == (0,)


def test_dead_queue_does_not_block_an_expired_lock(sessions: Sessions) -> None:
    session = sessions.open()
    hold_with_three_waiters(session)
    session.do("UPDATE lock_clients SET seen_until = clock_timestamp()")
    session.do("UPDATE distributed_locks SET expires_at = clock_timestamp()")
    assert session.do(TRY) == (True, False), "the first request gets the lock, not the second"


def test_reaper_removes_a_lock_that_only_dead_clients_wait_for(sessions: Sessions) -> None:
    session = sessions.open()
    hold_with_three_waiters(session)
    session.do("UPDATE lock_clients SET seen_until = clock_timestamp()")
    session.do("UPDATE distributed_locks SET expires_at = clock_timestamp()")
    session.do("UPDATE lock_tickets SET since = clock_timestamp() + interval '1 hour'")
    assert session.do("SELECT reap('0 s')") == (1,)


def test_release_skips_all_dead_waiters_at_once(sessions: Sessions) -> None:
    session, listener = sessions.open(), sessions.open()
    listen(listener, HERE, THERE)
    session.do("SELECT try_acquire('a')")
    for number in range(20):
        session.do(ACQUIRE, uuid.UUID(int=number + 1), HERE)
    session.do(ACQUIRE, SECOND, THERE)
    session.do("UPDATE lock_clients SET seen_until = clock_timestamp() WHERE client = %s", HERE)
    # A ticket counts for two seconds, as the heartbeat does that was found when it was issued.
    session.do("UPDATE lock_tickets SET since = since - interval '2 s'")
    session.do(FREE)
    assert notifications(listener) == [(f"dblock_{THERE.hex}", str(SECOND))]
    assert session.do(REDEEM, uuid.UUID(int=1), 1) == (False,), "the dead waiter's ticket was deleted"
    assert session.do(REDEEM, SECOND, 21) == (True,)
    assert session.do(
        "SELECT granted, ticket FROM acquire('a', '30 s', 'me', NULL, %s, %s)", uuid.UUID(int=1), HERE
    ) == (
        False,
        22,
    ), "a waiter that returns gets a new ticket at the end"


def test_queue_lists_waiters_in_order_without_dead_clients(sessions: Sessions) -> None:
    session = sessions.open()
    hold_with_three_waiters(session)
    (queue,) = session.do("SELECT queue('a')")
    assert [one["holder"] for one in queue] == ["me"] * 3
    assert [one["since"] for one in queue] == sorted(one["since"] for one in queue)
    session.do("UPDATE lock_clients SET seen_until = clock_timestamp() WHERE client = %s", HERE)
    (queue,) = session.do("SELECT queue('a')")
    assert len(queue) == 1


def test_heartbeat_returns_first_waiters_and_their_next_check(sessions: Sessions, clock: StillClock) -> None:
    session = sessions.open()
    hold_with_three_waiters(session)
    assert session.do("SELECT * FROM heartbeat(%s, '{a,b}')", HERE) == (2, [FIRST], [30], [False])
    clock.advance(10)
    assert session.do("SELECT * FROM heartbeat(%s, '{a,b}')", HERE) == (2, [FIRST], [20], [False])
    assert session.do("SELECT * FROM heartbeat(%s, '{a}')", THERE) == (1, None, None, None)
    session.do(FREE)
    assert session.do("SELECT firsts, next_check FROM heartbeat(%s, '{a}')", HERE) == ([FIRST], [0])


# Interleavings: two sessions, one of them held at the decisive step.


def join_during_a_release(sessions: Sessions, *, waits: bool) -> tuple[Any, Any]:
    """Let a waiter join the queue while a release is uncommitted. Return the replies during and after the release.

    An earlier waiter has joined and left, so the lock is marked as waited for.
    """
    releaser, newcomer = sessions.open(), sessions.open()
    releaser.do("SELECT try_acquire('a')")
    releaser.do(ACQUIRE, FIRST, HERE)
    releaser.do("SELECT abandon('a', %s)", FIRST)
    releaser.do("BEGIN")
    releaser.do(FREE)
    joining = newcomer.start(ACQUIRE, SECOND, THERE)
    if waits:
        newcomer.wait_until_blocked()
    else:
        joining.result(60)
    releaser.do("COMMIT")
    return joining.result(60), newcomer.do(ACQUIRE, SECOND, THERE)


def test_waiter_that_joins_during_a_release_sees_the_release(sessions: Sessions) -> None:
    during, afterwards = join_during_a_release(sessions, waits=False)
    assert during == (False, None, False), "a ticket would wait for a release that is already over"
    assert afterwards[0] is True, "the queue was empty, and the lock is free"


def test_queue_test_catches_a_check_before_the_queue_is_locked(sessions: Sessions, owner: psycopg.Connection) -> None:
    tried, waited_for = "    IF FOUND THEN\n        SELECT l.token", "PERFORM lock_or_create_queue("
    wrong = mutants.altered("11_acquire.sql", tried, "    IF true THEN\n        SELECT l.token")
    assert waited_for in wrong
    mutants.replace(owner, wrong.replace(waited_for, "PERFORM length("))
    owner.execute("INSERT INTO lock_queues VALUES ('a', 0)")
    during, _ = join_during_a_release(sessions, waits=True)
    assert during[1] is not None, "the mutant waits for a release that is already over"


def test_release_during_a_join_wakes_the_new_waiter(sessions: Sessions, owner: psycopg.Connection) -> None:
    # A release waits only 10 ms for the client that joins: too short for a test to see it wait.
    mutants.replace(owner, mutants.altered("07_queue.sql", "(wake_past_the_dead.name, 10)", "(name, 60000)"))
    newcomer, releaser, listener = sessions.open(), sessions.open(), sessions.open()
    listen(listener, HERE, THERE)
    releaser.do("SELECT try_acquire('a')")
    releaser.do(ACQUIRE, FIRST, HERE)
    releaser.do("SELECT abandon('a', %s)", FIRST)
    newcomer.do("BEGIN")
    newcomer.do(ACQUIRE, SECOND, THERE)
    freeing = releaser.start(FREE)
    releaser.wait_until_blocked()
    newcomer.do("COMMIT")
    freeing.result(60)
    assert notifications(listener) == [(f"dblock_{THERE.hex}", str(SECOND))]


@pytest.mark.second_stage
def test_uncommitted_grant_does_not_delay_a_new_waiter(sessions: Sessions) -> None:
    holder, newcomer = sessions.open(), sessions.open()
    hold_with_three_waiters(holder)
    holder.do(FREE)
    holder.do("BEGIN")
    assert holder.do(REDEEM, FIRST, 1) == (True,)
    with soon(0.3):
        assert newcomer.do(ACQUIRE, uuid.UUID(int=0xA4), THERE) == (False, 4, False)
    holder.do("COMMIT")


@pytest.mark.second_stage
def test_acquire_does_not_wait_for_a_users_long_transaction(sessions: Sessions) -> None:
    user, newcomer = sessions.open(), sessions.open()
    user.do("SELECT try_acquire('a')")
    user.do("BEGIN")
    user.do(f"SELECT release('a', {T1})")
    started = time.monotonic()
    assert newcomer.do(ACQUIRE, FIRST, HERE) == (False, None, False)
    assert time.monotonic() - started < 15
    assert newcomer.do("SHOW lock_timeout") == ("0",)
    user.do("ROLLBACK")
    assert newcomer.do(ACQUIRE, FIRST, HERE) == (False, 1, True)


def test_open_proof_keeps_even_the_first_waiter_waiting(sessions: Sessions) -> None:
    user, newcomer = sessions.open(), sessions.open()
    hold_with_three_waiters(newcomer)
    user.do("BEGIN")
    assert user.do(f"SELECT assert_held('a', {T1})") == (True,)
    newcomer.do("UPDATE distributed_locks SET expires_at = clock_timestamp()")
    assert newcomer.do(REDEEM, FIRST, 1) == (False,)
    assert newcomer.do(AGAIN, FIRST, HERE) == (False, 1, True)
    user.do("COMMIT")
    assert newcomer.do(REDEEM, FIRST, 1) == (True,)


def test_durable_release_sends_no_notification(sessions: Sessions) -> None:
    session, listener = sessions.open(), sessions.open()
    listen(listener, HERE)
    hold_with_three_waiters(session)
    session.do(f"SELECT release('a', {T1}, durable => true)")
    assert notifications(listener) == []
    assert session.do("SELECT firsts, next_check FROM heartbeat(%s, '{a}')", HERE) == ([FIRST], [0]), (
        "the heartbeat finds the lock free"
    )


def test_stricter_isolation_never_issues_one_ticket_number_twice(sessions: Sessions) -> None:
    first, second = sessions.open(), sessions.open()
    hold_with_three_waiters(first)
    second.do("BEGIN ISOLATION LEVEL REPEATABLE READ")
    second.do("SELECT 1 FROM lock_tickets")
    first.do(ACQUIRE, uuid.UUID(int=0xA4), HERE)
    with pytest.raises(psycopg.errors.SerializationFailure):
        second.do(ACQUIRE, uuid.UUID(int=0xA5), THERE)


# Presence.

KEYS = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"


LEFT = "SELECT granted, remaining FROM try_acquire('a', attempt => gen_random_uuid())"


def acquire_with_presence(session: Session, client: uuid.UUID) -> None:
    """Acquire the lock for an hour in a session that has a grace of ten seconds."""
    session.do("SELECT register_presence(%s, '10 s')", client)
    assert session.do("SELECT granted FROM try_acquire('a', '1 hour', presence => %s)", client) == (True,)


def take_over(session: Session) -> None:
    """Take the lock of a holder whose session has ended, once its grace is over."""
    assert session.do(TRY) == (False, False), "its grace has begun"
    session.do(END_GRACE)
    assert session.do(TRY) == (True, False), "the dead holder's lock stays held"


def test_lock_of_an_ended_session_is_taken_after_its_grace(sessions: Sessions, clock: StillClock) -> None:
    holder, taker = sessions.open(), sessions.open()
    acquire_with_presence(holder, HERE)
    assert taker.do(LEFT) == (False, 3600)
    clock.advance(20)
    assert taker.do(LEFT) == (False, 3580), "the holder's session is open, so time alone frees nothing"
    holder.end()
    assert taker.do(LEFT) == (False, 10), "its grace begins when a session finds that it has ended"
    clock.advance(9.9)
    assert taker.do(TRY) == (False, False)
    clock.advance(0.1)
    assert taker.do(TRY) == (True, False), "after its grace, and not when the lease ends"


def test_withdrawal_within_the_grace_keeps_the_lock_and_names_the_lost_ones(
    sessions: Sessions, clock: StillClock
) -> None:
    holder, back, taker = sessions.open(), sessions.open(), sessions.open()
    acquire_with_presence(holder, HERE)
    holder.end()
    assert taker.do(LEFT) == (False, 10)
    clock.advance(9)
    assert back.do(f"SELECT withdraw_presence(%s, '{{a,b}}', '{{{T1},{T2}}}')", HERE) == ([2],)
    clock.advance(11)
    assert taker.do(TRY) == (False, False)


def test_session_never_declares_itself_dead(sessions: Sessions, clock: StillClock) -> None:
    session = sessions.open()
    acquire_with_presence(session, HERE)
    session.do(ACQUIRE, FIRST, HERE)
    for _ in range(5):
        session.do("SELECT heartbeat(%s, '{a}')", HERE)
        session.do(AGAIN, FIRST, HERE)
        clock.advance(5)
    assert session.do("SELECT count(*) FROM holder('a')") == (1,)
    assert session.do("SELECT gone_since FROM lock_presence") == (None,)


@pytest.mark.parametrize(
    "forgotten",
    ["UPDATE lock_presence SET incarnation = incarnation - interval '1 s'", "DELETE FROM lock_presence"],
    ids=["after a restart", "after a crash"],
)
def test_presence_of_another_server_start_frees_no_lock(sessions: Sessions, clock: StillClock, forgotten: str) -> None:
    holder, taker = sessions.open(), sessions.open()
    acquire_with_presence(holder, HERE)
    holder.end()
    taker.do(forgotten)
    assert taker.do(LEFT) == (False, 3600)
    taker.do("UPDATE lock_presence SET gone_since = '-infinity'")
    clock.advance(20)
    assert taker.do(LEFT) == (False, 3580), "the ttl decides"


def test_withdrawal_after_the_grace_names_the_taken_lock(sessions: Sessions) -> None:
    holder, back, taker = sessions.open(), sessions.open(), sessions.open()
    acquire_with_presence(holder, HERE)
    holder.end()
    take_over(taker)
    assert back.do(f"SELECT withdraw_presence(%s, '{{a}}', '{{{T1}}}')", HERE) == ([1],)


def withdraw_during_a_takeover(sessions: Sessions, *, waits: bool) -> Any:
    """Withdraw the presence while another session takes the lock, and return the reply of withdraw_presence."""
    holder, back, taker = sessions.open(), sessions.open(), sessions.open()
    acquire_with_presence(holder, HERE)
    holder.end()
    taker.do("UPDATE lock_presence SET gone_since = clock_timestamp() - interval '1 minute'")
    taker.do("BEGIN")
    assert taker.do(TRY) == (True, False)
    withdrawal = back.start(f"SELECT withdraw_presence(%s, '{{a}}', '{{{T1}}}')", HERE)
    if waits:
        back.wait_until_blocked()
    else:
        withdrawal.result(60)
    taker.do("COMMIT")
    return withdrawal.result(60)


def test_withdrawal_waits_for_a_takeover_and_names_the_taken_lock(sessions: Sessions) -> None:
    assert withdraw_during_a_takeover(sessions, waits=True) == ([1],)


def test_withdrawal_on_an_old_snapshot_does_not_keep_a_taken_lock(sessions: Sessions) -> None:
    holder, back, taker = sessions.open(), sessions.open(), sessions.open()
    acquire_with_presence(holder, HERE)
    holder.end()
    back.do("BEGIN ISOLATION LEVEL REPEATABLE READ")
    back.do("SELECT 1 FROM distributed_locks")
    take_over(taker)
    with pytest.raises(psycopg.errors.SerializationFailure):
        back.do(f"SELECT withdraw_presence(%s, '{{a}}', '{{{T1}}}')", HERE)


def test_ticket_keeps_a_presence_that_was_registered_after_it(sessions: Sessions) -> None:
    session = sessions.open()
    hold_with_three_waiters(session)
    asking = "SELECT ticket, fresh FROM acquire('a', attempt => %s, client => %s, presence => %s, had_ticket => true)"
    assert session.do(asking, FIRST, HERE, THIRD) == (1, False)
    assert session.do("SELECT presence FROM lock_tickets WHERE number = 1") == (THIRD,)
    assert session.do(asking, FIRST, HERE, None) == (1, False)
    assert session.do("SELECT presence FROM lock_tickets WHERE number = 1") == (THIRD,)


def test_presence_test_catches_a_withdrawal_that_does_not_wait(sessions: Sessions, owner: psycopg.Connection) -> None:
    held, written = "        FOR UPDATE SKIP LOCKED;", "    IF for_takeover AND seen.gone_since"
    wrong = mutants.altered("05_presence.sql", held, "        ;")
    assert written in wrong
    mutants.replace(owner, wrong.replace(written, "    IF false AND seen.gone_since"))
    assert withdraw_during_a_takeover(sessions, waits=False) == (None,)


def test_lease_with_a_new_presence_is_not_freed_for_its_old_one(sessions: Sessions) -> None:
    session = sessions.open()
    acquire_with_presence(session, HERE)
    session.do(f"SELECT renew_all('{{a}}', '{{{T1}}}', '{{30 s}}')")
    assert session.do("SELECT presence FROM distributed_locks") == (HERE,), (
        "a renewal without a presence keeps the old one"
    )
    session.do(f"SELECT renew_all('{{a}}', '{{{T1}}}', '{{30 s}}', presence => %s)", THERE)
    assert session.do("SELECT presence FROM distributed_locks") == (THERE,)
    assert session.do(f"SELECT free_dead_holder('a', {T1}, %s)", HERE) == (False,)
    assert session.do("SELECT count(*) FROM holder('a')") == (1,)


def test_try_without_an_attempt_holds_no_row_in_its_transaction(sessions: Sessions) -> None:
    """Its transaction may stay open, and a row that it kept locked would block other sessions."""
    holder, user, other = sessions.open(), sessions.open(), sessions.open()
    acquire_with_presence(holder, HERE)
    holder.end()
    user.do("BEGIN")
    user.do("SELECT pg_sleep(0.001)")  # a statement that follows BEGIN at once may be a call with its own transaction
    assert user.do("SELECT granted FROM try_acquire('a')") == (False,)
    take_over(other)
    other.do(FREE)
    other.do("SELECT try_acquire('b')")
    other.do("SELECT acquire('b', '30 s', 'me', NULL, %s, %s)", FIRST, HERE)
    other.do("SELECT release('b', (SELECT token FROM holder('b')), durable => false)")
    user.do("COMMIT")
    user.do("BEGIN")
    user.do("SELECT pg_sleep(0.001)")  # a statement that follows BEGIN at once may be a call with its own transaction
    assert user.do("SELECT granted, waiting FROM try_acquire('b')") == (False, True)
    assert other.do("SELECT granted FROM try_acquire('b', attempt => %s, ticket => 1)", FIRST) == (True,)


def test_new_ticket_number_is_never_below_a_served_one(sessions: Sessions, owner: psycopg.Connection) -> None:
    """Another session redeems the last ticket between the newcomer's check of the queue and its new ticket."""
    newcomer, holder = sessions.open("held"), sessions.open()
    holder.do("SELECT try_acquire('a')")
    holder.do(ACQUIRE, FIRST, HERE)
    holder.do(FREE)
    gate = sessions.gate("INSERT OR UPDATE", "dblock.lock_clients")
    holder.do("SELECT 1")
    joining = newcomer.start(ACQUIRE, SECOND, THERE)
    gate.open()
    assert joining.result(60) == (False, 2, False)
    assert holder.do(REDEEM, FIRST, 1) == (True,)
    assert newcomer.do(ACQUIRE, THIRD, THERE) == (False, 3, False)


def test_transaction_with_an_old_snapshot_declares_no_holder_dead(sessions: Sessions) -> None:
    """The holder has withdrawn its presence since the snapshot, so only its ttl decides."""
    holder, back, taker = sessions.open(), sessions.open(), sessions.open()
    acquire_with_presence(holder, HERE)
    holder.end()
    taker.do("UPDATE lock_presence SET gone_since = clock_timestamp() - interval '1 minute'")
    taker.do("BEGIN ISOLATION LEVEL REPEATABLE READ")
    taker.do("SELECT FROM distributed_locks")
    back.do("SELECT withdraw_presence(%s, '{a}', '{1}')", HERE)
    assert taker.do(TRY) == (False, False)
    taker.do("COMMIT")
    assert taker.do(TRY) == (False, False)


def test_skipped_waiter_keeps_its_position_if_it_withdraws_in_time(sessions: Sessions) -> None:
    session, waiter, listener = sessions.open(), sessions.open(), sessions.open()
    listen(listener, HERE, THERE)
    waiter.do("SELECT register_presence(%s, '1 hour')", THIRD)
    session.do("SELECT try_acquire('a')")
    assert session.do(ACQUIRE[:-1] + ", presence => %s)", FIRST, HERE, THIRD) == (False, 1, True)
    assert session.do(ACQUIRE, SECOND, THERE) == (False, 2, False)
    waiter.end()
    session.do(FREE)
    assert notifications(listener) == [(f"dblock_{THERE.hex}", str(SECOND))]
    assert session.do(REDEEM, SECOND, 2) == (False,), "the waiter ahead may still withdraw its presence in time"
    assert session.do(AGAIN, SECOND, THERE)[0] is True, "acquire skips the waiter ahead, whose session has ended"
    session.do("SELECT withdraw_presence(%s, '{}', '{}')", THIRD)
    session.do(FREE)
    assert session.do(REDEEM, FIRST, 1) == (True,)


def test_release_in_the_waiters_own_session_wakes_the_waiter(sessions: Sessions) -> None:
    """A session that finds its own advisory lock must not conclude that the lock's owner is dead."""
    session, listener = sessions.open(), sessions.open()
    listen(listener, HERE)
    session.do("SELECT register_presence(%s, '1 hour')", THIRD)
    session.do("SELECT try_acquire('a')")
    session.do(ACQUIRE[:-1] + ", presence => %s)", FIRST, HERE, THIRD)
    session.do(FREE)
    assert notifications(listener) == [(f"dblock_{HERE.hex}", str(FIRST))]


def test_release_all_wakes_the_first_waiter_of_each_lock(sessions: Sessions) -> None:
    session, listener = sessions.open(), sessions.open()
    listen(listener, HERE)
    for number, name in enumerate(("a", "b"), 1):
        session.do("SELECT try_acquire(%s)", name)
        session.do(f"SELECT acquire('{name}', '30 s', 'me', NULL, %s, %s)", uuid.UUID(int=number), HERE)
    session.do(f"SELECT release_all('{{a,b}}', '{{{T1},{T2}}}')")
    assert sorted(payload for _, payload in notifications(listener)) == [str(uuid.UUID(int=1)), str(uuid.UUID(int=2))]


def test_leave_queue_removes_every_ticket_but_those_to_keep(sessions: Sessions, clock: StillClock) -> None:
    session = sessions.open()
    hold_with_three_waiters(session)
    clock.advance(3)
    session.do("SELECT leave_queue(%s, keep => %s)", HERE, [THIRD])
    assert session.do("SELECT count(*) FROM lock_tickets") == (3,), "the tickets are too new to be removed"
    clock.advance(0.001)
    session.do("SELECT leave_queue(%s, keep => %s)", HERE, [THIRD])
    assert session.do("SELECT array_agg(number ORDER BY number) FROM lock_tickets") == ([2, 3],)
    session.do("SELECT leave_queue(%s)", HERE)
    assert session.do("SELECT array_agg(number) FROM lock_tickets") == ([2],)
    assert session.do("SELECT array_agg(client) FROM lock_clients") == ([THERE],)


def test_reaper_removes_presences_of_ended_sessions(sessions: Sessions) -> None:
    dead, session = sessions.open(), sessions.open()
    dead.do("SELECT register_presence(%s, '10 s')", HERE)
    session.do("SELECT register_presence(%s, '10 s')", THERE)
    dead.end()
    session.do("SELECT reap('0 s')")
    assert session.do("SELECT count(*) FROM lock_presence WHERE gone_since IS NOT NULL") == (1,)
    session.do("UPDATE lock_presence SET gone_since = gone_since - interval '2 minutes'")
    session.do("SELECT reap('0 s')")
    assert session.do("SELECT array_agg(presence) FROM lock_presence") == ([THERE],)


def test_reaper_keeps_a_lock_with_waiters_and_removes_dead_ones(sessions: Sessions) -> None:
    session = sessions.open()
    hold_with_three_waiters(session)
    session.do("UPDATE distributed_locks SET expires_at = clock_timestamp() - interval '2 days'")
    assert session.do("SELECT reap('0 s')") == (0,)
    assert session.do("SELECT count(*) FROM lock_tickets") == (3,)
    session.do("UPDATE lock_clients SET seen_until = clock_timestamp() - interval '2 days'")
    session.do("UPDATE lock_tickets SET since = clock_timestamp() - interval '2 days'")
    assert session.do("SELECT reap('1 day')") == (1,)
    for table in ("lock_tickets", "lock_clients", "distributed_locks"):
        assert session.do(f"SELECT count(*) FROM {table}") == (0,), table


def test_no_session_setting_changes_which_queue_is_locked(sessions: Sessions) -> None:
    one, other = sessions.open(), sessions.open()
    other.do("SET quote_all_identifiers = on")
    one.do("BEGIN")
    assert one.do("SELECT lock_queue('a', 1)") == (True,)
    assert other.do("SELECT lock_queue('a', 1)") == (False,)
    assert other.do("SELECT lock_queue('b', 1)") == (True,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("register_presence(NULL, '1 s')", "needs a UUID and a grace of 10 ms to 24 h; got none and 00:00:01"),
        (f"register_presence('{FIRST}', NULL)", "got .* and none"),
        (f"register_presence('{FIRST}', '9 ms')", "10 ms to 24 h"),
        (f"register_presence('{FIRST}', '178000000 years')", "10 ms to 24 h"),
        (f"register_presence('{FIRST}', '1 year -360 days 1 hour')", "10 ms to 24 h"),
        ("heartbeat(NULL, '{a}')", "heartbeat needs a client"),
    ],
)
def test_heartbeat_and_presence_refuse_missing_or_unbounded_arguments(
    owner: psycopg.Connection, call: str, message: str
) -> None:
    """A grace past the end of time would fail in the sessions that read the presence, not in the one that wrote it."""
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=message):
        owner.execute(f"SELECT * FROM {call}".encode())


def test_presence_registered_twice_leaves_one_advisory_lock(sessions: Sessions) -> None:
    session = sessions.open()
    marks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
    session.do("SELECT register_presence(%s, '1 s')", FIRST)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="already registered"):
        session.do("SELECT register_presence(%s, '1 s')", FIRST)
    session.do("ROLLBACK")
    assert session.do(marks) == (1,)
    other = sessions.open()
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="already registered"):
        other.do("SELECT register_presence(%s, '1 s')", FIRST)
    other.do("ROLLBACK")
    assert other.do(marks) == (0,)
