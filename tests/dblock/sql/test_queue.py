"""Waiting in line, in SQL: the order, the wake-ups, the dead, and the interleavings that could lose one of them."""

from __future__ import annotations

import time
import uuid
from typing import Any

import psycopg
import pytest

from tests.support import mutants
from tests.support.sessions import Session, Sessions

HERE, THERE = uuid.UUID(int=0xC1), uuid.UUID(int=0xC2)
FIRST, SECOND, THIRD = (uuid.UUID(int=number) for number in (0xA1, 0xA2, 0xA3))

ACQUIRE = "SELECT granted, ticket, first FROM acquire('a', '30 s', 'me', NULL, %s, %s)"
AGAIN = "SELECT granted, ticket, first FROM acquire('a', '30 s', 'me', NULL, %s, %s, had_ticket => true)"
REDEEM = "SELECT granted FROM try_acquire('a', '30 s', attempt => %s, ticket => %s)"
TRY = "SELECT granted, waiting FROM try_acquire('a', attempt => gen_random_uuid())"
FREE = "SELECT release('a', (SELECT token FROM distributed_locks WHERE name = 'a'), durable => false)"


def heard(session: Session) -> list[tuple[str, str]]:
    """Return the notifications that have come to a session so far: its client's channel, and what they say."""
    session.do("SELECT 1")
    return [(one.channel, one.payload) for one in session.connection.notifies(timeout=0.2)]


def listen(session: Session, *clients: uuid.UUID) -> None:
    for client in clients:
        session.do(f"LISTEN dblock_{client.hex}")


def held_with_three_in_line(session: Session) -> None:
    session.do("SELECT try_acquire('a')")
    assert session.do(ACQUIRE, FIRST, HERE) == (False, 1, True)
    assert session.do(ACQUIRE, SECOND, THERE) == (False, 2, False)
    assert session.do(ACQUIRE, THIRD, HERE) == (False, 3, False)


def test_a_release_wakes_the_first_in_line_and_nobody_else(sessions: Sessions) -> None:
    session, ear = sessions.open(), sessions.open()
    listen(ear, HERE, THERE)
    held_with_three_in_line(session)
    for attempt, client, ticket in ((FIRST, HERE, 1), (SECOND, THERE, 2), (THIRD, HERE, 3)):
        session.do(FREE)
        assert heard(ear) == [(f"dblock_{client.hex}", str(attempt))]
        assert session.do(REDEEM, attempt, ticket) == (True,)
    session.do(FREE)
    assert heard(ear) == []
    assert session.do("SELECT count(*) FROM lock_tickets") == (0,)
    assert session.do(TRY) == (True, False), "nobody is left in line"


def test_a_free_lock_is_kept_for_those_in_line(sessions: Sessions) -> None:
    session = sessions.open()
    held_with_three_in_line(session)
    session.do(FREE)
    assert session.do(TRY) == (False, True)
    assert session.do(REDEEM, SECOND, 2) == (False,), "not its turn"
    assert session.do(AGAIN, SECOND, THERE) == (False, 2, False)
    assert session.do(ACQUIRE, uuid.UUID(int=0xA4), THERE) == (False, 4, False)
    assert session.do("SELECT granted FROM try_acquire('a', fair => false)") == (True,), "who says so may jump it"


def test_foreign_ticket_is_worth_nothing(sessions: Sessions) -> None:
    session = sessions.open()
    held_with_three_in_line(session)
    session.do(FREE)
    assert session.do(REDEEM, SECOND, 1) == (False,)
    assert session.do(REDEEM, FIRST, 1) == (True,)
    session.do(FREE)
    assert session.do(REDEEM, FIRST, 1) == (False,), "nor is one that was redeemed"


def test_a_ticket_sent_for_twice_is_one_ticket(sessions: Sessions) -> None:
    session = sessions.open()
    held_with_three_in_line(session)
    assert session.do(ACQUIRE, SECOND, THERE) == (False, 2, False)
    assert session.do(AGAIN, FIRST, HERE) == (False, 1, False)
    assert session.do("SELECT count(*) FROM lock_tickets") == (3,)


def test_a_grant_whose_answer_was_lost_is_found_again(sessions: Sessions) -> None:
    session = sessions.open()
    held_with_three_in_line(session)
    session.do(FREE)
    assert session.do(AGAIN, FIRST, HERE)[0] is True
    (token,) = session.do("SELECT token FROM acquire('a', '30 s', 'me', NULL, %s, %s)", FIRST, HERE)
    assert session.do("SELECT token FROM holder('a')") == (token,)
    assert session.do("SELECT count(*) FROM lock_tickets WHERE attempt = %s", FIRST) == (0,)


def test_waiter_that_leaves_the_queue_passes_a_free_lock_on(sessions: Sessions) -> None:
    session, ear = sessions.open(), sessions.open()
    held_with_three_in_line(session)
    session.do(FREE)
    listen(ear, HERE, THERE)
    assert session.do("SELECT abandon('a', %s)", FIRST) == (True,)
    assert heard(ear) == [(f"dblock_{THERE.hex}", str(SECOND))]
    session.do("SELECT leave_queue(%s)", THERE)
    assert heard(ear) == [(f"dblock_{HERE.hex}", str(THIRD))]
    assert session.do("SELECT abandon('a', %s)", FIRST) == (False,), "there was nothing to give back"


def test_waiter_that_leaves_at_the_moment_of_its_grant_passes_the_lock_on(sessions: Sessions) -> None:
    session, ear = sessions.open(), sessions.open()
    held_with_three_in_line(session)
    session.do(FREE)
    assert session.do(REDEEM, FIRST, 1) == (True,)
    listen(ear, THERE)
    assert session.do("SELECT abandon('a', %s, only_ticket => true)", FIRST) == (False,)
    assert session.do("SELECT count(*) FROM holder('a')") == (1,), "a grant is no place"
    assert session.do("SELECT abandon('a', %s)", FIRST) == (True,)
    assert heard(ear) == [(f"dblock_{THERE.hex}", str(SECOND))]


def test_a_line_that_nobody_alive_stands_in_holds_up_nobody(sessions: Sessions) -> None:
    session = sessions.open()
    held_with_three_in_line(session)
    session.do("UPDATE lock_clients SET seen_until = clock_timestamp()")
    session.do(FREE)
    assert session.do(TRY) == (True, False)
    assert session.do("SELECT count(*) FROM lock_tickets") == (0,)


def test_dead_queue_does_not_block_an_expired_lock(sessions: Sessions) -> None:
    session = sessions.open()
    held_with_three_in_line(session)
    session.do("UPDATE lock_clients SET seen_until = clock_timestamp()")
    session.do("UPDATE distributed_locks SET expires_at = clock_timestamp()")
    assert session.do(TRY) == (True, False), "the first who asks gets it, not the second"


def test_the_reaper_takes_a_lock_that_only_the_dead_wait_for_at_once(sessions: Sessions) -> None:
    session = sessions.open()
    held_with_three_in_line(session)
    session.do("UPDATE lock_clients SET seen_until = clock_timestamp()")
    session.do("UPDATE distributed_locks SET expires_at = clock_timestamp()")
    session.do("UPDATE lock_tickets SET since = clock_timestamp() + interval '1 s'")
    assert session.do("SELECT reap('0 s')") == (1,)


def test_the_dead_are_passed_over_all_together(sessions: Sessions) -> None:
    session, ear = sessions.open(), sessions.open()
    listen(ear, HERE, THERE)
    session.do("SELECT try_acquire('a')")
    for number in range(20):
        session.do(ACQUIRE, uuid.UUID(int=number + 1), HERE)
    session.do(ACQUIRE, SECOND, THERE)
    session.do("UPDATE lock_clients SET seen_until = clock_timestamp() WHERE client = %s", HERE)
    session.do(FREE)
    assert heard(ear) == [(f"dblock_{THERE.hex}", str(SECOND))]
    assert session.do(REDEEM, uuid.UUID(int=1), 1) == (False,), "its ticket is gone"
    assert session.do(REDEEM, SECOND, 21) == (True,)
    assert session.do(
        "SELECT granted, ticket FROM acquire('a', '30 s', 'me', NULL, %s, %s)", uuid.UUID(int=1), HERE
    ) == (
        False,
        22,
    ), "who comes back lines up anew"


def test_the_line_is_told_in_order_and_without_the_dead(sessions: Sessions) -> None:
    session = sessions.open()
    held_with_three_in_line(session)
    (line,) = session.do("SELECT queue('a')")
    assert [one["holder"] for one in line] == ["me"] * 3
    assert [one["since"] for one in line] == sorted(one["since"] for one in line)
    session.do("UPDATE lock_clients SET seen_until = clock_timestamp() WHERE client = %s", HERE)
    (line,) = session.do("SELECT queue('a')")
    assert len(line) == 1


def test_a_look_tells_who_is_first_and_what_there_is_to_see(sessions: Sessions) -> None:
    session = sessions.open()
    held_with_three_in_line(session)
    tickets, firsts, next_check, watched = session.do("SELECT * FROM heartbeat(%s, '{a,b}')", HERE)
    assert (tickets, firsts, watched) == (2, [FIRST], [False])
    assert 29 < next_check[0] <= 30
    assert session.do("SELECT * FROM heartbeat(%s, '{a}')", THERE) == (1, None, None, None)
    session.do(FREE)
    assert session.do("SELECT firsts, next_check FROM heartbeat(%s, '{a}')", HERE) == ([FIRST], [0])


# Interleavings: two sessions, held open at the step that matters.


def lined_up_while_it_is_released(sessions: Sessions) -> Any:
    """Somebody waits already; a second lines up while the release is under way. Return what the second is told."""
    releaser, comer = sessions.open(), sessions.open()
    releaser.do("SELECT try_acquire('a')")
    releaser.do(ACQUIRE, FIRST, HERE)
    releaser.do("SELECT abandon('a', %s)", FIRST)
    releaser.do("BEGIN")
    releaser.do(FREE)
    coming = comer.start(
        "SELECT granted, ticket, first, remaining FROM acquire('a', '30 s', 'x', NULL, %s, %s)", SECOND, THERE
    )
    time.sleep(0.05)
    releaser.do("COMMIT")
    return coming.result(20)


def test_waiter_that_joins_during_a_release_sees_the_release(sessions: Sessions) -> None:
    assert lined_up_while_it_is_released(sessions)[0] is True, "the line was empty, and the lock is free"


def test_queue_test_catches_a_check_before_the_queue_is_locked(sessions: Sessions, owner: psycopg.Connection) -> None:
    held, waited_for = "at_once := pg_try_advisory_xact_lock(queue_key);", "PERFORM pg_advisory_xact_lock(queue_key);"
    wrong = mutants.altered("11_acquire.sql", held, "at_once := true;")
    assert waited_for in wrong
    mutants.replace(owner, wrong.replace(waited_for, "").replace("FOR NO KEY UPDATE;", ";"))
    granted, ticket, _, _ = lined_up_while_it_is_released(sessions)
    assert (granted, ticket is not None) == (False, True), "it waits for a release that has been"


def test_a_release_during_the_lining_up_finds_the_ticket(sessions: Sessions) -> None:
    comer, releaser, ear = sessions.open(), sessions.open(), sessions.open()
    listen(ear, HERE, THERE)
    releaser.do("SELECT try_acquire('a')")
    releaser.do(ACQUIRE, FIRST, HERE)
    releaser.do("SELECT abandon('a', %s)", FIRST)
    comer.do("BEGIN")
    comer.do(ACQUIRE, SECOND, THERE)
    freeing = releaser.start(FREE)
    releaser.wait_until_blocked()
    comer.do("COMMIT")
    freeing.result(20)
    assert heard(ear) == [(f"dblock_{THERE.hex}", str(SECOND))]


def test_a_grant_on_its_way_to_the_disk_holds_up_nobody_who_lines_up(sessions: Sessions) -> None:
    holder, comer = sessions.open(), sessions.open()
    held_with_three_in_line(holder)
    holder.do(FREE)
    holder.do("BEGIN")
    assert holder.do(REDEEM, FIRST, 1) == (True,)
    started = time.monotonic()
    assert comer.do(ACQUIRE, uuid.UUID(int=0xA4), THERE) == (False, 4, False)
    assert time.monotonic() - started < 0.15
    holder.do("COMMIT")


def test_somebodys_long_transaction_is_not_waited_for(sessions: Sessions) -> None:
    user, comer = sessions.open(), sessions.open()
    user.do("SELECT try_acquire('a')")
    user.do("BEGIN")
    user.do("SELECT release('a', 1)")
    started = time.monotonic()
    assert comer.do(ACQUIRE, FIRST, HERE) == (False, None, False)
    assert time.monotonic() - started < 5
    assert comer.do("SHOW lock_timeout") == ("0",)
    user.do("ROLLBACK")
    assert comer.do(ACQUIRE, FIRST, HERE) == (False, 1, True)


def test_a_proof_under_way_keeps_even_the_first_in_line_waiting(sessions: Sessions) -> None:
    user, comer = sessions.open(), sessions.open()
    held_with_three_in_line(comer)
    user.do("BEGIN")
    assert user.do("SELECT assert_held('a', 1)") == (True,)
    comer.do("UPDATE distributed_locks SET expires_at = clock_timestamp()")
    assert comer.do(REDEEM, FIRST, 1) == (False,)
    assert comer.do(AGAIN, FIRST, HERE) == (False, 1, True)
    user.do("COMMIT")
    assert comer.do(REDEEM, FIRST, 1) == (True,)


def test_a_notification_is_never_sent_in_a_transaction_that_waits_for_the_disk(sessions: Sessions) -> None:
    session, ear = sessions.open(), sessions.open()
    listen(ear, HERE)
    held_with_three_in_line(session)
    session.do("SELECT release('a', 1, durable => true)")
    assert heard(ear) == []
    assert session.do("SELECT firsts, next_check FROM heartbeat(%s, '{a}')", HERE) == ([FIRST], [0]), "it finds out"


def test_a_stricter_isolation_makes_no_two_tickets_of_one_number(sessions: Sessions) -> None:
    first, second = sessions.open(), sessions.open()
    held_with_three_in_line(first)
    second.do("BEGIN ISOLATION LEVEL REPEATABLE READ")
    second.do("SELECT 1 FROM lock_tickets")
    first.do(ACQUIRE, uuid.UUID(int=0xA4), HERE)
    with pytest.raises(psycopg.errors.SerializationFailure):
        second.do(ACQUIRE, uuid.UUID(int=0xA5), THERE)


# Presence.


def hold_from(session: Session, client: uuid.UUID) -> None:
    session.do("SELECT register_presence(%s, '200 ms')", client)
    assert session.do("SELECT granted FROM try_acquire('a', presence => %s)", client) == (True,)


def eventually_granted(session: Session, within: float) -> float:
    """Try until granted; return how long it took."""
    started = time.monotonic()
    while session.do(TRY)[0] is not True:
        assert time.monotonic() - started < within, "the dead holder's lock stays held"
        time.sleep(0.01)
    return time.monotonic() - started


def test_a_lock_whose_holders_session_has_ended_is_taken_after_its_grace(sessions: Sessions) -> None:
    holder, taker = sessions.open(), sessions.open()
    hold_from(holder, HERE)
    assert taker.do("SELECT granted, remaining > 29 FROM try_acquire('a', attempt => gen_random_uuid())") == (
        False,
        True,
    )
    time.sleep(0.3)
    assert taker.do(TRY) == (False, False), "it is there, so time alone does nothing"
    holder.close()
    assert 0.19 < eventually_granted(taker, 5) < 2


def test_a_holder_that_says_in_time_that_it_is_there_keeps_its_lock_and_learns_what_it_has(sessions: Sessions) -> None:
    holder, back, taker = sessions.open(), sessions.open(), sessions.open()
    hold_from(holder, HERE)
    holder.close()
    while taker.do("SELECT remaining FROM try_acquire('a', attempt => gen_random_uuid())")[0] > 1:
        time.sleep(0.005)  # until it is seen to be gone
    assert back.do("SELECT withdraw_presence(%s, '{a,b}', '{1,2}')", HERE) == ([2],)
    time.sleep(0.4)
    assert taker.do(TRY) == (False, False)


def test_a_session_does_not_take_itself_for_dead(sessions: Sessions) -> None:
    session = sessions.open()
    hold_from(session, HERE)
    session.do(ACQUIRE, FIRST, HERE)
    for _ in range(5):
        session.do("SELECT heartbeat(%s, '{a}')", HERE)
        session.do(AGAIN, FIRST, HERE)
        time.sleep(0.1)
    assert session.do("SELECT count(*) FROM holder('a')") == (1,)
    assert session.do("SELECT gone_since FROM lock_presence") == (None,)


@pytest.mark.parametrize(
    "forgotten",
    ["UPDATE lock_presence SET incarnation = incarnation - interval '1 s'", "DELETE FROM lock_presence"],
    ids=["after a restart", "after a crash"],
)
def test_a_mark_of_another_incarnation_means_nothing(sessions: Sessions, forgotten: str) -> None:
    holder, taker = sessions.open(), sessions.open()
    hold_from(holder, HERE)
    holder.close()
    taker.do(forgotten)
    time.sleep(0.5)
    for _ in range(3):
        assert taker.do("SELECT granted, remaining > 20 FROM try_acquire('a', attempt => gen_random_uuid())") == (
            False,
            True,
        )


def test_a_holder_that_says_so_too_late_learns_that_it_was_taken(sessions: Sessions) -> None:
    holder, back, taker = sessions.open(), sessions.open(), sessions.open()
    hold_from(holder, HERE)
    holder.close()
    eventually_granted(taker, 5)
    assert back.do("SELECT withdraw_presence(%s, '{a}', '{1}')", HERE) == ([1],)


def taken_at_the_moment_of_the_excuse(sessions: Sessions) -> Any:
    """The excuse comes while somebody is taking the lock; return what it is told."""
    holder, back, taker = sessions.open(), sessions.open(), sessions.open()
    hold_from(holder, HERE)
    holder.close()
    deadline = time.monotonic() + 5
    while taker.do("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") != (0,):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    taker.do("UPDATE lock_presence SET gone_since = clock_timestamp() - interval '1 minute'")
    taker.do("BEGIN")
    assert taker.do(TRY) == (True, False)
    excuse = back.start("SELECT withdraw_presence(%s, '{a}', '{1}')", HERE)
    time.sleep(0.2)
    taker.do("COMMIT")
    return excuse.result(20)


def test_an_excuse_waits_for_who_is_taking_the_lock_and_sees_it(sessions: Sessions) -> None:
    assert taken_at_the_moment_of_the_excuse(sessions) == ([1],)


def test_withdrawal_on_an_old_snapshot_does_not_keep_a_taken_lock(sessions: Sessions) -> None:
    holder, back, taker = sessions.open(), sessions.open(), sessions.open()
    hold_from(holder, HERE)
    holder.close()
    back.do("BEGIN ISOLATION LEVEL REPEATABLE READ")
    back.do("SELECT 1 FROM distributed_locks")
    eventually_granted(taker, 5)
    with pytest.raises(psycopg.errors.SerializationFailure):
        back.do("SELECT withdraw_presence(%s, '{a}', '{1}')", HERE)


def test_a_ticket_learns_of_a_presence_that_came_after_it(sessions: Sessions) -> None:
    session = sessions.open()
    held_with_three_in_line(session)
    asking = "SELECT ticket, fresh FROM acquire('a', attempt => %s, client => %s, presence => %s, had_ticket => true)"
    assert session.do(asking, FIRST, HERE, THIRD) == (1, False)
    assert session.do("SELECT presence FROM lock_tickets WHERE number = 1") == (THIRD,)
    assert session.do(asking, FIRST, HERE, None) == (1, False)
    assert session.do("SELECT presence FROM lock_tickets WHERE number = 1") == (THIRD,)


def test_presence_test_catches_a_withdrawal_that_does_not_wait(sessions: Sessions, owner: psycopg.Connection) -> None:
    held, written = "remaining_grace.presence\n    FOR UPDATE SKIP LOCKED;", "    IF for_takeover AND seen.gone_since"
    wrong = mutants.altered("05_presence.sql", held, "remaining_grace.presence;")
    assert written in wrong
    mutants.replace(owner, wrong.replace(written, "    IF false AND seen.gone_since"))
    assert taken_at_the_moment_of_the_excuse(sessions) == (None,)


def test_a_lease_tied_anew_is_not_freed_for_the_sake_of_its_old_presence(sessions: Sessions) -> None:
    session = sessions.open()
    hold_from(session, HERE)
    session.do("SELECT renew_all('{a}', '{1}', '{30 s}')")
    assert session.do("SELECT presence FROM distributed_locks") == (HERE,), "a renewal by hand leaves the tie alone"
    session.do("SELECT renew_all('{a}', '{1}', '{30 s}', presence => %s)", THERE)
    assert session.do("SELECT presence FROM distributed_locks") == (THERE,)
    assert session.do("SELECT free_dead_holder('a', 1, %s)", HERE) == (False,)
    assert session.do("SELECT count(*) FROM holder('a')") == (1,)


def test_a_try_without_an_attempt_may_be_part_of_more_and_notes_nothing(sessions: Sessions) -> None:
    """Its transaction may stay open; what it held would hold up others."""
    holder, user, other = sessions.open(), sessions.open(), sessions.open()
    hold_from(holder, HERE)
    holder.close()
    user.do("BEGIN")
    assert user.do("SELECT granted FROM try_acquire('a')") == (False,)
    eventually_granted(other, 5)
    other.do(FREE)
    other.do("SELECT try_acquire('b')")
    other.do("SELECT acquire('b', '30 s', 'me', NULL, %s, %s)", FIRST, HERE)
    other.do("SELECT release('b', (SELECT token FROM holder('b')), durable => false)")
    user.do("COMMIT")
    user.do("BEGIN")
    assert user.do("SELECT granted, waiting FROM try_acquire('b')") == (False, True)
    assert other.do("SELECT granted FROM try_acquire('b', attempt => %s, ticket => 1)", FIRST) == (True,)


def test_a_newcomer_is_never_numbered_before_who_was_served(sessions: Sessions, owner: psycopg.Connection) -> None:
    """Somebody redeems the last ticket between the newcomer's look and its lining up."""
    comer, holder = sessions.open("held"), sessions.open()
    holder.do("SELECT try_acquire('a')")
    holder.do(ACQUIRE, FIRST, HERE)
    holder.do(FREE)
    gate = sessions.gate("INSERT OR UPDATE", "dblock.lock_clients")
    holder.do("SELECT 1")
    coming = comer.start(ACQUIRE, SECOND, THERE)
    gate.open()
    assert coming.result(20) == (False, 2, False)
    assert holder.do(REDEEM, FIRST, 1) == (True,)
    assert comer.do(ACQUIRE, THIRD, THERE) == (False, 3, False)


def test_a_transaction_that_sees_only_the_past_declares_nobody_dead(sessions: Sessions) -> None:
    holder, taker = sessions.open(), sessions.open()
    hold_from(holder, HERE)
    holder.close()
    taker.do("UPDATE lock_presence SET gone_since = clock_timestamp() - interval '1 minute'")
    taker.do("BEGIN ISOLATION LEVEL REPEATABLE READ")
    assert taker.do(TRY) == (False, False)
    taker.do("COMMIT")
    eventually_granted(taker, 5)


def test_a_waiter_that_is_gone_is_passed_over_and_has_its_place_if_it_is_there_after_all(sessions: Sessions) -> None:
    session, waiter, ear = sessions.open(), sessions.open(), sessions.open()
    listen(ear, HERE, THERE)
    waiter.do("SELECT register_presence(%s, '10 s')", THIRD)
    session.do("SELECT try_acquire('a')")
    assert session.do(ACQUIRE[:-1] + ", presence => %s)", FIRST, HERE, THIRD) == (False, 1, True)
    assert session.do(ACQUIRE, SECOND, THERE) == (False, 2, False)
    waiter.close()
    deadline = time.monotonic() + 5
    while session.do("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") != (0,):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    session.do(FREE)
    assert heard(ear) == [(f"dblock_{THERE.hex}", str(SECOND))]
    assert session.do(REDEEM, SECOND, 2) == (False,), "somebody is ahead who may be there after all"
    assert session.do(AGAIN, SECOND, THERE)[0] is True, "but is not seen now"
    session.do("SELECT withdraw_presence(%s, '{}', '{}')", THIRD)
    session.do(FREE)
    assert session.do(REDEEM, FIRST, 1) == (True,)


def test_the_session_of_a_waiter_wakes_it_too(sessions: Sessions) -> None:
    """Its own mark is no proof against it, whoever asks."""
    session, ear = sessions.open(), sessions.open()
    listen(ear, HERE)
    session.do("SELECT register_presence(%s, '10 s')", THIRD)
    session.do("SELECT try_acquire('a')")
    session.do(ACQUIRE[:-1] + ", presence => %s)", FIRST, HERE, THIRD)
    session.do(FREE)
    assert heard(ear) == [(f"dblock_{HERE.hex}", str(FIRST))]


def test_many_released_together_wake_each_its_next(sessions: Sessions) -> None:
    session, ear = sessions.open(), sessions.open()
    listen(ear, HERE)
    for number, name in enumerate(("a", "b"), 1):
        session.do("SELECT try_acquire(%s)", name)
        session.do(f"SELECT acquire('{name}', '30 s', 'me', NULL, %s, %s)", uuid.UUID(int=number), HERE)
    session.do("SELECT release_all('{a,b}', '{1,2}')")
    assert sorted(payload for _, payload in heard(ear)) == [str(uuid.UUID(int=1)), str(uuid.UUID(int=2))]


def test_leave_queue_removes_every_ticket_but_those_to_keep(sessions: Sessions) -> None:
    session = sessions.open()
    held_with_three_in_line(session)
    session.do("SELECT leave_queue(%s, keep => %s)", HERE, [THIRD])
    assert session.do("SELECT count(*) FROM lock_tickets") == (3,), "they have only just come"
    session.do("UPDATE lock_tickets SET since = since - interval '5 s'")
    session.do("SELECT leave_queue(%s, keep => %s)", HERE, [THIRD])
    assert session.do("SELECT array_agg(number ORDER BY number) FROM lock_tickets") == ([2, 3],)
    session.do("SELECT leave_queue(%s)", HERE)
    assert session.do("SELECT array_agg(number) FROM lock_tickets") == ([2],)
    assert session.do("SELECT array_agg(client) FROM lock_clients") == ([THERE],)


def test_the_reaper_takes_what_dead_sessions_have_left(sessions: Sessions) -> None:
    dead, session = sessions.open(), sessions.open()
    dead.do("SELECT register_presence(%s, '1 s')", HERE)
    session.do("SELECT register_presence(%s, '1 s')", THERE)
    dead.close()
    deadline = time.monotonic() + 5
    while session.do("SELECT count(*) FROM lock_presence WHERE gone_since IS NOT NULL") != (1,):
        assert time.monotonic() < deadline
        session.do("SELECT reap('0 s')")
    session.do("UPDATE lock_presence SET gone_since = gone_since - interval '2 minutes'")
    session.do("SELECT reap('0 s')")
    assert session.do("SELECT array_agg(presence) FROM lock_presence") == ([THERE],)


def test_the_reaper_leaves_a_lock_that_is_waited_for_and_clears_up_after_the_dead(sessions: Sessions) -> None:
    session = sessions.open()
    held_with_three_in_line(session)
    session.do("UPDATE distributed_locks SET expires_at = clock_timestamp() - interval '2 days'")
    assert session.do("SELECT reap('0 s')") == (0,)
    assert session.do("SELECT count(*) FROM lock_tickets") == (3,)
    session.do("UPDATE lock_clients SET seen_until = clock_timestamp() - interval '2 days'")
    session.do("UPDATE lock_tickets SET since = clock_timestamp() - interval '2 days'")
    assert session.do("SELECT reap('1 day')") == (1,)
    for table in ("lock_tickets", "lock_clients", "distributed_locks"):
        assert session.do(f"SELECT count(*) FROM {table}") == (0,), table


def test_no_setting_of_a_session_gives_a_lock_another_line(sessions: Sessions) -> None:
    """Under two keys two sessions would both believe that they have the line to themselves."""
    one, other = sessions.open(), sessions.open()
    other.do("SET quote_all_identifiers = on")
    one.do("BEGIN")
    one.do("SELECT lock_queue('a', true)")
    assert other.do("SELECT lock_queue('a', false)") == (False,)


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
    """A grace past the end of time would make those fail who come upon the presence, and not whoever left it."""
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=message):
        owner.execute(f"SELECT * FROM {call}".encode())


def test_a_presence_that_is_there_already_leaves_no_second_mark(sessions: Sessions) -> None:
    session = sessions.open()
    marks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
    session.do("SELECT register_presence(%s, '1 s')", FIRST)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="already registered"):
        session.do("SELECT register_presence(%s, '1 s')", FIRST)
    session.do("ROLLBACK")
    assert session.do(marks) == (1,)
