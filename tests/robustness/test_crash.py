"""Truth 5: acknowledged grants are durable. The whole Postgres is killed repeatedly under load."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress

import psycopg
import pytest

import dblock
from dblock.embedded import Server
from tests.robustness.faults.server import kill_all_processes
from tests.support import mutants
from tests.support.eventually import eventually
from tests.support.machine import UNSAFE
from tests.support.stages import first

pytestmark = [pytest.mark.timeout(300)]

SETTINGS = {"wal_writer_delay": "10s", "wal_writer_flush_after": "1GB", "commit_delay": "0"}
"""A commit that was not waited for stays in the server's memory for long, and is lost with it."""


ENOUGH = 50
"""Grants that are acknowledged before each crash."""


class Load:
    """Acquire locks in threads, each with its own names, until stopped."""

    def __init__(self, client: dblock.Client) -> None:
        self.client = client
        self.acknowledged: list[dblock.Lease] = []
        self.refused = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(4)]
        for thread in self._threads:
            thread.start()

    def _work(self, number: int) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            try:
                lease = self.client.lock(f"{number}:{count // 2}", ttl=3600, timeout=0, keep_alive=False).acquire()
            except dblock.LockTimeout:
                continue
            except dblock.Unavailable:
                self.refused += 1
                time.sleep(0.05)
                continue
            self.acknowledged.append(lease)
            if count % 3:
                with suppress(dblock.Unavailable):
                    lease.release()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def _wait_for(load: Load, acknowledged: int) -> None:
    eventually(lambda: len(load.acknowledged) >= acknowledged, "clients recover by themselves")


def lost_in_crashes(server: Server, kills: int) -> tuple[int, int]:
    """Kill the server under load; return the number of acknowledged grants, and how many of them were lost."""
    gone = 0
    with dblock.Client(server.url, patience=2) as client:
        load = Load(client)
        try:
            for _ in range(kills):
                recovered = len(load.acknowledged)
                _wait_for(load, recovered + ENOUGH)
                time.sleep(random.uniform(0.2, 0.5))
                kill_all_processes(server)
                server.stop()
                server.start()
                _wait_for(load, len(load.acknowledged) + 1)
        finally:
            load.stop()
        with psycopg.connect(server.url) as owner:
            newest: dict[str, int] = dict(owner.execute("SELECT name, token FROM dblock.distributed_locks").fetchall())
        tokens = [lease.token for lease in load.acknowledged]
        gone += sum(newest.get(lease.name, 0) < lease.token for lease in load.acknowledged)
        gone += len(tokens) - len(set(tokens))
    return len(tokens), gone


@pytest.mark.parametrize("own_server", [SETTINGS], indirect=True, ids=["lazy"])
@pytest.mark.parametrize("kills", [1, *first(0, [4]), pytest.param(20, marks=pytest.mark.nightly)])
@pytest.mark.second_stage
def test_every_acknowledged_grant_outlives_a_crash_and_no_token_repeats(own_server: Server, kills: int) -> None:
    acknowledged, gone = lost_in_crashes(own_server, kills)
    assert acknowledged > ENOUGH * kills
    assert gone == 0, UNSAFE


@pytest.mark.second_stage
@pytest.mark.parametrize("own_server", [SETTINGS], indirect=True, ids=["lazy"])
def test_crash_run_catches_grants_that_do_not_wait_for_the_disk(own_server: Server) -> None:
    with psycopg.connect(own_server.url, autocommit=True) as owner:
        mutants.replace(
            owner, mutants.altered("10_try_acquire.sql", "'synchronous_commit', 'on'", "'synchronous_commit', 'off'")
        )
        owner.execute("ALTER DATABASE postgres SET synchronous_commit = off")
    _, gone = lost_in_crashes(own_server, 3)
    assert gone > 0
