"""Truth 11, under load: the reaper deletes no lock in use and never lowers a token."""

from __future__ import annotations

import threading
import time
from collections import defaultdict

import pytest

import dblock
from dblock._runtime.target import resolve
from dblock.admin.reaper import Reaper

pytestmark = pytest.mark.beside_others

CLIENTS, NAMES, SECONDS = 16, 6, 5.0


@pytest.mark.second_stage
def test_reaper_at_full_speed_deletes_no_lock_in_use(dsn: str) -> None:
    tokens: dict[str, list[int]] = defaultdict(list)
    troubles: list[str] = []
    reaped = 0
    until = time.monotonic() + SECONDS

    def work(number: int) -> None:
        with dblock.Client(dsn, pool_size=1) as client:
            turn = number
            while time.monotonic() < until:
                turn += 1
                lock = client.lock(f"{turn % NAMES}", ttl=10)
                lease = lock.try_acquire()
                if lease is None:
                    continue
                tokens[lock.name].append(lease.token)  # in the order of the grants, because this thread holds the lock
                try:
                    lease.renew()
                except dblock.LeaseLost as error:
                    troubles.append(f"renew: {error}")
                if not lease.release():
                    troubles.append(f"release: {lease!r}")

    def reap() -> None:
        nonlocal reaped
        reaper = Reaper(resolve(dsn), idle=0)
        while time.monotonic() < until:
            reaped += reaper.once()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(CLIENTS)]
    threads += [threading.Thread(target=reap) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert troubles == []
    assert reaped > 20
    assert sum(map(len, tokens.values())) > 500
    assert all(granted == sorted(set(granted)) for granted in tokens.values())
