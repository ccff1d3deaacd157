"""A role that may only connect: it reads advisory keys from pg_locks, and takes them. Locks and queues stay usable."""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest

import dblock
from tests.security.conftest import Connect
from tests.support.eventually import eventually
from tests.support.machine import measured
from tests.support.warm_start import Program

KEYS = (
    "SELECT DISTINCT (classid::bigint << 32) | objid::bigint FROM pg_locks"
    " WHERE locktype = 'advisory' AND objsubid = 1 AND pid <> pg_backend_pid()"
)


def keys_of(name: str) -> str:
    """Return the keys that once guarded a lock's queue and the creation of its row, as SQL."""
    return f"unnest(ARRAY[0, 1]) AS seed, hashtextextended('dblock' || '{name}', seed) AS key"


class Outsider:
    """Takes every advisory key that it sees, or waits for it in a session of its own, while it attacks.

    With `harmless` set, it does the same work, but with keys that nothing uses.
    """

    def __init__(self, connect: Connect) -> None:
        self.attacks = threading.Event()
        self.harmless = False
        self._connect = connect
        self._closed = False
        self._waiting: dict[int, psycopg.Connection] = {}
        self._looker = connect("none")
        self._taker = connect("none")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed:
            if not self.attacks.is_set():
                self._taker.execute("SELECT pg_advisory_unlock_all()")
                self.attacks.wait(0.1)
                continue
            for (seen,) in self._looker.execute(KEYS.encode()).fetchall():
                key = seen ^ 1 if self.harmless else seen
                row = self._taker.execute("SELECT pg_try_advisory_lock(%s::bigint)", [key]).fetchone()
                if row == (False,) and key not in self._waiting and len(self._waiting) < 10:
                    self._wait_for(key)
            time.sleep(0.01)

    def _wait_for(self, key: int) -> None:
        session = self._waiting[key] = self._connect("none")
        session.pgconn.send_query(f"SELECT pg_advisory_lock({key})".encode())

    def close(self) -> None:
        self._closed = True
        self.attacks.set()
        self._thread.join()
        for session in self._waiting.values():
            session.close()


@contextmanager
def outsider(connect: Connect) -> Iterator[Outsider]:
    found = Outsider(connect)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.second_stage
def test_role_without_privileges_cannot_stop_a_release_or_a_queue(
    connect: Connect, dsn: str, owner: psycopg.Connection
) -> None:
    """It knows the lock's name, and takes all that could be keys of that name."""
    stranger = connect("none")
    with dblock.Client(dsn) as one, dblock.Client(dsn) as other:
        lease = one.lock("a", ttl=60).acquire()
        granted: list[dblock.Lease] = []
        waiting = threading.Thread(target=lambda: granted.append(other.lock("a", ttl=60).acquire(timeout=30)))
        waiting.start()
        eventually(lambda: owner.execute("SELECT count(*) FROM lock_tickets").fetchone() == (1,), "a waiter")
        for name in ("a", "new"):
            stranger.execute(f"SELECT pg_advisory_lock(key) FROM {keys_of(name)}".encode())
        began = time.monotonic()
        assert lease.release()
        waiting.join()
        assert granted, "the first waiter gets the lock"
        assert one.lock("a").try_acquire() is None
        assert granted[0].release()
        assert one.lock("a").try_acquire(), "granted again"
        assert one.lock("new").try_acquire(), "a name that has no row yet"
        assert other.lock("a", ttl=1).try_acquire() is None
        assert time.monotonic() - began < 20


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.second_stage
@pytest.mark.timeout(180)
def test_outsider_that_takes_advisory_keys_hardly_slows_contended_locks(connect: Connect, dsn: str) -> None:
    """An outsider that takes other keys as often takes as much of the processors' time. It is the measure."""
    counts = [0]
    failed: list[Exception] = []
    stop = threading.Event()

    def work(number: int) -> None:
        with dblock.Client(dsn) as client:
            turn = number
            while not stop.is_set():
                turn += 1
                try:
                    lease = client.lock(f"secret-{turn % 4}", ttl=10).acquire(timeout=5)
                    time.sleep(0.002)
                    lease.release()
                    counts[0] += 1
                except dblock.DblockError as error:
                    failed.append(error)

    def rate(attacker: Outsider, harmless: bool) -> float:
        attacker.harmless = harmless
        attacker.attacks.set()
        time.sleep(0.1)
        before, began = counts[0], time.monotonic()
        time.sleep(0.4)
        found = (counts[0] - before) / (time.monotonic() - began)
        attacker.attacks.clear()
        time.sleep(0.15)
        return found

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    try:
        with outsider(connect) as attacker:
            rate(attacker, harmless=True)
            ratios = []
            for _ in range(30):
                before, during, after = (rate(attacker, harmless) for harmless in (True, False, True))
                ratios.append(during / ((before + after) / 2))
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    assert not failed
    assert statistics.median(ratios) > 0.9, ratios


HOLDER = """
import sys, time, dblock
client = dblock.Client(sys.argv[1])
lease = client.lock("a", ttl=12).acquire()
while lease._state.presence is None or lease._state.unreachable:
    time.sleep(0.01)
print("holds", flush=True)
time.sleep(60)
"""


@pytest.mark.second_stage
def test_outsider_that_waits_for_a_presence_key_does_not_delay_a_takeover(connect: Connect, dsn: str) -> None:
    def takeover(before_the_kill: Callable[[], object]) -> float:
        process = Program([sys.executable, "-c", HOLDER, dsn], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == b"holds"
        with dblock.Client(dsn) as client:
            came: list[float] = []

            def wait() -> None:
                client.lock("a", ttl=5).acquire(timeout=20).release()
                came.append(time.monotonic())

            waiting = threading.Thread(target=wait)
            waiting.start()
            time.sleep(0.5)
            before_the_kill()
            time.sleep(0.5)
            with measured() as lateness:
                killed = time.monotonic()
                process.kill()
                process.communicate()
                waiting.join()
                return came[0] - killed - lateness()

    with outsider(connect) as attacker:
        assert takeover(lambda: None) < 1
        assert takeover(attacker.attacks.set) < 1, "it would last until the ttl of 12 s"
