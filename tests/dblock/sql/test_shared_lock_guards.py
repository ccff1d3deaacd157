"""Shared locks in SQL under interleavings: a grant never meets a share that is held, proved or being renewed."""

from __future__ import annotations

import contextlib
import uuid

import psycopg
import pytest

from tests.support.sessions import END_GRACE, Sessions
from tests.support.shared_locks import (
    AGAIN,
    ASK,
    EXPIRE,
    FREE,
    HERE,
    PERMIT,
    TRY,
    attempt,
    free,
    keep_clients_alive,
    take,
)
from tests.support.stages import first

PRESENCE = uuid.UUID(int=0xF1)


@pytest.fixture(autouse=True)
def _clients_stay_alive(owner: psycopg.Connection) -> None:
    keep_clients_alive(owner)


@pytest.mark.parametrize(("proved", "asked"), [("read", "write"), ("write", "read"), ("write", "write")])
def test_proved_share_keeps_others_out_after_it_has_expired(sessions: Sessions, proved: str, asked: str) -> None:
    holder, other = sessions.open(), sessions.open()
    token, share = take(holder, proved)
    holder.do("BEGIN")
    assert holder.do("SELECT assert_held(%s, %s)", share, token) == (True,)
    other.do(EXPIRE, share)
    assert other.do(TRY, asked) == (False,)
    reply = other.do(
        "SELECT granted, first, remaining FROM acquire_shared('a', 'read-write', %s, attempt => %s, client => %s)",
        asked, attempt(2), HERE,
    )  # fmt: skip
    assert reply == (False, True, 0.2), "the waiter asks again soon, but not at once"
    holder.do("COMMIT")
    assert other.do(AGAIN, asked, attempt(2), HERE) == (True,)


def test_proved_permit_counts_after_it_has_expired(sessions: Sessions) -> None:
    holder, other = sessions.open(), sessions.open()
    for number in range(3):
        assert holder.do(PERMIT, 3, attempt(number)) == (True,)
    (token,) = holder.do("SELECT token FROM holder('s#2')")
    holder.do("BEGIN")
    assert holder.do("SELECT assert_held('s#2', %s)", token) == (True,)
    other.do(EXPIRE, "s#2")
    assert other.do(PERMIT, 3, attempt(9)) == (False,)
    other.do("SELECT resize_semaphore('s', 2)")
    free(other, "s#0")
    assert other.do(PERMIT, 2, attempt(9)) == (False,), "permit 1 is held, and permit 2 is proved"
    holder.do("COMMIT")
    assert other.do(PERMIT, 2, attempt(9)) == (True,)


@pytest.mark.second_stage
def test_share_that_is_being_renewed_keeps_a_writer_out(sessions: Sessions) -> None:
    holder, writer = sessions.open(), sessions.open()
    for ttl in (0.2, 2, 8):
        token, share = take(holder, "read", ttl=f"{ttl} s")
        holder.do("BEGIN")
        if holder.do("SELECT remaining FROM renew(%s, %s, '60 s')", share, token) == (60.0,):
            break
        holder.do("ROLLBACK")  # this machine was too slow
    writer.do("SELECT pg_sleep(%s)", ttl + 0.05)
    assert writer.do(TRY, "write") == (False,), "the renewal is not committed, and the old deadline has passed"
    holder.do("COMMIT")
    assert writer.do(TRY, "write") == (False,)


def test_two_grants_of_one_shared_lock_are_serial(sessions: Sessions) -> None:
    """Without the lock of the head, both would count the same free permit."""
    held, free = sessions.open("held"), sessions.open()
    free.do(PERMIT, 2, attempt(1))
    gate = sessions.gate("UPDATE")
    one = held.start(PERMIT, 2, attempt(2))
    held.wait_until_blocked()
    busy = free.do("SELECT granted, remaining, ticket, fresh FROM acquire_shared('s', 'semaphore', attempt => %s)",
                   attempt(3))  # fmt: skip
    assert busy == (False, 0.0, None, None)
    gate.open()
    assert one.result(60) == (True,)
    assert free.do(PERMIT, 2, attempt(3)) == (False,)
    assert free.do("SELECT count(*) FROM holder('s')") == (2,)


def test_try_for_a_free_share_with_a_locked_row_is_not_decided(sessions: Sessions) -> None:
    """A transaction of the client itself may have locked it, for a moment: a try asks again."""
    locks, free = sessions.open(), sessions.open()
    asks = "SELECT granted, remaining, fresh FROM acquire_shared('s', 'semaphore', permits => 1, attempt => %s)"
    assert free.do(asks, attempt(1))[0] is True
    assert free.do(asks, attempt(2))[::2] == (False, False), "held"
    assert free.do("SELECT release(name, token) FROM distributed_locks WHERE head = 's'") == (True,)
    locks.do("BEGIN")
    locks.do("SELECT 1 FROM distributed_locks WHERE head = 's' FOR UPDATE")
    assert free.do(asks, attempt(2)) == (False, 0.0, None)
    locks.do("ROLLBACK")
    assert free.do(asks, attempt(2))[0] is True


def test_dead_reader_is_gone_while_another_reader_renews(sessions: Sessions) -> None:
    session, dying = sessions.open(), sessions.open()
    dying.do("SELECT register_presence(%s, '1 hour')", PRESENCE)
    token, share = take(session, "read", 1)
    take(session, "read", 2, presence=PRESENCE)
    assert session.do(ASK, "write", attempt(3), HERE) == (False,)
    dying.end()
    for readers in (2, 1):
        assert session.do("SELECT count(*) FROM renew(%s, %s, '30 s')", share, token) == (1,)
        assert session.do(AGAIN, "write", attempt(3), HERE) == (False,)
        assert session.do("SELECT count(*) FROM holder('a')") == (readers,)
        session.do(END_GRACE)
    assert session.do("SELECT event FROM list_history('a#reader-1')") == ("died",)
    assert session.do(FREE, share, share) == (True,)
    assert session.do(AGAIN, "write", attempt(3), HERE) == (True,)


@pytest.mark.second_stage
def test_dead_reader_is_gone_after_its_own_ttl(sessions: Sessions) -> None:
    session = sessions.open()
    token, share = take(session, "read", 1)
    take(session, "read", 2, ttl="0.1 s")
    assert session.do("SELECT count(*) FROM renew(%s, %s, '30 s'), pg_sleep(0.15)", share, token) == (1,)
    assert session.do("SELECT count(*) FROM holder('a')") == (1,)
    free(session, share)
    assert session.do(TRY, "write") == (True,)


def test_downgrade_waits_for_a_transaction_that_has_proved_the_writer(sessions: Sessions) -> None:
    holder, other = sessions.open(), sessions.open()
    token, share = take(holder, "write")
    other.do("BEGIN")
    assert other.do("SELECT assert_held(%s, %s)", share, token) == (True,)
    assert holder.do("SELECT granted, token FROM downgrade('a', %s, %s)", token, attempt(2)) == (None, None)
    other.do("COMMIT")
    assert holder.do("SELECT granted FROM downgrade('a', %s, %s)", token, attempt(2)) == (True,)
    assert holder.do("SELECT token FROM holder('a')")[0] > token


def test_downgrade_does_not_wait_for_long_for_another_transaction(sessions: Sessions) -> None:
    holder, joining = sessions.open(), sessions.open()
    token, _ = take(holder, "write")
    joining.do("BEGIN")
    assert joining.do(ASK, "write", attempt(2), HERE) == (False,)
    assert holder.do("SELECT granted FROM downgrade('a', %s, %s)", token, attempt(3)) == (None,)
    joining.do("COMMIT")
    assert holder.do("SELECT granted FROM downgrade('a', %s, %s)", token, attempt(3)) == (True,)


def test_writer_that_waits_never_enters_during_a_downgrade(sessions: Sessions) -> None:
    held, writer = sessions.open("held"), sessions.open()
    token, _ = take(held, "write")
    assert writer.do(ASK, "write", attempt(2), HERE) == (False,)
    gate = sessions.gate("UPDATE")
    downgraded = held.start("SELECT granted FROM downgrade('a', %s, %s)", token, attempt(3))
    held.wait_until_blocked()
    assert writer.do(AGAIN, "write", attempt(2), HERE) == (False,)
    gate.open()
    assert downgraded.result(60) == (True,)
    assert writer.do(AGAIN, "write", attempt(2), HERE) == (False,)


@pytest.mark.parametrize("how", ["expired", "forced"])
def test_writer_that_must_not_hold_any_longer_is_not_downgraded(sessions: Sessions, how: str) -> None:
    session = sessions.open()
    token, share = take(session, "write")
    session.do(EXPIRE if how == "expired" else "SELECT force_release(%s, token) FROM holder('a')", share)
    assert session.do("SELECT granted, share FROM downgrade('a', %s, %s)", token, attempt(2)) == (False, None)


def test_semaphore_made_smaller_takes_from_no_holder_and_grants_less(sessions: Sessions) -> None:
    session = sessions.open()
    for number in range(3):
        assert session.do(PERMIT, 3, attempt(number)) == (True,)
    assert session.do("SELECT resize_semaphore('s', 2)") == (3,)
    assert session.do("SELECT count(*) FROM holder('s')") == (3,)
    free(session, "s#0")
    assert session.do(PERMIT, None, attempt(5)) == (False,), "permits 1 and 2 are held"
    free(session, "s#1")
    assert session.do(PERMIT, None, attempt(5)) == (True,)
    assert session.do(PERMIT, None, attempt(6)) == (False,)
    assert session.do("SELECT resize_semaphore('s', 4)") == (2,)
    assert session.do(PERMIT, 4, attempt(6)) == (True,)
    assert session.do(PERMIT, 4, attempt(7)) == (True,)
    assert session.do(PERMIT, 4, attempt(8)) == (False,)


@pytest.mark.parametrize("level", first(1, ["repeatable read", "serializable"]))
def test_older_snapshot_grants_nothing_that_was_granted_since(sessions: Sessions, level: str) -> None:
    old, new = sessions.open(), sessions.open()
    new.do(PERMIT, 1, attempt(1))
    free(new, "s#0")
    old.do(f"BEGIN ISOLATION LEVEL {level}")
    old.do("SELECT count(*) FROM distributed_locks")
    assert new.do(PERMIT, 1, attempt(2)) == (True,)
    with pytest.raises(psycopg.errors.SerializationFailure):
        old.do(PERMIT, 1, attempt(3))
    old.do("ROLLBACK")
    old.do(f"SET default_transaction_isolation = '{level}'")
    assert old.do(PERMIT, 1, attempt(3)) == (False,)
    free(new, "s#0")
    assert old.do(PERMIT, 1, attempt(3)) == (True,)


def test_older_snapshot_does_not_overtake_a_writer_that_joined_since(sessions: Sessions) -> None:
    old, new = sessions.open(), sessions.open()
    take(new, "read", 1)
    assert new.do(ASK, "write", attempt(2), HERE) == (False,)
    assert new.do("SELECT abandon('a', %s)", attempt(2)) == (True,)
    old.do("BEGIN ISOLATION LEVEL REPEATABLE READ")
    old.do("SELECT count(*) FROM distributed_locks")
    assert new.do(ASK, "write", attempt(3), HERE) == (False,)
    with contextlib.suppress(psycopg.errors.SerializationFailure):
        assert old.do(TRY, "read") == (False,)


INVALID = [
    ("acquire_shared(repeat('x', 481), 'read-write', 'read')", "480 bytes"),
    ("acquire_shared('x', 'read-write')", "mode none"),
    ("acquire_shared('x', 'semaphore', 'read', 2)", "mode read"),
    ("acquire_shared('x', 'semaphore', NULL, 0)", "0 permits"),
    ("acquire_shared('x', 'mutex')", "kind mutex"),
    ("acquire_shared('x', 'semaphore')", "There is no semaphore 'x'"),
    ("acquire_shared('x', 'read-write', 'read', client => gen_random_uuid())", "needs an attempt"),
    ("resize_semaphore('x', 2)", "There is no semaphore 'x'"),
    ("resize_semaphore('x', 0)", "1 to 100000 permits"),
]


def test_invalid_requests_are_refused(owner: psycopg.Connection) -> None:
    for call, says in INVALID:
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=says):
            owner.execute(f"SELECT {call}".encode())


def test_token_is_above_the_last_one_of_the_lock(sessions: Sessions) -> None:
    """A database that was restored may have a sequence that is behind its own rows."""
    session = sessions.open()
    token, _ = take(session, "read", 1)
    session.do("UPDATE distributed_locks SET token = %s WHERE name = 'a'", token + 10**9)
    assert take(session, "read", 2)[0] > token + 10**9


def test_proof_under_the_name_of_a_head_fails_and_keeps_nothing_locked(sessions: Sessions) -> None:
    mistaken, other = sessions.open(), sessions.open()
    token, _ = take(other, "read", 1)
    mistaken.do("BEGIN")
    assert mistaken.do("SELECT assert_held('a', %s)", token) == (False,)
    assert other.do(TRY, "read") == (True,)
    mistaken.do("COMMIT")
    for call in ("release('a', %s)", "force_release('a', %s)"):
        assert other.do(f"SELECT {call}", token) == (False,)
    assert other.do("SELECT count(*) FROM renew('a', %s)", token) == (0,)
