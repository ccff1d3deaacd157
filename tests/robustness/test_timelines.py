"""Tokens across a failover that loses some: none repeats, none falls.

The standby is asynchronous and cut off before the last tokens are granted, so after its promotion its sequence stands
where it stood then. By itself it would hand out again what a resource has already seen.
"""

from __future__ import annotations

import shutil

import psycopg
import pytest

import dblock
from dblock._runtime.target import resolve
from dblock.admin import schema
from dblock.embedded import Server
from tests.support import mutants
from tests.support.servers import new_folder
from tests.support.sessions import Sessions
from tests.support.standby import copy_of, kill, promote, recover_to, standby_of, wait_until_caught_up

pytestmark = pytest.mark.timeout(120)


def grant(server: Server, times: int) -> list[int]:
    tokens = []
    with dblock.Client(server.url) as client:
        # Short, because the failover may lose the last release, which keeps the lock until its deadline.
        lock = client.lock("a", ttl=1)
        for _ in range(times):
            with lock as lease:
                tokens.append(lease.token)
    return tokens


def tokens_across_a_failover(own_server: Server) -> list[int]:
    """Grant tokens, lose the last hundred of them in a failover, and grant more."""
    with standby_of(own_server) as standby:
        tokens = grant(own_server, 20)
        wait_until_caught_up(own_server, standby)
        standby.stop()
        tokens += grant(own_server, 100)
        kill(own_server)
        standby.start()
        promote(standby)
        return tokens + grant(standby, 20)


def test_no_token_repeats_or_falls_after_a_failover_that_lost_some(own_server: Server) -> None:
    tokens = tokens_across_a_failover(own_server)
    assert len(tokens) == 140
    assert tokens == sorted(set(tokens))


@pytest.mark.second_stage
def test_failover_run_catches_tokens_that_ignore_the_timeline(own_server: Server) -> None:
    with psycopg.connect(own_server.url, autocommit=True) as owner:
        mutants.replace(owner, mutants.altered("10_try_acquire.sql", "PERFORM enter_timeline();", "NULL;"))
    tokens = tokens_across_a_failover(own_server)
    assert tokens[120] < tokens[119]


def test_a_standby_grants_nothing_and_says_what_to_do(own_server: Server) -> None:
    with standby_of(own_server) as standby:
        wait_until_caught_up(own_server, standby)
        with dblock.Client(standby.url) as client:
            for lock in (client.lock("a"), client.lock("never seen")):
                with pytest.raises(dblock.NotWritable, match="standby"):
                    lock.try_acquire()
        assert schema.status(resolve(standby.url)).standby


@pytest.mark.second_stage
def test_a_second_promotion_goes_further_still(own_server: Server) -> None:
    tokens = grant(own_server, 3)
    with standby_of(own_server) as second:
        wait_until_caught_up(own_server, second)
        kill(own_server)
        promote(second)
        tokens += grant(second, 3)
        with standby_of(second) as third:
            wait_until_caught_up(second, third)
            kill(second)
            promote(third)
            tokens += grant(third, 3)
    assert tokens == sorted(set(tokens))
    assert [token >> 40 for token in tokens] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_no_token_repeats_after_a_recovery_to_a_point_in_time(own_server: Server) -> None:
    """Tokens that were granted after that point are gone from the sequence, not from the resources that saw them."""
    with copy_of(own_server) as copy:
        tokens = grant(own_server, 10)
        with psycopg.connect(own_server.url, autocommit=True) as owner:
            row = owner.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
            assert row is not None
            tokens += grant(own_server, 50)
            owner.execute("SELECT pg_switch_wal()")
        archive = new_folder()
        shutil.copytree(own_server.data / "pg_wal", archive)
        for path in [archive, *archive.iterdir()]:
            path.chmod(0o755)
        try:
            recover_to(copy, row[0], archive)
            with psycopg.connect(copy.url) as owner:
                back = owner.execute("SELECT last_value FROM dblock.token_sequence").fetchone()
            assert back is not None
            assert back[0] < tokens[-1], "the sequence did not go back, so this would prove nothing"
            tokens += grant(copy, 5)
        finally:
            shutil.rmtree(archive)
    assert tokens == sorted(set(tokens))


def test_a_timeline_that_goes_back_takes_the_tokens_ahead_too(dsn: str) -> None:
    """pg_upgrade makes a cluster that begins at timeline 1 again."""
    with psycopg.connect(dsn, autocommit=True) as owner, dblock.Client(dsn) as client:
        before = client.lock("a").acquire().token
        owner.execute("UPDATE dblock.token_timeline SET timeline = 7")
        after = [client.lock(name).acquire().token for name in "bc"]
        assert after == [before + 2**40 + 1, before + 2**40 + 2]
        assert owner.execute("SELECT timeline FROM dblock.token_timeline").fetchone() == (1,)


@pytest.mark.parametrize(
    "stamp", ["minted_server_start = minted_server_start - interval '1 microsecond'", "minted_timeline = '00000002'"]
)
def test_a_lock_last_granted_by_another_server_or_timeline_asks_the_record(sessions: Sessions, stamp: str) -> None:
    """A lock's own row vouches for the timeline only where this very server minted on it.

    A pg_upgrade brings an old timeline's number back, under another start; a promotion keeps the rows of a server that
    may have been started at the same moment, under another timeline.
    """
    session = sessions.open()
    (before,) = session.do("SELECT token FROM try_acquire('a')")
    assert session.do("SELECT release('a', %s)", before) == (True,)
    session.do(f"UPDATE distributed_locks SET {stamp}")
    session.do("UPDATE token_timeline SET timeline = 7")
    (after,) = session.do("SELECT token FROM try_acquire('a')")
    assert after == before + 2**40 + 1
    assert session.do("SELECT timeline FROM token_timeline") == (1,)


def test_a_grant_without_a_token_vouches_for_no_timeline(sessions: Sessions) -> None:
    session = sessions.open()
    session.do("UPDATE token_timeline SET timeline = 7")
    (unordered,) = session.do("SELECT token FROM try_acquire('a', durable => false)")
    assert session.do("SELECT release('a', %s)", unordered) == (True,)
    (token,) = session.do("SELECT token FROM try_acquire('a')")
    assert token > 2**40


def test_a_recovery_past_an_earlier_jump_goes_above_that_jump(sessions: Sessions) -> None:
    """Record and sequence went back together to the first timeline; this server is on the third."""
    session = sessions.open()
    session.do("CREATE OR REPLACE FUNCTION current_timeline() RETURNS bigint LANGUAGE sql AS 'SELECT 3::bigint'")
    session.do("UPDATE token_timeline SET timeline = 2")  # any but the real one
    (token,) = session.do("SELECT token FROM try_acquire('a')")
    assert token > 2 << 40


def test_the_first_grant_on_a_timeline_does_not_undo_a_raise_under_way(sessions: Sessions) -> None:
    raising, granting = sessions.open(), sessions.open()
    raising.do("UPDATE token_timeline SET timeline = 7")
    raising.do("BEGIN")
    (least,) = raising.do("SELECT raise_tokens(9000000000000)")
    waiting = granting.start("SELECT token FROM try_acquire('a')")
    granting.wait_until_blocked()
    raising.do("COMMIT")
    assert waiting.result(20)[0] >= least


def test_concurrent_grants_on_a_new_timeline_jump_once(sessions: Sessions) -> None:
    one, other = sessions.open(), sessions.open()
    one.do("UPDATE token_timeline SET timeline = 7")
    one.do("BEGIN")
    (first,) = one.do("SELECT token FROM try_acquire('a')")
    waiting = other.start("SELECT token FROM try_acquire('b')")
    other.wait_until_blocked()
    one.do("COMMIT")
    assert waiting.result(20) == (first + 1,)


def test_a_jump_that_is_rolled_back_is_made_again(sessions: Sessions) -> None:
    one, other = sessions.open(), sessions.open()
    one.do("UPDATE token_timeline SET timeline = 7")
    one.do("BEGIN")
    (first,) = one.do("SELECT token FROM try_acquire('a')")
    waiting = other.start("SELECT token FROM try_acquire('b')")
    other.wait_until_blocked()
    one.do("ROLLBACK")
    (second,) = waiting.result(20)
    assert second > first
