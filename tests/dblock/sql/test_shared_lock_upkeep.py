"""Shared locks in SQL: the waiters that are woken, their heartbeats, the reaper, and the lists."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import psycopg
import pytest

from tests.support import mutants
from tests.support.sessions import Session, Sessions
from tests.support.shared_locks import (
    AGAIN,
    ASK,
    FREE,
    HERE,
    PERMIT,
    THERE,
    TRY,
    attempt,
    free,
    keep_clients_alive,
    listen,
    notified,
    take,
)
from tests.support.stages import first


@pytest.fixture(autouse=True)
def _clients_stay_alive(owner: psycopg.Connection) -> None:
    keep_clients_alive(owner)


def join_and_release(sessions: Sessions) -> tuple[Session, Session, Future[Any]]:
    """Release a share while a client is joining the queue, in a transaction that is still open."""
    joining, holder = sessions.open(), sessions.open()
    _, share = take(holder, "write")
    joining.do("BEGIN")
    assert joining.do(ASK, "write", attempt(2), HERE) == (False,)
    return joining, holder, holder.start(FREE, share, share)


def test_waiter_that_joins_while_a_share_is_released_is_woken(sessions: Sessions, owner: psycopg.Connection) -> None:
    mutants.replace(owner, mutants.altered("06_free_lock.sql", "'20ms'", "'60s'"))
    listener = sessions.open()
    listen(listener, HERE)
    joining, holder, released = join_and_release(sessions)
    holder.wait_until_blocked()
    joining.do("COMMIT")
    assert released.result(60) == (True,)
    assert notified(listener) == [2]


def test_release_does_not_wait_for_long_for_a_client_that_joins(sessions: Sessions) -> None:
    joining, _, released = join_and_release(sessions)
    assert released.result(60) == (True,)
    joining.do("COMMIT")
    assert joining.do("SELECT firsts, next_check FROM heartbeat(%s, '{a}')", HERE) == ([attempt(2)], [0.0])


SLOW_CLOCK = """
CREATE FUNCTION dblock.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF current_setting('application_name') = 'held' THEN
        PERFORM pg_advisory_xact_lock_shared(4712);
    END IF;
    RETURN pg_catalog.clock_timestamp();
END $$
"""
"""A clock at which the sessions named `held` wait."""


def test_reaper_deletes_no_head_whose_share_was_granted_at_that_moment(
    sessions: Sessions, owner: psycopg.Connection
) -> None:
    """The grant comes after the reaper's snapshot, and before the reaper locks the row of the head."""
    held, session = sessions.open("held"), sessions.open()
    session.do(PERMIT, 1, attempt(1))
    session.do("DELETE FROM distributed_locks WHERE name = 's#0'")
    reap = mutants.altered("93_reap.sql", "(SELECT FROM distributed_locks AS s WHERE s.head = l.name)\n",
                           "(SELECT FROM distributed_locks AS s WHERE s.head = l.name)\n"
                           "              AND dblock.clock_timestamp() IS NOT NULL\n")  # fmt: skip
    owner.execute(SLOW_CLOCK.encode())
    owner.execute("SELECT pg_advisory_lock(4712)")
    mutants.replace(owner, reap)
    reaping = held.start("SELECT reap('0 s')")
    held.wait_until_blocked()
    granted, token = session.do(
        "SELECT granted, token FROM acquire_shared('s', 'semaphore', attempt => %s)", attempt(2)
    )
    assert granted
    owner.execute("SELECT pg_advisory_unlock(4712)")
    reaping.result(60)
    assert session.do("SELECT array_agg(name ORDER BY name) FROM distributed_locks") == (["s", "s#0"],)
    assert session.do("SELECT token FROM holder('s')") == (token,)


def test_reaper_deletes_a_head_only_after_its_shares(sessions: Sessions) -> None:
    session = sessions.open()
    session.do(PERMIT, 2, attempt(1))
    session.do(PERMIT, 2, attempt(2))
    free(session, "s#0")
    session.do("SELECT reap('0 s')")
    assert session.do("SELECT array_agg(name ORDER BY name) FROM distributed_locks") == (["s", "s#1"],)
    assert session.do(PERMIT, 2, attempt(3)) == (True,)
    session.do("UPDATE distributed_locks SET expires_at = clock_timestamp() WHERE head = 's'")
    assert session.do("SELECT reap('0 s')") == (3,)
    assert session.do("SELECT count(*) FROM list_history() WHERE event = 'expired'") == (2,)


def abandoned(session: Session) -> None:
    assert session.do("SELECT abandon('a', %s)", attempt(1)) == (True,)


def forced(session: Session) -> None:
    assert session.do("SELECT force_release('a#writer', token, now => true) FROM holder('a')") == (True,)
    session.do("SELECT wake_queue('a#writer')")


def forced_and_woken_by_head(session: Session) -> None:
    assert session.do("SELECT force_release('a#writer', token, now => true) FROM holder('a')") == (True,)
    session.do("SELECT wake_queue('a')")


def released_with_others(session: Session) -> None:
    released = "SELECT r.* FROM holder('a') AS h, release_all(ARRAY['a#writer', 'b'], ARRAY[h.token, 1]) AS r"
    assert session.do(released) == (1, None)


def downgraded(session: Session) -> None:
    assert session.do("SELECT d.granted FROM holder('a') AS h, downgrade('a', h.token) AS d") == (True,)
    session.do("SELECT wake_queue('a')")


FREED = [abandoned, forced, forced_and_woken_by_head, released_with_others, downgraded]


@pytest.mark.parametrize("freed", first(2, FREED))
def test_readers_are_woken_however_the_writer_ends(sessions: Sessions, freed: Callable[[Session], None]) -> None:
    session, listener = sessions.open(), sessions.open()
    listen(listener, HERE)
    take(session, "write", 1)
    for number in (2, 3):
        assert session.do(ASK, "read", attempt(number), HERE) == (False,)
    freed(session)
    assert notified(listener) == [2, 3]
    assert session.do(AGAIN, "read", attempt(3), HERE) == (True,)


@pytest.mark.parametrize("leaves", first(1, ["abandon", "leave_queue"]))
def test_readers_are_woken_when_the_writer_ahead_stops_waiting(sessions: Sessions, leaves: str) -> None:
    session, listener = sessions.open(), sessions.open()
    listen(listener, HERE)
    take(session, "read", 1)
    assert session.do(ASK, "write", attempt(2), THERE) == (False,)
    assert session.do(ASK, "read", attempt(3), HERE) == (False,)
    if leaves == "abandon":
        assert session.do("SELECT abandon('a', %s)", attempt(2)) == (True,)
    else:
        session.do("SELECT leave_queue(%s)", THERE)
    assert notified(listener) == [3]


def test_dead_writer_in_the_queue_keeps_no_reader_out(sessions: Sessions) -> None:
    session = sessions.open()
    take(session, "read", 1)
    assert session.do(ASK, "write", attempt(2), THERE) == (False,)
    assert session.do(ASK, "read", attempt(3), HERE) == (False,)
    session.do("UPDATE lock_clients SET seen_until = clock_timestamp() WHERE client = %s", THERE)
    assert session.do("SELECT firsts, next_check FROM heartbeat(%s, '{a}')", HERE) == ([attempt(3)], [0.0])
    assert session.do(TRY, "read") == (True,)
    assert session.do(AGAIN, "read", attempt(3), HERE) == (True,)
    assert session.do("SELECT count(*) FROM lock_tickets") == (0,)


def test_heartbeat_returns_who_is_next_and_when_to_look(sessions: Sessions) -> None:
    session = sessions.open()
    beat = "SELECT firsts, next_check[1] BETWEEN 1 AND 30 FROM heartbeat(%s, '{a,s}')"
    take(session, "write", 1)
    assert session.do(ASK, "read", attempt(2), HERE) == (False,)
    assert session.do(ASK, "write", attempt(3), THERE) == (False,)
    assert session.do(beat, HERE) == ([attempt(2)], True)
    assert session.do(beat, THERE) == (None, None), "a reader is ahead"
    free(session, "a#writer")
    assert session.do("SELECT firsts, next_check FROM heartbeat(%s, '{a}')", HERE) == ([attempt(2)], [0.0])
    assert session.do(AGAIN, "read", attempt(2), HERE) == (True,)
    assert session.do(beat, THERE) == ([attempt(3)], True)


def test_heartbeat_of_a_semaphore_counts_the_free_permits(sessions: Sessions) -> None:
    session = sessions.open()
    for number in (1, 2):
        assert session.do(PERMIT, 2, attempt(number)) == (True,)
    for number in (3, 4, 5):
        session.do("SELECT acquire_shared('s', 'semaphore', attempt => %s, client => %s)", attempt(number), HERE)
    beat = "SELECT firsts, next_check[1] = 0, next_check[2] > 1 FROM heartbeat(%s, '{s}')"
    assert session.do(beat, HERE) == ([attempt(3)], False, None)
    free(session, "s#0")
    assert session.do(beat, HERE) == ([attempt(3), attempt(4)], True, True)


def test_lock_is_deleted_only_while_it_is_not_in_use(sessions: Sessions) -> None:
    session, other = sessions.open(), sessions.open()
    token, share = take(session, "read", 1)
    assert session.do("SELECT delete_lock('a')") == (False,)
    with pytest.raises(psycopg.Error, match="cannot be deleted alone"):
        session.do("SELECT delete_lock('a#reader-0')")
    other.do("BEGIN")
    assert other.do("SELECT assert_held(%s, %s)", share, token) == (True,)
    free(session, share)
    assert session.do("SELECT delete_lock('a')") == (False,), "proved in an open transaction"
    other.do("COMMIT")
    session.do(TRY, "write")
    session.do(ASK, "write", attempt(2), HERE)
    free(session, "a#writer")
    assert session.do("SELECT delete_lock('a')") == (False,), "a client waits"
    session.do("SELECT abandon('a', %s)", attempt(2))
    assert session.do("SELECT delete_lock('a')") == (True,)
    assert session.do("SELECT count(*) FROM distributed_locks") == (0,)
    granted, newer = session.do("SELECT granted, token FROM try_acquire('a')")
    assert granted
    assert newer > token
    assert session.do("SELECT delete_lock('a')") == (False,)
    free(session, "a")
    assert session.do("SELECT delete_lock('a'), delete_lock('a')") == (True, False)


def test_name_that_was_only_waited_for_can_become_a_shared_lock(sessions: Sessions) -> None:
    session = sessions.open()
    session.do("SELECT try_acquire('x')")
    session.do("UPDATE distributed_locks SET token = 0, expires_at = '-infinity' WHERE name = 'x'")
    waits = "SELECT acquire('x', attempt => %s, client => %s, had_ticket => true, fair => true)"
    session.do("UPDATE distributed_locks SET expires_at = 'infinity'")
    session.do(waits, attempt(1), HERE)
    session.do("UPDATE distributed_locks SET expires_at = '-infinity'")
    with pytest.raises(psycopg.Error, match="'x' is a plain lock"):
        session.do("SELECT acquire_shared('x', 'read-write', 'read')")
    session.do("UPDATE lock_clients SET seen_until = clock_timestamp()")
    assert session.do("SELECT granted FROM acquire_shared('x', 'read-write', 'read')") == (True,)


def test_lists_show_shares_and_their_heads(sessions: Sessions) -> None:
    session = sessions.open()
    listed = "SELECT array_agg(row(name, kind, head, permits, waiting)::text ORDER BY name) FROM list_locks()"
    session.do(PERMIT, 2, attempt(1))
    assert session.do(listed) == (["(s,semaphore,,2,0)", "(s#0,permit,s,,0)"],)
    free(session, "s#0")
    assert session.do(listed) == (None,)


def test_grants_are_recorded_under_the_names_of_shares(sessions: Sessions) -> None:
    session = sessions.open()
    session.do("SELECT record_grants(true)")
    session.do(PERMIT, 2, attempt(1))
    free(session, "s#0")
    found = session.do("SELECT array_agg(name || ' ' || event ORDER BY number DESC) FROM list_history()")
    assert found == (["s#0 released", "s#0 granted"],)


def test_durable_release_notifies_no_waiter(sessions: Sessions) -> None:
    session, listener = sessions.open(), sessions.open()
    listen(listener, HERE)
    token, share = take(session, "write")
    assert session.do(ASK, "write", attempt(2), HERE) == (False,)
    assert session.do("SELECT release(%s, %s)", share, token) == (True,)
    assert notified(listener) == []
    assert session.do("SELECT firsts, next_check FROM heartbeat(%s, '{a}')", HERE) == ([attempt(2)], [0.0])
