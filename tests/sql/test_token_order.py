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


def test_a_row_in_anothers_hands_is_not_waited_for(sessions: Sessions, owner: psycopg.Connection) -> None:
    """The lock is free, and a transaction is at work on its row: not to be had now, and `remaining` says why."""
    owner.execute("SELECT release('a', (SELECT token FROM try_acquire('a')))")
    keeper, trying = sessions.open(), sessions.open()
    keeper.do("BEGIN")
    keeper.do("SELECT 1 FROM distributed_locks WHERE name = 'a' FOR SHARE")
    trying.do("SET lock_timeout = '1 ms'")
    assert trying.do("SELECT granted, token, remaining FROM try_acquire('a')") == (False, None, 0.0)
    keeper.do("COMMIT")
    assert trying.do(TRY, "a") == (True, 2)


def test_the_token_is_minted_after_the_wait_for_the_row(sessions: Sessions) -> None:
    """While one waits for a row that another seeds, tokens go to other locks; its own comes from after the wait."""
    seeding, waiter = sessions.open(), sessions.open()
    seeding.do("BEGIN")
    seeding.do("INSERT INTO distributed_locks (name, token, expires_at) VALUES ('a', 0, '-infinity')")
    waiting = waiter.start(TRY, "a")
    waiter.wait_until_blocked()
    _, meanwhile = sessions.open().do(TRY, "another")
    seeding.do("COMMIT")
    granted, token = waiting.result(20)
    assert granted
    assert token > meanwhile


def test_the_sequence_hands_out_one_at_a_time_and_never_cycles(owner: psycopg.Connection) -> None:
    row = owner.execute(
        "SELECT cache_size, cycle, increment_by, max_value FROM pg_sequences"
        " WHERE schemaname = 'dblock' AND sequencename = 'token_sequence'"
    ).fetchone()
    assert row == (1, False, 1, 2**63 - 1)
