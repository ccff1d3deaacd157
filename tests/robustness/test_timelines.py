"""After a failover that loses tokens, no token repeats and none falls.

The standby is asynchronous and cut off before the last tokens are granted. So after its promotion its sequence has the
value from that time, and would issue tokens again that a resource has already seen.
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
        # Short, because the failover may lose the last release, and then the lock stays held until its deadline.
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


def test_standby_grants_nothing_and_says_what_to_do(own_server: Server) -> None:
    with standby_of(own_server) as standby:
        wait_until_caught_up(own_server, standby)
        with dblock.Client(standby.url) as client:
            for lock in (client.lock("a"), client.lock("never seen")):
                with pytest.raises(dblock.NotWritable, match="standby"):
                    lock.try_acquire()
        assert schema.status(resolve(standby.url)).standby


@pytest.mark.second_stage
def test_second_promotion_raises_the_tokens_again(own_server: Server) -> None:
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
    """The sequence has forgotten the tokens granted after that point, but the resources that saw them have not."""
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
            assert back[0] < tokens[-1], "the sequence did not go back, so the test proves nothing"
            tokens += grant(copy, 5)
        finally:
            shutil.rmtree(archive)
    assert tokens == sorted(set(tokens))


def test_timeline_that_goes_back_raises_the_tokens_too(dsn: str) -> None:
    """pg_upgrade creates a cluster that begins at timeline 1 again."""
    with psycopg.connect(dsn, autocommit=True) as owner, dblock.Client(dsn) as client:
        before = client.lock("a").acquire().token
        owner.execute("UPDATE dblock.token_timeline SET timeline = 7")
        after = [client.lock(name).acquire().token for name in "bc"]
        assert after == [before + 2**40 + 1, before + 2**40 + 2]
        assert owner.execute("SELECT timeline FROM dblock.token_timeline").fetchone() == (1,)


@pytest.mark.parametrize(
    "stamp", ["minted_server_start = minted_server_start - interval '1 microsecond'", "minted_timeline = '00000002'"]
)
def test_lock_last_granted_by_another_server_or_timeline_checks_the_record(sessions: Sessions, stamp: str) -> None:
    """A lock's own row confirms the timeline only if this very server minted its token on that timeline.

    A pg_upgrade brings back an old timeline number under another server start. A promotion keeps the rows of a server
    that may have been started at the same moment, under another timeline.
    """
    session = sessions.open()
    (before,) = session.do("SELECT token FROM try_acquire('a')")
    assert session.do("SELECT release('a', %s)", before) == (True,)
    session.do(f"UPDATE distributed_locks SET {stamp}")
    session.do("UPDATE token_timeline SET timeline = 7")
    (after,) = session.do("SELECT token FROM try_acquire('a')")
    assert after == before + 2**40 + 1
    assert session.do("SELECT timeline FROM token_timeline") == (1,)


def test_grant_without_a_token_confirms_no_timeline(sessions: Sessions) -> None:
    session = sessions.open()
    session.do("UPDATE token_timeline SET timeline = 7")
    (unordered,) = session.do("SELECT token FROM try_acquire('a', durable => false)")
    assert session.do("SELECT release('a', %s)", unordered) == (True,)
    (token,) = session.do("SELECT token FROM try_acquire('a')")
    assert token > 2**40


def test_recovery_past_an_earlier_jump_goes_above_that_jump(sessions: Sessions) -> None:
    """Record and sequence went back together to the first timeline, and this server is on the third."""
    session = sessions.open()
    session.do("CREATE OR REPLACE FUNCTION current_timeline() RETURNS bigint LANGUAGE sql AS 'SELECT 3::bigint'")
    session.do("UPDATE token_timeline SET timeline = 2")  # any number but the real one
    (token,) = session.do("SELECT token FROM try_acquire('a')")
    assert token > 2 << 40


def test_first_grant_on_a_timeline_keeps_a_concurrent_raise(sessions: Sessions) -> None:
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


def test_rolled_back_jump_is_made_again(sessions: Sessions) -> None:
    one, other = sessions.open(), sessions.open()
    one.do("UPDATE token_timeline SET timeline = 7")
    one.do("BEGIN")
    (first,) = one.do("SELECT token FROM try_acquire('a')")
    waiting = other.start("SELECT token FROM try_acquire('b')")
    other.wait_until_blocked()
    one.do("ROLLBACK")
    (second,) = waiting.result(20)
    assert second > first
