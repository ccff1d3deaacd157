"""The SQL functions as any language calls them: each promise, tested at the step that could break it."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
from psycopg import errors

from tests.support import mutants
from tests.support.sessions import Sessions
from tests.support.tokens import BASE, T1, T2

pytestmark = pytest.mark.usefixtures("known_tokens")

TRY = "SELECT granted, token FROM try_acquire(%s)"


def one(connection: psycopg.Connection, statement: str, *args: Any) -> Any:
    row = connection.execute(statement.encode(), args or None).fetchone()
    assert row is not None
    return row[0]


def test_try_acquire_returns_the_deadline_to_winner_and_loser(owner: psycopg.Connection) -> None:
    won = owner.execute("SELECT * FROM try_acquire('a', '1 hour')").fetchone()
    lost = owner.execute("SELECT * FROM try_acquire('a', '6 hours')").fetchone()
    assert won is not None
    assert lost is not None
    assert (won[0], won[1], won[3]) == (True, T1, 3600)
    assert (lost[0], lost[1], lost[2]) == (False, None, won[2])
    assert 3500 < lost[3] <= 3600


def test_deadline_counts_from_the_clock_and_not_from_the_transactions_start(sessions: Sessions) -> None:
    session = sessions.open()
    session.do("BEGIN")
    session.do("SELECT pg_sleep(0.3)")
    (late,) = session.do("SELECT expires_at >= now() + interval '1 hour 0.3 s' FROM try_acquire('a', '1 hour')")
    assert late
    session.do("SELECT pg_sleep(0.3)")
    (later,) = session.do(f"SELECT expires_at >= now() + interval '1 hour 0.6 s' FROM renew('a', {T1}, '1 hour')")
    assert later
    session.do("COMMIT")


@pytest.mark.parametrize("ttl", ["1 day", "-1 mon 31 days", "24:00:00"])
def test_ttl_is_exact_seconds_whatever_the_calendar(owner: psycopg.Connection, ttl: str) -> None:
    """In this time zone the clocks go forward within a day. A month has as many days as the present month."""
    owner.execute("SET timezone TO 'AAA0BBB,%s,300'" % (datetime.now(timezone.utc).timetuple().tm_yday - 1))
    for call in ("try_acquire('a', %s)", f"renew('a', {T1}, %s)"):
        exact = one(
            owner,
            f"SELECT abs(remaining - extract(epoch FROM expires_at) + extract(epoch FROM clock_timestamp()))"
            f" FROM {call}",
            ttl,
        )
        assert exact < 60


def test_deadline_counts_from_after_every_wait(sessions: Sessions) -> None:
    """A grant that had to wait, for example until the tokens had caught up, gives a lease of full length."""
    keeper, waiter = sessions.open(), sessions.open()
    keeper.do("SELECT setval('token_server_start', 1)")
    keeper.do("BEGIN")
    keeper.do("LOCK TABLE token_clock IN EXCLUSIVE MODE")
    waiter.do("SET lock_timeout = '60s'")  # longer than a machine stands still
    waiting = waiter.start("SELECT granted FROM try_acquire('a', '1 hour')")
    waiter.wait_until_blocked()
    (committed_at,) = keeper.do("SELECT clock_timestamp()")
    keeper.do("COMMIT")
    assert waiting.result(60) == (True,)
    (granted_at, expires_at) = waiter.do("SELECT granted_at, expires_at FROM holder('a')")
    assert granted_at >= committed_at
    assert expires_at - granted_at == timedelta(hours=1)


def test_renewal_never_shortens_a_lease(sessions: Sessions) -> None:
    """Two concurrent renewals may arrive in either order. The client relies on the longer one."""
    session = sessions.open()
    session.do("SELECT * FROM try_acquire('a', '1 hour')")
    (far,) = session.do(f"SELECT expires_at FROM renew('a', {T1}, '2 hours')")
    assert session.do(f"SELECT expires_at, remaining FROM renew('a', {T1}, '1 hour')") == (far, 3600)


def test_clock_set_back_does_not_leave_the_deadline_far_ahead(sessions: Sessions) -> None:
    """The deadline is an hour too late, as after the clock was set back. The next renewal corrects it."""
    session = sessions.open()
    session.do("SELECT * FROM try_acquire('a', '2 hours')")
    session.do("UPDATE distributed_locks SET expires_at = expires_at + interval '1 hour'")
    session.do(f"SELECT * FROM renew('a', {T1}, '1 hour')")
    (left,) = session.do("SELECT remaining FROM holder('a')")
    assert 7100 < left <= 7200


def test_lease_that_expired_within_a_transaction_is_over(sessions: Sessions) -> None:
    """By the transaction's start time the lease would not be expired."""
    session = sessions.open()
    session.do("BEGIN")
    session.do("SELECT * FROM try_acquire('a', '1 hour')")
    session.do("UPDATE distributed_locks SET expires_at = clock_timestamp()")
    assert session.do(f"SELECT count(*) FROM renew('a', {T1})") == (0,)
    assert session.do("SELECT count(*) FROM holder('a')") == (0,)
    assert session.do(f"SELECT release('a', {T1})") == (False,)
    assert session.do(TRY, "a") == (True, T2)


def renewal_that_waited_past_its_deadline(sessions: Sessions) -> bool:
    keeper, renewing = sessions.open(), sessions.open()
    renewing.do("SELECT * FROM try_acquire('a', '2 s')")
    keeper.do("BEGIN")
    keeper.do("SELECT 1 FROM distributed_locks WHERE name = 'a' FOR SHARE")
    waiting = renewing.start(f"SELECT count(*) FROM renew('a', {T1})")
    renewing.wait_until_blocked()
    keeper.do("SELECT pg_sleep(extract(epoch FROM expires_at - clock_timestamp()) + 0.05) FROM distributed_locks")
    keeper.do("COMMIT")
    return bool(waiting.result(60)[0])


@pytest.mark.second_stage
def test_renewal_that_had_to_wait_cannot_revive_an_expired_lease(sessions: Sessions) -> None:
    assert not renewal_that_waited_past_its_deadline(sessions)


@pytest.mark.second_stage
def test_interleaving_catches_a_renewal_that_checks_before_it_waits(
    sessions: Sessions, owner: psycopg.Connection
) -> None:
    held_first = mutants.altered("20_renew.sql", "FOR NO KEY UPDATE;", ";")
    mutants.replace(owner, held_first)
    assert renewal_that_waited_past_its_deadline(sessions)


def test_renew_and_release_act_on_one_exact_grant(owner: psycopg.Connection) -> None:
    owner.execute("SELECT try_acquire('a'), try_acquire('b')")
    for name, token in (("a", T2), ("b", T1), ("a", BASE), ("a", 0), ("a", -1), ("c", T1), ("a", 2**63 - 1)):
        assert one(owner, "SELECT release(%s, %s)", name, token) is False
        assert one(owner, "SELECT count(*) FROM renew(%s, %s)", name, token) == 0
    assert one(owner, "SELECT count(*) FROM distributed_locks WHERE expires_at > clock_timestamp()") == 2


def test_release_returns_whether_it_has_freed_the_lock(owner: psycopg.Connection) -> None:
    """A retry returns false, and so does a release of a lock that was freed otherwise. The client knows which."""
    owner.execute("SELECT try_acquire('a')")
    assert one(owner, f"SELECT release('a', {T1})") is True
    assert one(owner, f"SELECT release('a', {T1})") is False
    owner.execute("SELECT try_acquire('a')")
    assert one(owner, f"SELECT release('a', {T1})") is False
    assert one(owner, "SELECT count(*) FROM holder('a')") == 1


def test_release_frees_a_lease_that_is_being_renewed(sessions: Sessions) -> None:
    """The renewal writes another version of the row after the release has looked for it."""
    holder, keepalive = sessions.open(), sessions.open()
    (token,) = holder.do("SELECT token FROM try_acquire('a')")
    keepalive.do("BEGIN")
    keepalive.do("SELECT * FROM renew('a', %s)", token)
    releasing = holder.start("SELECT release('a', %s)", token)
    holder.wait_until_blocked()
    keepalive.do("COMMIT")
    assert releasing.result(60) == (True,)
    assert holder.do("SELECT granted FROM try_acquire('a')") == (True,)


def test_late_release_that_waits_for_the_next_grant_does_not_free_it(sessions: Sessions) -> None:
    late, other = sessions.open(), sessions.open()
    (token,) = late.do("SELECT token FROM try_acquire('a')")
    other.do("BEGIN")
    assert other.do("SELECT release('a', %s)", token) == (True,)
    (newer,) = other.do("SELECT token FROM try_acquire('a')")
    releasing = late.start("SELECT release('a', %s)", token)
    late.wait_until_blocked()
    other.do("COMMIT")
    assert releasing.result(60) == (False,)
    assert late.do("SELECT token FROM holder('a')") == (newer,)


@pytest.mark.parametrize("deleted", [False, True])
def test_try_grants_the_version_of_the_row_that_it_has_locked(
    sessions: Sessions, owner: psycopg.Connection, deleted: bool
) -> None:
    """Other grants write newer versions of the row, or another row, after the try has taken its snapshot."""
    queue = "          -- A ticket in the queue comes first.\n"
    passes = "current_setting('application_name') <> 'held'"
    stop = f"          AND ({passes} OR (SELECT pg_advisory_xact_lock(1) IS NOT NULL))\n"
    mutants.replace(owner, mutants.altered("10_try_acquire.sql", queue, stop + queue))
    held, other, keeper = sessions.open("held"), sessions.open(), sessions.open()
    (token,) = other.do("SELECT token FROM try_acquire('a')")
    other.do("SELECT release('a', %s)", token)
    keeper.do("SELECT pg_advisory_lock(1)")
    trying = held.start("SELECT granted, token FROM try_acquire('a')")
    held.wait_until_blocked()
    if deleted:
        assert other.do("SELECT reap('0 s')") == (1,)
    (token,) = other.do("SELECT token FROM try_acquire('a')")
    other.do("SELECT release('a', %s)", token)
    keeper.do("SELECT pg_advisory_unlock(1)")
    granted, newer = trying.result(60)
    assert granted
    assert newer > token
    assert other.do("SELECT token FROM holder('a')") == (newer,)


def test_release_of_an_expired_lease_is_false_though_the_lock_is_still_free(owner: psycopg.Connection) -> None:
    owner.execute("SELECT try_acquire('a')")
    owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp()")
    assert one(owner, f"SELECT release('a', {T1})") is False


def test_refused_try_takes_no_row_lock(sessions: Sessions) -> None:
    """The transaction of a refused try stays open, and the holder can still renew and release."""
    holder, loser = sessions.open(), sessions.open()
    holder.do("SET lock_timeout TO '2 s'")
    _, token = holder.do(TRY, "a")
    loser.do("BEGIN")
    assert loser.do(TRY, "a") == (False, None)
    assert holder.do("SELECT count(*) FROM renew('a', %s)", token) == (1,)
    assert holder.do("SELECT release('a', %s)", token) == (True,)
    loser.do("COMMIT")


def test_retried_attempt_finds_its_own_grant(owner: psycopg.Connection) -> None:
    mine, other = uuid.uuid4(), uuid.uuid4()
    ask = "SELECT granted, token FROM try_acquire('a', '30 s', NULL, NULL, %s)"
    assert owner.execute(ask, [mine]).fetchone() == (True, T1)
    assert owner.execute(ask, [mine]).fetchone() == (True, T1)
    assert owner.execute(ask, [other]).fetchone() == (False, None)
    assert owner.execute(ask, [None]).fetchone() == (False, None)
    owner.execute(f"SELECT release('a', {T1})")
    assert owner.execute(ask, [mine]).fetchone() == (True, T2)


def test_retried_attempt_returns_the_remaining_time_of_its_grant(owner: psycopg.Connection) -> None:
    ask = "SELECT remaining FROM try_acquire('a', '10 s', attempt => %s)"
    mine = uuid.uuid4()
    assert one(owner, ask, mine) == 10
    owner.execute("UPDATE distributed_locks SET expires_at = expires_at - interval '6 s'")
    assert 0 < one(owner, ask, mine) <= 4


def test_abandoned_attempt_gives_back_its_own_grant_and_no_other(owner: psycopg.Connection) -> None:
    mine, other = uuid.uuid4(), uuid.uuid4()
    assert one(owner, "SELECT abandon('a', %s)", mine) is False
    owner.execute("SELECT try_acquire('a', attempt => %s)", [mine])
    owner.execute("SELECT try_acquire('b', attempt => %s)", [other])
    assert one(owner, "SELECT abandon('a', %s)", other) is False
    assert one(owner, "SELECT abandon('b', %s)", mine) is False
    assert one(owner, "SELECT count(*) FROM holder('a')") == 1
    assert one(owner, "SELECT abandon('a', %s)", mine) is True
    assert one(owner, "SELECT count(*) FROM holder('a')") == 0
    assert one(owner, "SELECT abandon('a', %s)", mine) is False


def test_requests_without_an_attempt_are_not_retries_of_each_other(owner: psycopg.Connection) -> None:
    assert owner.execute(TRY, ["a"]).fetchone() == (True, T1)
    assert owner.execute(TRY, ["a"]).fetchone() == (False, None)


@pytest.mark.parametrize("default", ["off", "local", "remote_write", "on", "remote_apply"])
@pytest.mark.parametrize("call", ["try_acquire('a')", f"renew('b', {T1})"])
def test_grants_and_renewals_commit_durably_whatever_the_default(
    sessions: Sessions, owner: psycopg.Connection, default: str, call: str
) -> None:
    owner.execute("SELECT try_acquire('b')")
    session = sessions.open()
    session.do(f"SET synchronous_commit TO {default}")
    session.do("BEGIN")
    session.do(f"SELECT * FROM {call}")
    assert session.do("SHOW synchronous_commit") == ("remote_apply" if default == "remote_apply" else "on",)
    session.do("COMMIT")
    assert session.do("SHOW synchronous_commit") == (default,)


def test_release_leaves_synchronous_commit_alone_unless_not_durable(sessions: Sessions) -> None:
    session = sessions.open()
    session.do("BEGIN")
    session.do(f"SELECT release('a', {T1})")
    assert session.do("SHOW synchronous_commit") == ("on",)
    session.do(f"SELECT release('a', {T1}, durable => false)")
    assert session.do("SHOW synchronous_commit") == ("off",)
    session.do("COMMIT")
    assert session.do("SHOW synchronous_commit") == ("on",)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("try_acquire('')", "1 to 512 bytes; this one has 0"),
        ("try_acquire(NULL)", "1 to 512 bytes"),
        ("try_acquire(repeat('x', 513))", "this one has 513"),
        ("try_acquire('a', '99 ms')", "ttl of lock 'a' is 00:00:00.099"),
        ("try_acquire('a', '24:00:01')", "between 100 ms and 24 h"),
        ("try_acquire('a', NULL)", "between 100 ms and 24 h"),
        ("try_acquire('a', '-1 s')", "between 100 ms and 24 h"),
        ("try_acquire('a', holder => repeat('x', 513))", "at most 512 bytes"),
        ("try_acquire('a', meta => to_jsonb(repeat('x', 8192)))", "at most 8192 bytes of JSON; this one has 8194"),
        (f"renew('a', {T1}, '1 ms')", "between 100 ms and 24 h"),
    ],
)
def test_database_refuses_arguments_outside_the_limits(owner: psycopg.Connection, call: str, message: str) -> None:
    with pytest.raises(errors.InvalidParameterValue, match=message):
        owner.execute(f"SELECT * FROM {call}".encode())
    assert one(owner, "SELECT count(*) FROM distributed_locks") == 0


def test_caller_without_a_holder_name_is_described_by_its_session(owner: psycopg.Connection) -> None:
    owner.execute("SELECT try_acquire('a')")
    described = one(owner, "SELECT holder FROM holder('a')")
    assert str(owner.info.backend_pid) in described
    assert owner.info.user in described


def test_updates_of_a_hot_lock_stay_on_their_page(owner: psycopg.Connection) -> None:
    """These updates change no index, so all but the first few are heap-only."""
    for _ in range(300):
        owner.execute("SELECT release('a', (SELECT token FROM try_acquire('a')))")
    owner.execute("SELECT pg_stat_force_next_flush()") if owner.info.server_version >= 150000 else None
    updated, hot = owner.execute(
        "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'distributed_locks'"
    ).fetchone() or (0, 0)
    if owner.info.server_version >= 150000:
        assert updated == 600
    assert hot >= 0.95 * updated
    assert one(owner, "SELECT pg_relation_size('distributed_locks') / 8192") <= 3


@pytest.mark.parametrize(
    "ttl", ["1 year -360 days 1 hour", "-1 year 360 days 1 hour", "100000 years -36000000 days 1 hour"]
)
def test_ttl_limit_applies_to_real_seconds_and_not_to_compared_intervals(owner: psycopg.Connection, ttl: str) -> None:
    """Postgres compares a year as 360 days and converts it to 365.25, so each of these compares equal to an hour."""
    assert one(owner, f"SELECT interval '{ttl}' = '1 hour'")
    owner.execute("SELECT try_acquire('held', attempt => gen_random_uuid())")
    for call in (
        f"try_acquire('a', '{ttl}')",
        f"try_acquire('a', '{ttl}', 'me')",
        f"acquire('a', '{ttl}', 'me', attempt => gen_random_uuid(), client => gen_random_uuid())",
        f"renew('held', {T1}, '{ttl}')",
        f"renew_all('{{held}}', '{{{T1}}}', ARRAY[interval '{ttl}'])",
    ):
        with pytest.raises(errors.InvalidParameterValue, match="between 100 ms and 24 h"):
            owner.execute(f"SELECT * FROM {call}".encode())
