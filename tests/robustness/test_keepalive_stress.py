"""The keep-alive on a busy machine loses no lease without need, and trusts no lease that is lost."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection

import psycopg
import pytest

import dblock
from dblock._core.effects import Flow
from tests.support.machine import UNSAFE, measured
from tests.support.proxy import Proxy
from tests.support.sessions import hold_first_grant

pytestmark = pytest.mark.second_stage

TTL = 2.0

TOO_LATE = TTL / 8
"""Seconds by which a busy machine may be late without being the cause of a loss."""


@contextmanager
def slow_database(dsn: str) -> Iterator[tuple[str, Callable[[float], None]]]:
    """Yield a DSN, and a function that delays the replies over it, whatever this process is busy with."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_run_proxy, args=(dsn, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv(), ours.send
    finally:
        ours.send(None)
        process.join()


def _run_proxy(dsn: str, commands: Connection) -> None:
    with Proxy(dsn) as proxy:
        commands.send(proxy.dsn)
        while (delay := commands.recv()) is not None:
            proxy.delay = delay


@pytest.mark.parametrize("seconds", [6, pytest.param(30, marks=pytest.mark.nightly)])
def test_leases_survive_a_busy_pool_and_a_slow_database(dsn: str, owner: psycopg.Connection, seconds: float) -> None:
    """Threads hog the interpreter, the pool is in use, and the database replies after 400 ms."""
    stop = threading.Event()

    def hog() -> None:
        while not stop.is_set():
            sum(range(50_000))

    with (
        measured() as lateness,
        slow_database(dsn) as (slow_dsn, set_delay),
        dblock.Client(slow_dsn, pool_size=1, patience=60) as client,
        ThreadPoolExecutor(6) as pool,
    ):
        leases = [client.lock(f"held {number}", ttl=TTL).acquire() for number in range(5)]
        set_delay(0.4)
        for _ in range(3):
            pool.submit(hog)
        blocked = psycopg.connect(dsn)
        hold_first_grant(blocked, "stuck")
        stuck = pool.submit(client.lock("stuck").acquire)
        try:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                for lease in leases:
                    left, checked_at = lease.remaining(), time.monotonic()
                    row = owner.execute("SELECT token, remaining FROM holder(%s)", [lease.name]).fetchone()
                    if left > time.monotonic() - checked_at:
                        assert row is not None, f"{UNSAFE}: {lease!r} is trusted, but the server has no such lease"
                        assert row[0] == lease.token, UNSAFE
                    assert not lease.lost.is_set() or lateness() > TOO_LATE, f"{lease!r} was lost without need"
                time.sleep(0.05)
        finally:
            stop.set()
            set_delay(0.0)
            blocked.rollback()
            blocked.close()
        stuck.result(30)
        assert all(lease.release() or lateness() > TOO_LATE for lease in leases)


def test_lease_survives_a_database_that_replies_ever_more_slowly(dsn: str) -> None:
    """At the end a reply takes longer than the time between two renewals, and there is no time for a retry."""
    with measured() as lateness, Proxy(dsn) as proxy, dblock.Client(proxy.dsn) as client:
        lease = client.lock("held", ttl=2 * TTL).acquire()
        for proxy.delay, seconds in ((1.0, 2), (1.7, 4)):
            time.sleep(seconds)
            lost = lease.lost.is_set() and lateness() < TOO_LATE
            assert not lost, f"the lease was lost without need at a delay of {proxy.delay} s"
        proxy.delay = 0.0
        assert lease.release() or lateness() > TOO_LATE


@pytest.mark.second_stage
@pytest.mark.alone
def test_ten_thousand_leases_cost_one_statement_a_round_and_little_time(dsn: str, kept_leases: list[object]) -> None:
    """With the usual ttl of 30 s, leases are renewed every 10 s. 5 % of a core is half a second of that time.

    Here they last longer, so that the keep-alive's own thread renews none of them, however long the machine takes.
    """
    ttl = 3600.0
    with dblock.Client(dsn, pool_size=4) as client, ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: client.lock(f"{number}", ttl=ttl).acquire(), range(10_000)))
        keepalive = client._runtime.keepalive
        states = keepalive.flow.schedule.held()
        assert len(states) == 10_000
        calls = 0

        def counted(steps: Flow[None]) -> Flow[None]:
            nonlocal calls
            step = next(steps)
            while True:
                calls += 1
                try:
                    step = steps.send((yield step))
                except StopIteration:
                    return

        spent = []
        for _ in range(3):
            for state in states:
                state.sent_at -= ttl / 3  # due
            before = time.thread_time()
            keepalive._runner.run(counted(keepalive.flow.schedule.renew_due()))
            spent.append(time.thread_time() - before)
        assert calls == 3
        assert all(state.remaining() > ttl * 0.95 for state in states)
        assert min(spent) < 0.5
        share = min(spent) / 10
        print(f"\n10,000 leases: {min(spent) * 1000:.0f} ms of the client's time a round, {share:.1%} of a core")
