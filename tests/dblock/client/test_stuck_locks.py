"""Clients beside a lock that another transaction keeps locked, and beside a cluster that cannot notify."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator

import psycopg
import pytest

import dblock
from dblock._core.waiters import LocalWaiters
from tests.support.machine import measured
from tests.support.servers import major, private_server

STUCK = ["released in an open transaction", "acquired in an open transaction"]


@contextlib.contextmanager
def waiters(client: dblock.Client, name: str, number: int, timeout: float) -> Iterator[list[str]]:
    """Let this many threads wait for a lock. The result is how each wait has ended."""
    ends: list[str] = []

    def wait() -> None:
        try:
            client.lock(name, ttl=10).acquire(timeout=timeout).release()
            ends.append("granted")
        except dblock.DblockError as error:
            ends.append(f"{type(error).__name__}: {error} {error.__cause__!r}")

    threads = [threading.Thread(target=wait) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield ends
    finally:
        for thread in threads:
            thread.join()


def seconds_for_ten(client: dblock.Client) -> float:
    """Return how long this client takes to acquire and release an unrelated lock ten times."""
    lock = client.lock("other", ttl=10, timeout=10)
    began = time.monotonic()
    for _ in range(10):
        with lock:
            pass
    return time.monotonic() - began


@contextlib.contextmanager
def stuck_lock(stuck: str, dsn: str, holder: dblock.Client) -> Iterator[None]:
    """Hold lock `x`, and keep its row or its queue locked in a transaction of a user. At the end the lock is free."""
    lease = holder.lock("x", ttl=60).acquire()
    with psycopg.connect(dsn) as user:
        if stuck == STUCK[0]:
            lease.release_in(user)
            yield
            user.commit()
        else:
            user.execute("SELECT dblock.acquire('x', attempt => gen_random_uuid(), client => gen_random_uuid())")
            yield
            user.rollback()
            assert lease.release()


@pytest.mark.second_stage
@pytest.mark.parametrize("stuck", STUCK)
def test_thirty_waiters_of_a_stuck_lock_leave_the_other_locks_their_rate(dsn: str, stuck: str) -> None:
    """The client takes turns with one that has no waiters, so that other load on the machine affects both alike."""
    with dblock.Client(dsn) as client, dblock.Client(dsn) as control, dblock.Client(dsn) as holder:
        with contextlib.ExitStack() as ending, stuck_lock(stuck, dsn, holder):
            ends = ending.enter_context(waiters(client, "x", 30, timeout=60))
            time.sleep(1)
            took = [(seconds_for_ten(client), seconds_for_ten(control)) for _ in range(80)]
        assert ends == ["granted"] * 30
    # Another program has the machine in some of the turns, and not for both clients alike.
    ratio = statistics.median(theirs / ours for ours, theirs in took)
    assert ratio > 0.8, ratio


def rate_of_statements(dsn: str, owner: psycopg.Connection, stuck: str) -> float:
    """Return how many transactions a second the database sees while twelve threads wait for a stuck lock."""
    with dblock.Client(dsn) as client, dblock.Client(dsn) as holder, stuck_lock(stuck, dsn, holder):
        with waiters(client, "x", 12, timeout=5.5) as ends:
            time.sleep(1.5)
            before, began = transactions(owner), time.monotonic()
            time.sleep(3)
            rate = (transactions(owner) - before) / (time.monotonic() - began)
        assert {end.partition(":")[0] for end in ends} == {"LockTimeout"}
        return rate


@pytest.mark.second_stage
@pytest.mark.parametrize("stuck", STUCK)
def test_waiters_of_a_stuck_lock_send_few_statements(dsn: str, owner: psycopg.Connection, stuck: str) -> None:
    assert rate_of_statements(dsn, owner, stuck) < 25, "twelve waiters that each ask five times a second send sixty"


@pytest.mark.second_stage
def test_statement_test_catches_waiters_that_all_ask(
    dsn: str, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalWaiters, "take_turn", lambda waiters, waiter: True)
    assert rate_of_statements(dsn, owner, STUCK[0]) > 25


def transactions(owner: psycopg.Connection) -> int:
    """Return how many transactions the database has seen."""
    # A session reports its transactions once a second, or when it ends. This one does not count itself.
    owner.execute("SELECT pg_stat_clear_snapshot()")
    row = owner.execute(
        "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
    ).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.alone
@pytest.mark.second_stage
def test_first_waiter_polls_seldom_while_a_proof_is_open(dsn: str, owner: psycopg.Connection) -> None:
    with dblock.Client(dsn) as holder, dblock.Client(dsn) as client, psycopg.connect(dsn) as user:
        lease = holder.lock("x", ttl=30).acquire()
        lease.assert_held(user)
        with waiters(client, "x", 1, timeout=20) as ends:
            time.sleep(0.5)
            lease.release()
            time.sleep(2)
            before, began = transactions(owner), time.monotonic()
            time.sleep(4)
            rate = (transactions(owner) - before) / (time.monotonic() - began)
            user.rollback()
        assert ends == ["granted"]
        assert rate < 15, f"{rate:.0f} transactions a second"


@pytest.fixture
def full_server() -> Iterator[str]:
    """A DSN of a server whose queue of notifications is full: a session of another database does not read it."""
    if major() < 17:
        pytest.skip("max_notify_queue_pages came with Postgres 17")
    with private_server({"max_notify_queue_pages": "64", "fsync": "off"}, in_memory=True, installed=True) as server:
        with psycopg.connect(server.url, autocommit=True) as admin:
            admin.execute("CREATE DATABASE elsewhere")
        elsewhere = psycopg.conninfo.make_conninfo(server.url, dbname="elsewhere")
        with (
            psycopg.connect(elsewhere, autocommit=True) as stuck,
            psycopg.connect(elsewhere, autocommit=True) as noisy,
        ):
            stuck.execute("LISTEN x")
            stuck.execute("BEGIN")
            stuck.execute("SELECT 1")
            with contextlib.suppress(psycopg.OperationalError):
                while True:
                    noisy.execute("SELECT pg_notify('x', repeat('x', 7900))")
            yield server.url


@pytest.mark.second_stage
def test_release_succeeds_while_the_cluster_cannot_notify(full_server: str) -> None:
    with dblock.Client(full_server) as holder, dblock.Client(full_server) as client:
        for _ in range(2):
            lease = holder.lock("x", ttl=20).acquire()
            with measured() as lateness:
                with waiters(client, "x", 1, timeout=15) as ends:
                    time.sleep(0.5)
                    assert lease.release()
                    released = time.monotonic()
                # The waiter finds out by itself.
                assert time.monotonic() - released < 1.5 + lateness()
            assert ends == ["granted"]
