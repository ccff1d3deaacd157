"""Stricter isolation, for callers from any language: a queue, a takeover and the reaper work as under READ COMMITTED.

A transaction with an older snapshot concludes nothing from it: neither that a queue is empty nor that a client is dead.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import psycopg
import pytest

from tests.support import mutants
from tests.support.sessions import END_GRACE, Session, Sessions
from tests.support.stages import first
from tests.support.still_clock import StillClock

HERE, THERE = uuid.UUID(int=0xC1), uuid.UUID(int=0xC2)
FIRST, SECOND = (uuid.UUID(int=number) for number in (0xA1, 0xA2))

ACQUIRE = "SELECT granted, ticket, first FROM acquire('a', '30 s', 'me', NULL, %s, %s)"
TRY = "SELECT granted, waiting FROM try_acquire('a', attempt => gen_random_uuid())"
PLAIN = "SELECT granted, waiting FROM try_acquire('a')"
FREE = "SELECT release('a', (SELECT token FROM distributed_locks WHERE name = 'a'), durable => false)"
REDEEM = "SELECT granted FROM try_acquire('a', attempt => %s, ticket => %s)"

QUEUE = f"SELECT granted FROM acquire('a', attempt => '{FIRST}', client => '{HERE}', had_ticket => true)"

LEVELS = ["read committed", "repeatable read", "serializable"]

Open = Callable[[], Session]


@pytest.fixture(params=first(2, LEVELS))
def strict(request: pytest.FixtureRequest, sessions: Sessions) -> Open:
    """Open sessions whose transactions have this isolation by default."""

    def opened() -> Session:
        session = sessions.open()
        session.do(f"SET default_transaction_isolation = '{request.param}'")
        return session

    return opened


def hold_with_a_waiter(session: Session) -> None:
    session.do("SELECT try_acquire('a')")
    assert session.do(ACQUIRE, FIRST, HERE) == (False, 1, True)


@pytest.mark.parametrize("asking", [TRY, PLAIN])
def test_lock_that_was_once_waited_for_is_granted_again(strict: Open, asking: str) -> None:
    session = strict()
    hold_with_a_waiter(session)
    session.do(FREE)
    assert session.do(asking) == (False, True), "reserved for its queue"
    assert session.do(REDEEM, FIRST, 1) == (True,)
    session.do(FREE)
    for _ in range(3):
        assert session.do(asking) == (True, False)
        session.do(FREE)


def test_lock_released_durably_is_granted_after_its_last_waiter(strict: Open) -> None:
    """A durable release wakes no waiter, and so leaves the lock marked as waited for."""
    session = strict()
    hold_with_a_waiter(session)
    for _ in range(2):
        session.do("SELECT release('a', (SELECT token FROM distributed_locks))")
        session.do(REDEEM, FIRST, 1)
    assert session.do("SELECT waiting FROM distributed_locks") == (True,)
    assert session.do(PLAIN) == (True, False)


def test_queue_of_dead_clients_does_not_count(strict: Open, owner: psycopg.Connection) -> None:
    # A transaction that began a second ago may have an old snapshot, and this one may stand still for longer.
    mutants.replace(owner, mutants.altered("01_checks.sql", "interval '1 second'", "interval '1 hour'"))
    session = strict()
    hold_with_a_waiter(session)
    session.do("UPDATE lock_clients SET seen_until = clock_timestamp()")
    session.do(FREE)
    assert session.do(PLAIN) == (True, False)


def test_waiters_queue_and_are_served_in_turn(strict: Open) -> None:
    session, other = strict(), strict()
    hold_with_a_waiter(session)
    assert other.do(ACQUIRE, SECOND, THERE) == (False, 2, False)
    session.do(FREE)
    assert other.do(REDEEM, SECOND, 2) == (False,)
    assert session.do(REDEEM, FIRST, 1) == (True,)
    session.do(FREE)
    assert other.do("SELECT granted FROM acquire('a', attempt => %s, client => %s)", SECOND, THERE) == (True,)


@pytest.mark.parametrize("asking", [TRY, PLAIN, QUEUE])
def test_lock_of_a_dead_holder_is_taken_after_its_grace(strict: Open, asking: str) -> None:
    holder, taker = strict(), strict()
    holder.do("SELECT register_presence(%s, '1 hour')", HERE)
    holder.do("SELECT try_acquire('a', presence => %s)", HERE)
    assert taker.do(TRY) == (False, False)
    holder.end()
    assert taker.do(asking)[0] is False, "its grace has begun"
    assert taker.do("SELECT gone_since IS NOT NULL FROM lock_presence") == (True,)
    taker.do(END_GRACE)
    assert taker.do(asking)[0] is True, "the dead holder's lock stays held"


def test_reaper_deletes_a_lock_that_was_once_waited_for(strict: Open) -> None:
    session = strict()
    hold_with_a_waiter(session)
    session.do("SELECT release('a', (SELECT token FROM distributed_locks))")
    session.do("UPDATE lock_clients SET seen_until = clock_timestamp()")
    assert session.do("SELECT reap('0 s')") == (1,)
    assert session.do("SELECT count(*) FROM lock_tickets") == (0,)


# Older snapshots.


def join_after_a_snapshot(sessions: Sessions, level: str) -> tuple[Session, Session]:
    """Return a session with a snapshot in which the queue of a held lock is empty, and one that has joined since."""
    old, other = sessions.open(), sessions.open()
    other.do("SELECT try_acquire('a')")
    other.do(ACQUIRE, FIRST, HERE)
    other.do("SELECT abandon('a', %s)", FIRST)
    old.do(f"BEGIN ISOLATION LEVEL {level}")
    old.do("SELECT FROM distributed_locks")
    assert other.do(ACQUIRE, SECOND, THERE)[0] is False
    return old, other


def let_expire(clock: StillClock, session: Session) -> None:
    """Let the lease expire without a change of its row. The waiter still sends heartbeats."""
    clock.advance(30)
    session.do("SELECT heartbeat(%s, '{}')", THERE)


@pytest.mark.parametrize("level", first(2, LEVELS))
def test_older_snapshot_does_not_show_an_empty_queue(sessions: Sessions, clock: StillClock, level: str) -> None:
    old, other = join_after_a_snapshot(sessions, level)
    let_expire(clock, other)
    assert old.do(TRY) == (False, True)
    old.do("ROLLBACK")
    assert other.do("SELECT granted FROM acquire('a', attempt => %s, client => %s)", SECOND, THERE) == (True,)


def test_snapshot_test_catches_a_join_that_does_not_write_the_queue(
    sessions: Sessions, owner: psycopg.Connection, clock: StillClock
) -> None:
    written = "UPDATE lock_queues AS q SET last_ticket = q.last_ticket + 1 WHERE q.name = acquire.name\n"
    wrong = mutants.altered("11_acquire.sql", written, "")
    read = "SELECT q.last_ticket + 1 AS last_ticket FROM lock_queues AS q WHERE q.name = acquire.name"
    mutants.replace(owner, wrong.replace("RETURNING q.last_ticket", read))
    clock.govern()
    old, other = join_after_a_snapshot(sessions, "repeatable read")
    let_expire(clock, other)
    assert old.do(TRY) == (True, False), "the mutant jumps the queue"


@pytest.mark.parametrize("level", first(2, LEVELS))
def test_release_with_an_older_snapshot_succeeds_without_a_wake_up(sessions: Sessions, level: str) -> None:
    old, other = sessions.open(), sessions.open()
    other.do("SELECT try_acquire('a')")
    other.do(ACQUIRE, FIRST, HERE)
    other.do("SELECT abandon('a', %s)", FIRST)
    old.do(f"BEGIN ISOLATION LEVEL {level}")
    old.do("SELECT FROM distributed_locks")
    assert other.do(ACQUIRE, SECOND, THERE)[0] is False
    assert old.do(FREE) == (True,)
    old.do("COMMIT")
    assert other.do("SELECT firsts, next_check FROM heartbeat(%s, '{a}')", THERE) == ([SECOND], [0])


@pytest.mark.second_stage
def test_older_snapshot_does_not_hide_the_heartbeats_of_a_waiter(sessions: Sessions) -> None:
    old, other = sessions.open(), sessions.open()
    hold_with_a_waiter(other)
    other.do("UPDATE lock_clients SET seen_until = clock_timestamp() + interval '0.5 s'")
    old.do("BEGIN ISOLATION LEVEL REPEATABLE READ")
    old.do("SELECT FROM distributed_locks")
    other.do("SELECT heartbeat(%s, '{a}')", HERE)
    time.sleep(1.1)
    old.do(FREE)
    old.do("COMMIT")
    assert other.do("SELECT count(*) FROM lock_tickets") == (1,)
    assert other.do(REDEEM, FIRST, 1) == (True,)


@pytest.mark.parametrize("level", first(1, LEVELS[1:]))
def test_client_that_joined_with_an_older_snapshot_succeeds_in_a_new_transaction(
    sessions: Sessions, level: str
) -> None:
    one, second = sessions.open(), sessions.open()
    hold_with_a_waiter(one)
    second.do(f"BEGIN ISOLATION LEVEL {level}")
    second.do("SELECT FROM lock_tickets")
    one.do(ACQUIRE, SECOND, THERE)
    third = uuid.UUID(int=0xA3)
    with pytest.raises(psycopg.errors.SerializationFailure):
        second.do(ACQUIRE, third, HERE)
    second.do("ROLLBACK")
    assert second.do(ACQUIRE, third, HERE) == (False, 3, False)
