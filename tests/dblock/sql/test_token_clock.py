"""Tokens follow the clock of the server, and never go back, whatever the clock does and whichever sessions interleave.

The clock cannot be set here, so a test sets the sequence back or ahead instead, as a failover or an operator would.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from tests.support import mutants
from tests.support.pretender import NO_TIMELINE, pretend
from tests.support.sessions import Session, Sessions
from tests.support.still_clock import EPOCH, StillClock

GRANT = "SELECT token FROM try_acquire(%s)"
CLOCK = "SELECT (date_part('epoch', clock_timestamp()) * 1000000)::bigint"
SET = "SELECT setval('token_sequence', (date_part('epoch', clock_timestamp()) * 1000000)::bigint + %s)"
RESTART = "SELECT setval('token_server_start', 1)"
BEFORE_SETVAL = "            target := pg_catalog.setval('token_sequence'"
SECOND = 1_000_000
GATE = 815


def set_behind(session: Session, clock: StillClock, microseconds: int) -> None:
    """Set the sequence behind a clock that stands still."""
    now = (clock.now - EPOCH) // timedelta(microseconds=1)
    session.do("SELECT setval('token_sequence', %s)", now - microseconds)


FORGET = "UPDATE distributed_locks SET token = 0, minted_server_start = minted_server_start - interval '1 microsecond'"
"""Make the locks' rows as old as in a server that was started before, so that they do not show the last tokens."""


def grant(session: Session, name: str) -> int:
    """Grant the lock and release it; return the token."""
    (token,) = session.do(GRANT, name)
    assert session.do("SELECT release(%s, %s)", name, token) == (True,)
    return int(token)


@pytest.mark.parametrize("name", ["known", "new"])
def test_token_is_at_the_clock_if_the_sequence_was_more_than_a_second_behind(sessions: Sessions, name: str) -> None:
    session = sessions.open()
    grant(session, "known")
    session.do(SET, -2 * SECOND)
    (before,) = session.do(CLOCK)
    token = grant(session, name)
    (after,) = session.do(CLOCK)
    assert before <= token <= after


@pytest.mark.usefixtures("known_tokens")
def test_token_counts_up_by_one_if_the_sequence_is_ahead_of_the_clock(sessions: Sessions) -> None:
    session = sessions.open()
    tokens = [grant(session, name) for name in "aab"]
    assert tokens == [tokens[0], tokens[0] + 1, tokens[0] + 2]


@pytest.mark.parametrize("behind", [0, SECOND // 4, SECOND - 1])
def test_token_counts_up_by_one_if_the_sequence_is_less_than_a_second_behind(
    sessions: Sessions, clock: StillClock, behind: int
) -> None:
    """Otherwise each grant would set the sequence."""
    session = sessions.open()
    grant(session, "a")
    set_behind(session, clock, behind)
    tokens = [grant(session, name) for name in "bcb"]
    now = (clock.now - EPOCH) // timedelta(microseconds=1)
    assert tokens == [now - behind + 1, now - behind + 2, now - behind + 3]


@pytest.mark.parametrize("name", ["known", "new"])
def test_first_token_after_a_start_of_the_server_is_at_the_clock(sessions: Sessions, name: str) -> None:
    """A failover may take less than a second, so the sequence may be less than a second behind."""
    session = sessions.open()
    grant(session, "known")
    session.do(FORGET)
    session.do(RESTART)
    session.do(SET, -SECOND // 10)
    (before,) = session.do(CLOCK)
    token = grant(session, name)
    (after,) = session.do(CLOCK)
    assert before <= token <= after


def test_first_token_after_a_start_is_far_ahead_if_the_sequence_is_ahead_of_the_clock(sessions: Sessions) -> None:
    """Then the clock cannot show how many tokens were lost."""
    session = sessions.open()
    (ahead,) = session.do(SET, 3600 * SECOND)
    session.do(RESTART)
    tokens = [grant(session, name) for name in "ab"]
    assert tokens == [ahead + SECOND + 1, ahead + SECOND + 2]


def test_grant_without_a_token_does_not_count_as_the_first_of_a_server(sessions: Sessions) -> None:
    session = sessions.open()
    grant(session, "a")
    session.do(FORGET)
    session.do(RESTART)
    session.do(SET, -SECOND // 10)
    (number,) = session.do("SELECT token FROM try_acquire('a', durable => false)")
    assert session.do("SELECT release('a', %s)", number) == (True,)
    (before,) = session.do(CLOCK)
    assert grant(session, "a") >= before


def test_token_is_above_the_last_one_of_its_lock_though_the_sequence_went_back(sessions: Sessions) -> None:
    """A table that was restored without its sequence, for example."""
    session = sessions.open()
    grant(session, "a")
    (ahead,) = session.do("UPDATE distributed_locks SET token = token + 3600000000 RETURNING token")
    token = grant(session, "a")
    assert token > ahead
    assert grant(session, "new") > token


def test_idle_caller_that_moved_the_tokens_stops_no_other_grant(sessions: Sessions) -> None:
    idle, other = sessions.open(), sessions.open()
    grant(other, "b")
    idle.do(SET, -2 * SECOND)
    idle.do("BEGIN")
    (first,) = idle.do(GRANT, "a")
    other.do("SET lock_timeout = '1 ms'")
    assert grant(other, "b") > first
    other.do(SET, -2 * SECOND)
    (clock,) = other.do(CLOCK)
    assert grant(other, "b") >= clock, "the tokens could not move up beside the idle transaction"
    idle.do("ROLLBACK")
    assert grant(other, "b") > clock


def test_rollback_does_not_set_the_tokens_back(sessions: Sessions, clock: StillClock) -> None:
    session, other = sessions.open(), sessions.open()
    set_behind(session, clock, 2 * SECOND)
    session.do("BEGIN")
    (first,) = session.do(GRANT, "a")
    session.do("ROLLBACK")
    assert grant(other, "a") == first + 1


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_tokens_move_up_in_a_stricter_transaction(sessions: Sessions, isolation: str) -> None:
    session, other = sessions.open(), sessions.open()
    grant(other, "b")
    session.do(f"BEGIN ISOLATION LEVEL {isolation}")
    session.do("SELECT 1 FROM distributed_locks")
    session.do(SET, -2 * SECOND)
    between = grant(other, "b")
    session.do(SET, -2 * SECOND)
    assert session.do(GRANT, "a")[0] > between
    session.do("COMMIT")


def held_before_it_sets_the_sequence(
    sessions: Sessions, owner: psycopg.Connection, clock: StillClock | None = None, *, locked: bool = True
) -> tuple[Session, Future[Any], Session]:
    """Start a grant that moves the tokens up, and hold it between reading and setting the sequence.

    Returns the granting session, its future token and the session that keeps it from continuing.
    """
    stop = "            PERFORM pg_advisory_xact_lock_shared(815) WHERE current_setting('application_name') = 'held';\n"
    body = mutants.altered("03_token_clock.sql", BEFORE_SETVAL, stop + BEFORE_SETVAL)
    # The held session waits at the gate for as long as the test needs.
    body = body.replace("'2s'", "CASE current_setting('application_name') WHEN 'held' THEN '60s' ELSE '2s' END")
    if not locked:
        body = body.replace("LOCK TABLE token_clock IN SHARE UPDATE EXCLUSIVE MODE;", "")
    mutants.replace(owner, body)
    if clock is not None:
        clock.govern()
    held, keeper = sessions.open("held"), sessions.open()
    for name in "abc":
        grant(keeper, name)
    keeper.do("SELECT pg_advisory_lock(%s)", GATE)
    if clock is None:
        keeper.do(SET, -2 * SECOND)
    else:
        clock.advance(2)
    waiting = held.start(GRANT, "a")
    held.wait_until_blocked()
    return held, waiting, keeper


def test_second_session_waits_while_the_first_moves_the_tokens(
    sessions: Sessions, owner: psycopg.Connection, clock: StillClock
) -> None:
    _, waiting, keeper = held_before_it_sets_the_sequence(sessions, owner, clock)
    second = sessions.open()
    second.do("SET lock_timeout = '60s'")  # longer than a machine stands still
    later = second.start(GRANT, "b")
    second.wait_until_blocked()
    keeper.do("SELECT pg_advisory_unlock(%s)", GATE)
    (first_token,), (second_token,) = waiting.result(60), later.result(60)
    # Each mints after the sequence was set once. Which one is first does not matter.
    assert abs(first_token - second_token) == 1


def test_session_that_is_stopped_while_it_moves_the_tokens_costs_others_an_error(
    sessions: Sessions, owner: psycopg.Connection
) -> None:
    _, waiting, keeper = held_before_it_sets_the_sequence(sessions, owner)
    other = sessions.open()
    other.do("SET lock_timeout = '20 ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable, match="has locked table token_clock for too long"):
        other.do(GRANT, "b")
    assert other.do("SHOW lock_timeout") == ("20ms",)
    keeper.do("SELECT pg_advisory_unlock(%s)", GATE)
    (token,) = waiting.result(60)
    assert grant(other, "b") > token


@pytest.mark.second_stage
def test_wait_for_the_token_clock_is_bounded_without_a_lock_timeout(
    sessions: Sessions, owner: psycopg.Connection
) -> None:
    _, waiting, keeper = held_before_it_sets_the_sequence(sessions, owner)
    other = sessions.open()
    started = time.monotonic()
    with pytest.raises(psycopg.errors.LockNotAvailable, match="too long"):
        other.do(GRANT, "b")
    assert 1.9 < time.monotonic() - started < 15
    assert other.do("SHOW lock_timeout") == ("0",)
    keeper.do("SELECT pg_advisory_unlock(%s)", GATE)
    waiting.result(60)


def overtake_while_the_tokens_move(sessions: Sessions, owner: psycopg.Connection, clock: StillClock) -> tuple[int, int]:
    """Let another session move the tokens and grant, and then the held one. Return the next tokens of the lock."""
    _, waiting, keeper = held_before_it_sets_the_sequence(sessions, owner, clock, locked=False)
    clock.advance(0.5)
    overtaking = sessions.open()
    first = grant(overtaking, "b")
    owner.execute("DELETE FROM distributed_locks WHERE name = 'b'")  # what the reaper does, later
    keeper.do("SELECT pg_advisory_unlock(%s)", GATE)
    waiting.result(60)
    return first, grant(overtaking, "b")


def test_interleaving_catches_sessions_that_move_the_tokens_at_the_same_time(
    sessions: Sessions, owner: psycopg.Connection, clock: StillClock
) -> None:
    first, second = overtake_while_the_tokens_move(sessions, owner, clock)
    assert second < first


@pytest.mark.second_stage
def test_token_minted_before_the_server_was_frozen_is_discarded(sessions: Sessions, owner: psycopg.Connection) -> None:
    """Another node may have been promoted and have granted since then."""
    minted = "                        -- Read after minting"
    stop = "                        PERFORM pg_advisory_xact_lock_shared(815);\n"
    mutants.replace(owner, mutants.altered("10_try_acquire.sql", minted, stop + minted))
    session, keeper = sessions.open(), sessions.open()
    grant(session, "a")
    keeper.do("SELECT pg_advisory_lock(%s)", GATE)
    waiting = session.start(GRANT, "a")
    session.wait_until_blocked()
    time.sleep(1.05)
    (thawed,) = keeper.do(CLOCK)
    keeper.do("SELECT pg_advisory_unlock(%s)", GATE)
    assert waiting.result(60)[0] >= thawed


def test_tokens_end_below_2_to_the_53(sessions: Sessions) -> None:
    session = sessions.open()
    session.do("SELECT raise_tokens(%s)", 2**53 - 2**40 - 1)
    assert grant(session, "a") == 2**53 - 2**40
    session.do("SELECT setval('token_sequence', %s)", 2**53 - 3)
    assert grant(session, "a") == 2**53 - 2
    session.do(RESTART)
    with pytest.raises(psycopg.errors.RaiseException, match="tokens end at 2\\^53"):
        grant(session, "new")
    assert grant(session, "a") == 2**53 - 1
    with pytest.raises(psycopg.errors.SequenceGeneratorLimitExceeded):
        grant(session, "a")


def test_grants_need_no_function_that_reads_the_wal(sessions: Sessions, dsn: str) -> None:
    """A server that keeps its log elsewhere (Aurora) refuses such functions."""
    pretend(dsn, {**NO_TIMELINE})
    session = sessions.open()
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        session.do("SELECT pg_current_wal_lsn()")
    tokens = []
    for _ in range(2):
        tokens += [grant(session, name) for name in "aab"]
        session.do(RESTART)
        session.do(SET, -2 * SECOND)
    assert tokens == sorted(set(tokens))
