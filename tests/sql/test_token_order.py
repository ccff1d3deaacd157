"""Truth 1, one interleaving at a time: the order of tokens is the order of grants."""

from __future__ import annotations

import psycopg

from tests.support import mutants
from tests.support.sessions import Sessions

TRY = "SELECT granted, token FROM try_acquire(%s)"


def overtaken_while_seeding(sessions: Sessions, owner: psycopg.Connection) -> tuple[int, int]:
    """One session stops before its INSERT; another is granted, releases, and its row is deleted. Both tokens."""
    gate = sessions.gate("INSERT")
    overtaken, overtaking = sessions.open("held"), sessions.open()
    waiting = overtaken.start(TRY, "a")
    overtaken.wait_until_blocked()

    granted, first = overtaking.do(TRY, "a")
    assert granted
    assert overtaking.do("SELECT release('a', %s)", first) == (True,)
    owner.execute("DELETE FROM distributed_locks WHERE expires_at <= clock_timestamp()")

    gate.open()
    granted, second = waiting.result(20)
    assert granted
    return first, second


def test_a_session_overtaken_while_seeding_gets_the_later_token(sessions: Sessions, owner: psycopg.Connection) -> None:
    first, second = overtaken_while_seeding(sessions, owner)
    assert second > first


def test_that_interleaving_catches_a_token_minted_in_values(sessions: Sessions, owner: psycopg.Connection) -> None:
    mutants.replace(owner, mutants.TOKEN_IN_VALUES)
    first, second = overtaken_while_seeding(sessions, owner)
    assert second < first


def test_of_two_sessions_on_a_fresh_name_the_second_waits_for_the_first(sessions: Sessions) -> None:
    first, second = sessions.open(), sessions.open()
    first.do("BEGIN")
    granted, token = first.do(TRY, "a")
    assert granted
    waiting = second.start(TRY, "a")
    second.wait_until_blocked()
    first.do("COMMIT")
    assert waiting.result(20) == (False, None)
    assert first.do("SELECT token FROM holder('a')") == (token,)


def test_a_grant_that_is_rolled_back_goes_to_the_next_with_a_higher_token(sessions: Sessions) -> None:
    first, second = sessions.open(), sessions.open()
    first.do("BEGIN")
    _, token = first.do(TRY, "a")
    waiting = second.start(TRY, "a")
    second.wait_until_blocked()
    first.do("ROLLBACK")
    granted, next_token = waiting.result(20)
    assert granted
    assert next_token > token


def test_two_who_wait_for_one_free_row_get_one_grant(sessions: Sessions, owner: psycopg.Connection) -> None:
    """Both saw the lock free; the row is held by a third. When it is let go, one gets it and one is told no."""
    owner.execute("SELECT release('a', (SELECT token FROM try_acquire('a')))")
    keeper, one, other = sessions.open(), sessions.open(), sessions.open()
    keeper.do("BEGIN")
    keeper.do("SELECT 1 FROM distributed_locks WHERE name = 'a' FOR UPDATE")
    waiting = [session.start(TRY, "a") for session in (one, other)]
    one.wait_until_blocked()
    other.wait_until_blocked()
    keeper.do("COMMIT")
    assert sorted(future.result(20)[0] for future in waiting) == [False, True]


def test_the_token_is_minted_after_the_wait_for_the_row(sessions: Sessions, owner: psycopg.Connection) -> None:
    """While one waits for a row, tokens go to other locks; its own must come from after the wait."""
    owner.execute("SELECT release('a', (SELECT token FROM try_acquire('a')))")
    keeper, waiter = sessions.open(), sessions.open()
    keeper.do("BEGIN")
    keeper.do("SELECT 1 FROM distributed_locks WHERE name = 'a' FOR UPDATE")
    waiting = waiter.start(TRY, "a")
    waiter.wait_until_blocked()
    _, meanwhile = sessions.open().do(TRY, "another")
    keeper.do("COMMIT")
    granted, token = waiting.result(20)
    assert granted
    assert token > meanwhile


def test_the_sequence_hands_out_one_at_a_time_and_never_cycles(owner: psycopg.Connection) -> None:
    row = owner.execute(
        "SELECT cache_size, cycle, increment_by, max_value FROM pg_sequences"
        " WHERE schemaname = 'dblock' AND sequencename = 'token_sequence'"
    ).fetchone()
    assert row == (1, False, 1, 2**63 - 1)
