"""Truth 1, one interleaving at a time: the order of tokens is the order of grants."""

from __future__ import annotations

import psycopg
import pytest

from tests.support import mutants
from tests.support.sessions import Sessions

TRY = "SELECT granted, token FROM try_acquire(%s)"


def overtake_while_seeding(sessions: Sessions, owner: psycopg.Connection) -> tuple[int | None, int]:
    """Stop one session before its INSERT, let another try, release, and have its row deleted. Return both tokens."""
    gate = sessions.gate("INSERT")
    overtaken, overtaking = sessions.open("held"), sessions.open()
    waiting = overtaken.start(TRY, "a")
    overtaken.wait_until_blocked()

    granted, first = overtaking.do(TRY, "a")
    if granted:
        assert overtaking.do("SELECT release('a', %s)", first) == (True,)
        owner.execute("DELETE FROM distributed_locks WHERE expires_at <= clock_timestamp()")

    gate.open()
    granted, second = waiting.result(60)
    assert granted
    return first, second


def test_overtaken_session_still_gets_the_later_token(sessions: Sessions, owner: psycopg.Connection) -> None:
    first, second = overtake_while_seeding(sessions, owner)
    assert first is not None
    assert second > first


def test_interleaving_catches_a_token_minted_in_values(sessions: Sessions, owner: psycopg.Connection) -> None:
    mutants.replace(owner, mutants.TOKEN_IN_VALUES)
    first, second = overtake_while_seeding(sessions, owner)
    assert first is not None
    assert second < first


@pytest.mark.parametrize("fresh", [True, False])
def test_second_session_does_not_wait_for_the_first(sessions: Sessions, fresh: bool) -> None:
    first, second = sessions.open(), sessions.open()
    if not fresh:
        first.do("SELECT release('a', (SELECT token FROM try_acquire('a')))")
    first.do("BEGIN")
    granted, token = first.do(TRY, "a")
    assert granted
    second.do("SET lock_timeout = '1 ms'")
    assert second.do("SELECT granted, token, remaining FROM try_acquire('a')") == (False, None, 0.0)
    first.do("COMMIT")
    assert second.do(TRY, "a") == (False, None)
    assert first.do("SELECT token FROM holder('a')") == (token,)


@pytest.mark.parametrize("fresh", [True, False])
def test_retried_attempt_waits_for_its_first_request(
    sessions: Sessions, owner: psycopg.Connection, fresh: bool
) -> None:
    """Otherwise the retry would be refused, and the first request would commit a grant without a holder."""
    # The retry waits for two seconds, which is too short for a machine that stands still.
    mutants.replace(owner, mutants.altered("10_try_acquire.sql", "'2s'", "'60s'"))
    attempt = "SELECT granted, token FROM try_acquire('a', attempt => '0f1e2d3c4b5a69788796a5b4c3d2e1f0'"
    first, again = sessions.open(), sessions.open()
    if not fresh:
        first.do("SELECT release('a', (SELECT token FROM try_acquire('a')))")
    first.do("BEGIN")
    _, token = first.do(attempt + ")")
    waiting = again.start(attempt + ", retry => true)")
    again.wait_until_blocked()
    first.do("COMMIT")
    assert waiting.result(60) == (True, token)


def test_retried_attempt_does_not_get_its_expired_grant(sessions: Sessions) -> None:
    attempt = "SELECT granted FROM try_acquire('a', '1 hour', attempt => '0f1e2d3c4b5a69788796a5b4c3d2e1f0')"
    keeper, trying = sessions.open(), sessions.open()
    assert trying.do(attempt) == (True,)
    trying.do("UPDATE distributed_locks SET expires_at = clock_timestamp()")
    keeper.do("BEGIN")
    keeper.do("SELECT 1 FROM distributed_locks FOR SHARE")
    assert trying.do(attempt) == (False,)


def test_grant_after_a_rollback_has_a_higher_token(sessions: Sessions) -> None:
    first, second = sessions.open(), sessions.open()
    first.do("BEGIN")
    _, token = first.do(TRY, "a")
    first.do("ROLLBACK")
    granted, next_token = second.do(TRY, "a")
    assert granted
    assert next_token > token


def test_try_does_not_wait_for_a_locked_row(sessions: Sessions, owner: psycopg.Connection) -> None:
    """The lock is free, and a transaction uses its row. The try is refused at once, and `remaining` is 0."""
    owner.execute("SELECT release('a', (SELECT token FROM try_acquire('a')))")
    (last,) = owner.execute("SELECT token FROM distributed_locks").fetchone() or (None,)
    keeper, trying = sessions.open(), sessions.open()
    keeper.do("BEGIN")
    keeper.do("SELECT 1 FROM distributed_locks WHERE name = 'a' FOR SHARE")
    trying.do("SET lock_timeout = '1 ms'")
    assert trying.do("SELECT granted, token, remaining FROM try_acquire('a')") == (False, None, 0.0)
    keeper.do("COMMIT")
    assert trying.do("SELECT granted, token > %s FROM try_acquire('a')", last) == (True, True)


def test_sequence_caches_no_token_and_never_cycles(owner: psycopg.Connection) -> None:
    row = owner.execute(
        "SELECT cache_size, cycle, increment_by, max_value FROM pg_sequences"
        " WHERE schemaname = 'dblock' AND sequencename = 'token_sequence'"
    ).fetchone()
    assert row == (1, False, 1, 2**53 - 1)
