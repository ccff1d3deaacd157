"""The history keeps the newest hundred events of each lock: how its grants ended."""

from __future__ import annotations

import uuid

import psycopg
import pytest

from tests.support import mutants
from tests.support.eventually import eventually
from tests.support.sessions import END_GRACE, Sessions
from tests.support.tokens import T1, T2

pytestmark = pytest.mark.usefixtures("known_tokens")


def events(owner: psycopg.Connection, name: str | None = None) -> list[tuple[object, ...]]:
    return owner.execute("SELECT event, token, holder FROM list_history(%s)", [name]).fetchall()


def test_grant_and_its_release_leave_no_event(owner: psycopg.Connection) -> None:
    owner.execute("SELECT release('a', token) FROM try_acquire('a')")
    owner.execute("SELECT release('a', token) FROM try_acquire('a')")
    assert events(owner) == []


def test_next_grant_records_an_expired_lease(owner: psycopg.Connection) -> None:
    owner.execute("SELECT try_acquire('a', '1 hour', 'sleeper')")
    owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp()")
    (deadline,) = owner.execute("SELECT expires_at FROM distributed_locks").fetchone() or (None,)
    owner.execute("SELECT try_acquire('a')")
    assert events(owner) == [("expired", T1, "sleeper")]
    assert owner.execute("SELECT at FROM list_history('a')").fetchone() == (deadline,), (
        "the event has the time of the deadline"
    )


def test_takeover_records_that_the_holder_died(sessions: Sessions, owner: psycopg.Connection) -> None:
    dying, presence = sessions.open(), uuid.uuid4()
    dying.do("SELECT register_presence(%s, '1 hour')", presence)
    dying.do("SELECT try_acquire('a', '60 s', 'mortal', attempt => gen_random_uuid(), presence => %s)", presence)
    dying.end()
    taking = "SELECT granted FROM try_acquire('a', attempt => gen_random_uuid())"
    assert owner.execute(taking.encode()).fetchone() == (False,), "its grace has begun"
    owner.execute(END_GRACE.encode())
    assert owner.execute(taking.encode()).fetchone() == (True,)
    assert events(owner) == [("died", T1, "mortal")]


def test_record_grants_switches_events_of_grants_and_releases(owner: psycopg.Connection) -> None:
    assert owner.execute("SELECT grants_are_recorded()").fetchone() == (False,)
    owner.execute("SELECT record_grants(true)")
    owner.execute("SELECT record_grants(true)")
    assert owner.execute("SELECT grants_are_recorded()").fetchone() == (True,)
    owner.execute("SELECT try_acquire('a', holder => 'one')")
    owner.execute(f"SELECT renew('a', {T1})")
    owner.execute(f"SELECT release('a', {T1})")
    owner.execute("SELECT try_acquire('a', holder => 'two')")
    owner.execute(f"SELECT force_release('a', {T2}, now => true)")
    assert events(owner) == [
        ("forced_now", T2, "two"), ("granted", T2, "two"), ("released", T1, "one"), ("granted", T1, "one"),
    ]  # fmt: skip
    owner.execute("SELECT record_grants(false)")
    owner.execute("SELECT release('a', token) FROM try_acquire('a')")
    assert len(events(owner)) == 4


def test_history_of_an_efficiency_grant_shows_no_token(owner: psycopg.Connection) -> None:
    owner.execute("SELECT try_acquire('a', '1 hour', 'quick', durable => false)")
    owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp()")
    owner.execute("SELECT try_acquire('a')")
    assert events(owner) == [("expired", None, "quick")]


def kept_after_many(owner: psycopg.Connection) -> int:
    owner.execute("SELECT record_event('a', n, 'expired', 'x', now()) FROM generate_series(1, 500) AS n")
    return len(owner.execute("SELECT FROM list_history('a', 1000)").fetchall())


def test_history_keeps_the_newest_hundred_events_of_each_lock(owner: psycopg.Connection) -> None:
    owner.execute("SELECT record_event('b', 1, 'expired', 'x', now())")
    assert kept_after_many(owner) == 100
    assert owner.execute("SELECT max(token), min(token) FROM list_history('a', 1000)").fetchone() == (500, 401)
    assert events(owner, "b") == [("expired", 1, "x")], "an event of another lock was deleted"


def test_history_test_catches_a_history_without_a_limit(owner: psycopg.Connection) -> None:
    mutants.replace(owner, mutants.altered("04_history.sql", "OFFSET 99", "OFFSET 999"))
    assert kept_after_many(owner) == 500


def test_reaper_removes_events_older_than_a_month(owner: psycopg.Connection) -> None:
    owner.execute("SELECT record_event('a', 1, 'expired', 'old', now() - interval '31 days')")
    owner.execute("SELECT record_event('a', 2, 'expired', 'new', now() - interval '29 days')")
    owner.execute("SELECT reap('0 s')")
    assert events(owner) == [("expired", 2, "new")]


def test_reaper_records_an_expired_lease_that_was_never_granted_again(owner: psycopg.Connection) -> None:
    owner.execute("SELECT try_acquire('a', '1 hour', 'sleeper')")
    owner.execute("SELECT release('b', token) FROM try_acquire('b')")
    owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp() WHERE name = 'a'")
    assert owner.execute("SELECT reap('0 s')").fetchone() == (2,)
    assert events(owner) == [("expired", T1, "sleeper")]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("", ["held", "awaited"]),
        ("include_free => true", ["held", "awaited", "free"]),
        ("pattern => 'h%%'", ["held"]),
        ("name => 'held'", ["held"]),
        ("name => 'free'", []),
        ("include_free => true, max_rows => 1", ["awaited"]),
    ],
)
def test_list_locks_filters_by_its_arguments(owner: psycopg.Connection, arguments: str, names: list[str]) -> None:
    owner.execute("SELECT try_acquire('held', '60 s', 'one', '{\"a\": 1}')")
    owner.execute("SELECT release('free', token) FROM try_acquire('free')")
    owner.execute("SELECT try_acquire('awaited', '60 s', 'two')")
    for _ in range(2):
        owner.execute(
            "SELECT acquire('awaited', attempt => gen_random_uuid(), client => gen_random_uuid(), holder => 'x')"
        )
    rows = owner.execute(f"SELECT name, waiting, remaining FROM list_locks({arguments})".encode(), []).fetchall()
    assert [name for name, _, _ in rows] == sorted(names)
    assert {name: waiting for name, waiting, _ in rows}.get("awaited", 2) == 2
    assert all((left > 50) == (name != "free") for name, _, left in rows)


def test_list_waiters_returns_waiters_in_order(owner: psycopg.Connection) -> None:
    for name in ("b", "a"):
        owner.execute("SELECT try_acquire(%s)", [name])
        for who in ("first", "second"):
            owner.execute(
                "SELECT acquire(%s, attempt => gen_random_uuid(), client => gen_random_uuid(), holder => %s)",
                [name, who],
            )
    rows = owner.execute("SELECT name, position, holder FROM list_waiters()").fetchall()
    assert rows == [("a", 1, "first"), ("a", 2, "second"), ("b", 1, "first"), ("b", 2, "second")]
    assert owner.execute("SELECT holder FROM list_waiters('b', 1)").fetchall() == [("first",)]
    owner.execute("UPDATE lock_clients SET seen_until = now() - interval '1 s'")
    assert owner.execute("SELECT FROM list_waiters()").fetchall() == [], "dead clients are not listed"


def test_list_presence_tells_living_sessions_from_dead_ones(owner: psycopg.Connection, dsn: str) -> None:
    presence = uuid.uuid4()
    with psycopg.connect(dsn, autocommit=True, options="-c search_path=dblock") as holder:
        holder.execute("SELECT register_presence(%s, '1 hour')", [presence])
        holder.execute("SELECT try_acquire('tied', presence => %s)", [presence])
        holder.execute("SELECT try_acquire('not tied')")
        listed = owner.execute("SELECT name, alive, session FROM list_presence()").fetchall()
        assert listed == [("tied", True, holder.info.backend_pid)]
    alive = "SELECT alive FROM list_presence('tied')"
    eventually(lambda: owner.execute(alive).fetchall() == [(False,)], "the end of the session")
    assert owner.execute("SELECT gone_since FROM list_presence()").fetchall() == [(None,)], "looking starts no grace"
