"""The terms of an election: which grant leads, how each term ends, and what observers read of it."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from tests.support.sessions import Session, Sessions
from tests.support.tokens import T1, T2, T3

pytestmark = pytest.mark.usefixtures("known_tokens")

LOCK = "election:e"


def granted(session: Session, holder: str = "a", attempt: UUID | None = None) -> int:
    """Hold the election's lock in this session, and return the token."""
    row = session.do(
        "SELECT token FROM try_acquire(%s, '30 s', %s, attempt => %s, fair => false)", LOCK, holder, attempt
    )
    token: int = row[0]
    assert token, "the lock was not granted"
    return token


def leads(session: Session, holder: str = "a") -> int:
    """Begin a term in this session, and return its token."""
    token = granted(session, holder)
    assert session.do("SELECT begin_term('e', %s)", token) == ("lead",)
    return token


def expire(session: Session) -> None:
    """Let the deadline of the election's lock pass."""
    session.do("UPDATE distributed_locks SET expires_at = clock_timestamp()")


def waits(session: Session, holder: str, rank: list[int] | None = None) -> UUID:
    """Queue a candidate, and return its attempt."""
    attempt, client = uuid4(), uuid4()
    session.do("SELECT join_election('e', %s, %s, %s)", attempt, holder, rank or [])
    session.do("SELECT ticket FROM acquire(%s, '30 s', %s, attempt => %s, client => %s)", LOCK, holder, attempt, client)
    # A client sends a heartbeat each second, and a slow test does not.
    session.do("UPDATE lock_clients SET seen_until = clock_timestamp() + interval '1 hour'")
    return attempt


def terms(session: Session, since: int | None = 0, ended: bool = False) -> list[tuple[int, str, str | None]]:
    """Return token, holder and end of the terms after `since`."""
    found, forgotten = session.do("SELECT terms, forgotten FROM list_terms('e', %s, %s)", since, ended)
    assert not forgotten
    return [(one["token"], one["holder"], one["how"]) for one in found or []]


def leader(session: Session) -> tuple[Any, ...]:
    row: tuple[Any, ...] = session.do("SELECT token, holder FROM election_leader('e')")
    return row


def test_term_begins_only_under_the_lock(sessions: Sessions) -> None:
    session = sessions.open()
    assert session.do("SELECT begin_term('e', %s)", T1) == ("lost",), "there is no lock"
    assert granted(session) == T1
    assert session.do("SELECT begin_term('e', %s)", T2) == ("lost",), "another token"
    assert leader(session) == (None, None), "a grant alone is no term"
    assert session.do("SELECT begin_term('e', %s)", T1) == ("lead",)
    assert session.do("SELECT begin_term('e', %s)", T1) == ("lead",), "a retry finds its term"
    assert leader(session) == (T1, "a")
    assert terms(session) == [(T1, "a", None)]


def test_stale_token_begins_no_term_after_the_next(sessions: Sessions) -> None:
    old, new = sessions.open(), sessions.open()
    granted(old, "a")
    expire(old)
    leads(new, "b")
    assert old.do("SELECT begin_term('e', %s)", T1) == ("lost",)
    assert terms(new) == [(T2, "b", None)], "a never led"


def test_term_that_has_ended_cannot_be_begun_again(sessions: Sessions) -> None:
    session = sessions.open()
    leads(session)
    session.do("UPDATE terms SET ended_at = now(), how = 'resigned'")
    assert session.do("SELECT begin_term('e', %s)", T1) == ("lost",)


def test_next_grant_waits_until_a_beginning_is_committed(sessions: Sessions) -> None:
    first, second = sessions.open(), sessions.open()
    granted(first, "a")
    first.do("BEGIN")
    assert first.do("SELECT begin_term('e', %s)", T1) == ("lead",)
    expire(second)
    refused = second.do("SELECT granted FROM try_acquire(%s, fair => false)", LOCK)
    assert refused == (False,), "granted while the term before it is not yet in the table"
    first.do("COMMIT")
    leads(second, "b")
    assert terms(second) == [(T1, "a", "expired"), (T2, "b", None)]


def test_end_and_release_are_one_transaction(sessions: Sessions) -> None:
    leading, other = sessions.open(), sessions.open()
    leads(leading)
    leading.do("BEGIN")
    assert leading.do("SELECT end_term('e', %s)", T1) == (True,)
    assert leader(other) == (T1, "a"), "not committed yet"
    assert other.do("SELECT granted FROM try_acquire(%s, fair => false)", LOCK) == (False,)
    leading.do("COMMIT")
    assert leader(other) == (None, None)
    assert terms(other) == [(T1, "a", "resigned")]
    assert leads(other, "b") == T2


def test_observer_sees_no_beginning_without_the_end_before_it(sessions: Sessions) -> None:
    """The observer reads at each step of a hand-over whose beginning also records the end of the term before."""
    old, new, observer = sessions.open(), sessions.open(), sessions.open()
    leads(old, "a")
    expire(old)
    granted(new, "b")
    new.do("BEGIN")
    assert new.do("SELECT begin_term('e', %s)", T2) == ("lead",)
    assert terms(observer) == [(T1, "a", None)], "an observer does not wait for the beginning"
    new.do("COMMIT")
    assert terms(observer, T1) == [(T1, "a", "expired"), (T2, "b", None)]


def test_late_end_does_not_touch_the_next_term(sessions: Sessions) -> None:
    session = sessions.open()
    leads(session, "a")
    expire(session)
    leads(session, "b")
    assert session.do("SELECT end_term('e', %s)", T1) == (False,)
    assert leader(session) == (T2, "b")
    assert terms(session) == [(T1, "a", "expired"), (T2, "b", None)]


def test_expired_term_is_recorded_by_an_observer_without_a_successor(sessions: Sessions) -> None:
    session = sessions.open()
    leads(session, "a")
    assert terms(session) == [(T1, "a", None)]
    expire(session)
    assert leader(session) == (None, None)
    assert terms(session, T1) == [(T1, "a", "expired")]
    assert terms(session, T1, ended=True) == []


@pytest.mark.second_stage
def test_renewal_under_way_keeps_the_term_open(sessions: Sessions) -> None:
    """An observer that reads the old deadline must not end a term whose renewal is about to commit."""
    leading, observer = sessions.open(), sessions.open()
    leads(leading, "a")
    leading.do("UPDATE distributed_locks SET expires_at = clock_timestamp() + interval '1 s'")
    leading.do("BEGIN")
    assert leading.do("SELECT remaining FROM renew(%s, %s, '30 s')", LOCK, T1) == (30,)
    observer.do("SELECT pg_sleep(1.01)")
    assert terms(observer) == [(T1, "a", None)]
    leading.do("COMMIT")
    assert leader(observer) == (T1, "a")


@pytest.mark.parametrize(
    ("statement", "how"),
    [
        ("SELECT release('election:e', %s)", "released"),
        ("SELECT force_release('election:e', %s, now => true)", "forced"),
        ("SELECT force_release('election:e', %s), end_term('e', %s)", "forced"),
        ("SELECT end_term('e', %s, 'failed')", "failed"),
    ],
)
def test_each_end_is_recorded_as_what_it_was(sessions: Sessions, statement: str, how: str) -> None:
    session = sessions.open()
    leads(session)
    session.do(statement, *[T1] * statement.count("%s"))
    assert terms(session) == [(T1, "a", how)]
    leads(session, "b")
    assert terms(session) == [(T1, "a", how), (T2, "b", None)]


def test_lock_row_that_was_deleted_ends_the_term(sessions: Sessions) -> None:
    session = sessions.open()
    leads(session, "a")
    expire(session)
    assert session.do("SELECT reap('0 s')") == (1,)
    assert terms(session) == [(T1, "a", "expired")]


def test_only_the_leader_changes_its_value(sessions: Sessions) -> None:
    session = sessions.open()
    leads(session, "a")
    value = "SELECT value FROM election_leader('e')"
    assert session.do("SELECT publish_value('e', %s, '1')", T1) == (True,)
    assert session.do(value) == (1,)
    assert session.do("SELECT publish_value('e', %s, '2')", T2) == (False,), "another token"
    expire(session)
    assert session.do("SELECT publish_value('e', %s, '3')", T1) == (False,), "an expired term"
    leads(session, "b")
    assert session.do("SELECT publish_value('e', %s, '4')", T1) == (False,), "an earlier term"
    assert session.do(value) == (None,)


def test_candidate_yields_to_a_higher_rank_that_waits(sessions: Sessions) -> None:
    session = sessions.open()
    leads(session, "old")
    attempt = waits(session, "low", [1, 9])
    waits(session, "high", [2])
    session.do("SELECT end_term('e', %s)", T1)
    token = granted(session, "low", attempt=attempt)
    assert session.do("SELECT begin_term('e', %s, %s)", token, attempt) == ("yield",)
    assert session.do("SELECT granted FROM try_acquire(%s)", LOCK) == (False,), "it is reserved for the queue"
    assert session.do("SELECT count(*) FROM holder(%s)", LOCK) == (0,), "the lock was released"
    assert terms(session) == [(T1, "old", "resigned")], "a candidate that yields never led"


def test_equal_rank_does_not_yield(sessions: Sessions) -> None:
    session = sessions.open()
    attempt = waits(session, "one", [1, 2])
    waits(session, "two", [1, 2])
    token = granted(session, "one", attempt=attempt)
    assert session.do("SELECT begin_term('e', %s, %s)", token, attempt) == ("lead",)
    assert session.do("SELECT term_demand('e', %s)", token) == (None,)


def test_leader_learns_of_a_higher_rank_only_while_it_waits(sessions: Sessions) -> None:
    session = sessions.open()
    leads(session)
    assert session.do("SELECT term_demand('e', %s)", T1) == (None,)
    session.do("SELECT join_election('e', %s, 'soon', '{5}')", uuid4())
    assert session.do("SELECT term_demand('e', %s)", T1) == (None,), "registered, but not in the queue"
    attempt = waits(session, "high", [5])
    assert session.do("SELECT term_demand('e', %s)", T1) == ("priority",)
    session.do("UPDATE lock_clients SET seen_until = clock_timestamp()")
    assert session.do("SELECT term_demand('e', %s)", T1) == (None,), "its client is dead"
    session.do("SELECT abandon(%s, %s)", LOCK, attempt)
    session.do("SELECT end_term('e', %s)", T1)
    assert session.do("SELECT term_demand('e', %s)", T1) == ("over",)


def test_transfer_is_refused_unless_the_candidate_can_lead_next(sessions: Sessions) -> None:
    session = sessions.open()
    transfer = "SELECT transfer_term('e', %s, %s)"
    assert session.do(transfer, T1, "b") == ("over",), "there is no leader"
    leads(session)
    assert session.do(transfer, T1, "b") == ("absent",)
    assert session.do(transfer, T1, "a") == ("leads",)
    waits(session, "b")
    waits(session, "c", [1])
    assert session.do(transfer, T1, "b") == ("outranked",)
    assert session.do(transfer, T2, "c") == ("over",), "another token"
    assert session.do("SELECT term_demand('e', %s)", T1) == ("priority",)
    assert session.do(transfer, T1, "c") == ("asked",)
    assert session.do("SELECT term_demand('e', %s)", T1) == ("transfer",)


def test_transfer_passes_the_candidates_ahead(sessions: Sessions) -> None:
    session = sessions.open()
    leads(session)
    first, named = waits(session, "b"), waits(session, "c")
    assert session.do("SELECT transfer_term('e', %s, 'c')", T1) == ("asked",)
    session.do("SELECT end_term('e', %s, 'transferred')", T1)
    token = granted(session, "b", attempt=first)
    assert session.do("SELECT begin_term('e', %s, %s)", token, first) == ("yield",)
    token = granted(session, "c", attempt=named)
    assert session.do("SELECT begin_term('e', %s, %s)", token, named) == ("lead",)
    assert terms(session) == [(T1, "a", "transferred"), (T3, "c", None)]


def test_transfer_to_a_candidate_that_leaves_goes_to_the_next(sessions: Sessions) -> None:
    session, leaving = sessions.open(), sessions.open()
    leads(session)
    first, named = waits(session, "b"), waits(session, "c")
    assert session.do("SELECT transfer_term('e', %s, 'c')", T1) == ("asked",)
    session.do("SELECT end_term('e', %s, 'transferred')", T1)
    # The named candidate is leaving while the other one begins, and has left when it begins again.
    leaving.do("BEGIN")
    leaving.do("SELECT abandon(%s, %s)", LOCK, named)
    token = granted_when_free(session, "b", first, leaving)
    assert session.do("SELECT begin_term('e', %s, %s)", token, first) == ("lead",)
    assert terms(session) == [(T1, "a", "transferred"), (token, "b", None)]


def granted_when_free(session: Session, holder: str, attempt: UUID, leaving: Session) -> int:
    """Grant the lock to this candidate once the transaction that leaves has committed."""
    refused = session.do("SELECT granted FROM try_acquire(%s, attempt => %s, fair => false)", LOCK, attempt)
    assert refused == (False,), "the candidate that leaves has locked the row"
    leaving.do("COMMIT")
    return granted(session, holder, attempt=attempt)


def test_two_candidates_cannot_begin_the_same_term(sessions: Sessions) -> None:
    """Two sessions with the same token: the second one finds the term of the first."""
    first, second = sessions.open(), sessions.open()
    granted(first)
    first.do("BEGIN")
    assert first.do("SELECT begin_term('e', %s)", T1) == ("lead",)
    again = second.start("SELECT begin_term('e', %s)", T1)
    second.wait_until_blocked()
    first.do("COMMIT")
    with pytest.raises(psycopg.errors.UniqueViolation):
        again.result(60)
    assert second.do("SELECT begin_term('e', %s)", T1) == ("lead",)
    assert terms(second) == [(T1, "a", None)]


def test_oldest_terms_are_forgotten_and_a_late_observer_is_told(sessions: Sessions) -> None:
    session = sessions.open()
    session.do(
        "INSERT INTO terms (name, token, number, holder, rank, began_at, ended_at, how)"
        " SELECT 'e', n, n, 'x', '{}', now(), now(), 'resigned' FROM generate_series(1, 10000) AS n"
    )
    forgotten = "SELECT forgotten FROM list_terms('e', %s)"
    assert session.do(forgotten, 0) == (False,)
    leads(session)
    assert session.do("SELECT count(*), min(token) FROM terms") == (10000, 2)
    assert session.do(forgotten, 0) == (True,)
    assert session.do(forgotten, 1) == (True,)
    assert session.do(forgotten, 2) == (False,)
    assert session.do("SELECT forgotten FROM list_terms('other', 0)") == (False,)


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT begin_term('', 1)",
        "SELECT begin_term(repeat('x', 504), 1)",
        "SELECT join_election('e', gen_random_uuid(), 'a', NULL)",
        "SELECT join_election('e', gen_random_uuid(), NULL, '{}')",
        "SELECT join_election('e', gen_random_uuid(), 'a', '{1,NULL}')",
        "SELECT join_election('e', gen_random_uuid(), 'a', '{{1},{2}}')",
        "SELECT join_election('e', NULL, 'a', '{}')",
        "SELECT publish_value('e', 1, to_jsonb(repeat('x', 9000)))",
        "SELECT end_term('e', 1, 'gone')",
    ],
)
def test_arguments_outside_the_limits_are_refused(sessions: Sessions, statement: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        sessions.open().do(statement)
