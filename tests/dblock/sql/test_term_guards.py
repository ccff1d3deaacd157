"""What the functions of elections refuse, keep and delete: one test for each check."""

from __future__ import annotations

from uuid import UUID, uuid4

import psycopg
import pytest

from tests.dblock.sql.test_queue import listen, notifications
from tests.dblock.sql.test_terms import LOCK, expire, granted, leader, leads, terms, waits
from tests.support.sessions import END_GRACE, Session, Sessions
from tests.support.tokens import T1

pytestmark = pytest.mark.usefixtures("known_tokens")


def test_candidates_of_yesterday_are_deleted_unless_they_wait(sessions: Sessions, owner: psycopg.Connection) -> None:
    session = sessions.open()
    leads(session)
    session.do("SELECT join_election('e', %s, 'dead')", uuid4())
    waits(session, "patient")
    owner.execute("UPDATE candidates SET since = since - interval '25 hours'")
    session.do("SELECT join_election('e', %s, 'new')", uuid4())
    found = owner.execute("SELECT holder FROM candidates ORDER BY holder").fetchall()
    assert [holder for (holder,) in found] == ["new", "patient"]


def test_value_of_a_term_that_has_ended_stays(sessions: Sessions) -> None:
    session = sessions.open()
    leads(session)
    session.do("UPDATE terms SET ended_at = now(), how = 'resigned'")
    assert session.do("SELECT publish_value('e', %s, '1')", T1) == (False,)
    assert session.do("SELECT value FROM terms") == (None,)


def test_candidate_whose_session_is_gone_outranks_no_leader(sessions: Sessions) -> None:
    leading, dying, presence, attempt = sessions.open(), sessions.open(), uuid4(), uuid4()
    leads(leading)
    dying.do("SELECT register_presence(%s, '1 hour')", presence)
    dying.do("SELECT join_election('e', %s, 'high', '{5}')", attempt)
    dying.do("SELECT acquire(%s, attempt => %s, client => %s, presence => %s)", LOCK, attempt, uuid4(), presence)
    dying.do("UPDATE lock_clients SET seen_until = clock_timestamp() + interval '1 hour'")
    assert leading.do("SELECT term_demand('e', %s)", T1) == ("priority",)
    dying.end()
    assert leading.do("SELECT term_demand('e', %s)", T1) == (None,), "the leader would resign for a dead candidate"


def test_transfer_to_a_lower_rank_than_the_leaders_is_refused(sessions: Sessions) -> None:
    session, attempt = sessions.open(), uuid4()
    session.do("SELECT join_election('e', %s, 'a', '{5}')", attempt)
    token = granted(session, "a", attempt)
    assert session.do("SELECT begin_term('e', %s, %s)", token, attempt) == ("lead",)
    waits(session, "b", [4])
    assert session.do("SELECT transfer_term('e', %s, 'b')", token) == ("outranked",), "the leader would come back"


def test_transfer_of_a_term_whose_lease_is_over_is_refused(sessions: Sessions) -> None:
    session = sessions.open()
    leads(session)
    waits(session, "b")
    expire(session)
    assert session.do("SELECT transfer_term('e', %s, 'b')", T1) == ("over",)


def test_leader_whose_session_is_gone_is_recorded_as_died_by_an_observer(sessions: Sessions) -> None:
    dying, observer, presence = sessions.open(), sessions.open(), uuid4()
    dying.do("SELECT register_presence(%s, '1 hour')", presence)
    dying.do("SELECT try_acquire(%s, '1 hour', 'a', presence => %s)", LOCK, presence)
    assert dying.do("SELECT begin_term('e', %s)", T1) == ("lead",)
    assert leader(observer) == (T1, "a")
    dying.end()
    assert leader(observer) == (T1, "a"), "its grace has begun"
    observer.do(END_GRACE)
    assert leader(observer) == (None, None), "the dead leader is still named"
    assert terms(observer) == [(T1, "a", "died")]


def test_leader_whose_lease_is_over_is_not_named_while_its_row_is_locked(sessions: Sessions) -> None:
    session, other = sessions.open(), sessions.open()
    leads(session)
    expire(session)
    other.do("BEGIN")
    other.do("SELECT FROM distributed_locks FOR UPDATE")
    assert leader(session) == (None, None)
    assert session.do("SELECT ended_at FROM terms") == (None,), "the end is recorded by a later call"
    other.do("ROLLBACK")


def test_late_end_records_what_the_end_was(sessions: Sessions) -> None:
    session = sessions.open()
    leads(session)
    expire(session)
    assert session.do("SELECT end_term('e', %s)", T1) == (False,)
    assert session.do("SELECT how FROM terms") == ("expired",)


def queues(session: Session, holder: str, rank: str, listener: Session) -> UUID:
    """Queue a candidate whose notifications the listener gets, and return its attempt."""
    attempt, client = uuid4(), uuid4()
    listen(listener, client)
    session.do("SELECT join_election('e', %s, %s, %s)", attempt, holder, rank)
    session.do("SELECT acquire(%s, '30 s', %s, attempt => %s, client => %s)", LOCK, holder, attempt, client)
    session.do("UPDATE lock_clients SET seen_until = clock_timestamp() + interval '1 hour'")
    return attempt


def test_candidate_that_yields_wakes_the_next_one(sessions: Sessions) -> None:
    session, listener, low = sessions.open(), sessions.open(), uuid4()
    granted(session, "low", low)
    high = queues(session, "high", "{5}", listener)
    assert notifications(listener) == []
    assert session.do("SELECT begin_term('e', %s, %s)", T1, low) == ("yield",)
    assert [attempt for _, attempt in notifications(listener)] == [str(high)]


def test_observer_that_finds_a_dead_leader_wakes_the_next_one(sessions: Sessions) -> None:
    dying, session, listener, presence = sessions.open(), sessions.open(), sessions.open(), uuid4()
    dying.do("SELECT register_presence(%s, '1 hour')", presence)
    dying.do("SELECT try_acquire(%s, '1 hour', 'a', presence => %s)", LOCK, presence)
    assert dying.do("SELECT begin_term('e', %s)", T1) == ("lead",)
    waiting = queues(session, "b", "{}", listener)
    dying.end()
    assert leader(session) == (T1, "a"), "its grace has begun"
    session.do(END_GRACE)
    assert leader(session) == (None, None), "the dead leader is still named"
    assert [attempt for _, attempt in notifications(listener)] == [str(waiting)]
