"""After a failover that loses tokens, no token repeats and none falls.

The standby is asynchronous and cut off before the last tokens are granted. So after its promotion its sequence has the
value from that time, and would issue tokens again that a resource has already seen.

The servers share the clock of this machine. Each run is repeated with tokens that ignore the clock and take a leap of
2^40 at each start of a server instead. It must then find tokens that repeat or fall.
"""

from __future__ import annotations

import shutil
import time

import psycopg
import pytest

import dblock
from dblock._runtime.target import resolve
from dblock.admin import schema
from dblock.embedded import Server
from tests.robustness.faults.server import kill_all_processes
from tests.support import mutants
from tests.support.frozen import frozen
from tests.support.machine import UNSAFE
from tests.support.servers import new_folder
from tests.support.standby import copy_of, kill, promote, recover_to, standby_of, wait_until_caught_up

pytestmark = [pytest.mark.timeout(120)]


def grant(server: Server, times: int) -> list[int]:
    tokens = []
    with dblock.Client(server.url) as client:
        # Short, because the failover may lose the last release, and then the lock stays held until its deadline.
        lock = client.lock("a", ttl=1)
        for _ in range(times):
            lease = lock.acquire()
            tokens.append(lease.token)
            lease.release()
    return tokens


def ignore_the_clock(server: Server, leap: int = 2**40) -> None:
    """Let the tokens take a leap at each start of a server, instead of following its clock."""
    with psycopg.connect(server.url, autocommit=True) as owner:
        for body in mutants.tokens_that_ignore_the_clock(leap):
            mutants.replace(owner, body)


def timeline(server: Server) -> str:
    """Return the newest timeline that the server's WAL files name, also of a server that is down."""
    return max(path.name[:8] for path in (server.data / "pg_wal").iterdir() if len(path.name) == 24)


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


@pytest.mark.second_stage
def test_no_token_repeats_or_falls_after_a_failover_that_lost_some(own_server: Server) -> None:
    tokens = tokens_across_a_failover(own_server)
    assert len(tokens) == 140
    assert tokens == sorted(set(tokens)), UNSAFE


@pytest.mark.second_stage
def test_failover_run_catches_tokens_without_a_leap(own_server: Server) -> None:
    ignore_the_clock(own_server, leap=0)
    tokens = tokens_across_a_failover(own_server)
    assert tokens[120] < tokens[119]


def tokens_across_sibling_promotions(own_server: Server) -> list[int]:
    """Grant on a primary, then on its first standby, then on its second, which never saw the first one's grants."""
    with standby_of(own_server) as one, standby_of(own_server) as other:
        tokens = grant(own_server, 20)
        for standby in (one, other):
            wait_until_caught_up(own_server, standby)
        kill(own_server)
        promote(one)
        tokens += grant(one, 40)
        kill(one)
        promote(other)
        assert timeline(one) == timeline(other), "the standbys took different timelines, so the test proves nothing"
        return tokens + grant(other, 20)


def tokens_across_a_flip_back(own_server: Server) -> list[int]:
    """Freeze a primary, grant on its promoted standby, and grant on the first primary again."""
    with standby_of(own_server) as standby:
        tokens = grant(own_server, 20)
        wait_until_caught_up(own_server, standby)
        with frozen(own_server.data):
            promote(standby)
            tokens += grant(standby, 40)
            kill(standby)
            # A cluster manager needs longer to make a node the leader again.
            time.sleep(1.2)
        return tokens + grant(own_server, 20)


@pytest.mark.second_stage
def test_no_token_repeats_or_falls_after_sibling_promotions(own_server: Server) -> None:
    tokens = tokens_across_sibling_promotions(own_server)
    assert len(tokens) == 80
    assert tokens == sorted(set(tokens)), UNSAFE


@pytest.mark.second_stage
def test_no_token_repeats_or_falls_after_a_frozen_primary_comes_back(own_server: Server) -> None:
    tokens = tokens_across_a_flip_back(own_server)
    assert len(tokens) == 80
    assert tokens == sorted(set(tokens)), UNSAFE


@pytest.mark.second_stage
def test_run_of_sibling_promotions_catches_tokens_that_ignore_the_clock(own_server: Server) -> None:
    ignore_the_clock(own_server)
    tokens = tokens_across_sibling_promotions(own_server)
    assert len(set(tokens)) < len(tokens)


@pytest.mark.second_stage
def test_run_of_a_flip_back_catches_tokens_that_ignore_the_clock(own_server: Server) -> None:
    ignore_the_clock(own_server)
    tokens = tokens_across_a_flip_back(own_server)
    assert tokens[60] < tokens[59]


@pytest.mark.second_stage
def test_token_that_was_granted_outlives_a_crash_of_the_server(own_server: Server) -> None:
    """The sequence is set outside of the transaction, so the commit of the grant must make it durable."""
    for _ in range(3):
        with psycopg.connect(own_server.url, autocommit=True) as owner:
            owner.execute("SELECT setval('dblock.token_sequence', 1)")
            (token,) = owner.execute("SELECT token FROM dblock.try_acquire(gen_random_uuid()::text)").fetchone() or ()
            kill_all_processes(own_server)
        own_server.stop()
        own_server.start()
        with psycopg.connect(own_server.url) as owner:
            (highest,) = owner.execute("SELECT last_value FROM dblock.token_sequence").fetchone() or ()
        assert highest >= token


@pytest.mark.second_stage
def test_standby_grants_nothing_and_says_what_to_do(own_server: Server) -> None:
    with standby_of(own_server) as standby:
        wait_until_caught_up(own_server, standby)
        with dblock.Client(standby.url) as client:
            for lock in (client.lock("a"), client.lock("never seen")):
                with pytest.raises(dblock.NotWritable, match="standby"):
                    lock.try_acquire()
        assert schema.status(resolve(standby.url)).standby


@pytest.mark.second_stage
def test_tokens_rise_at_a_second_promotion_too(own_server: Server) -> None:
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
    assert tokens == sorted(set(tokens)), UNSAFE
    assert 0 < time.time() - tokens[-1] / 1e6 < 10


@pytest.mark.second_stage
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
    assert tokens == sorted(set(tokens)), UNSAFE
