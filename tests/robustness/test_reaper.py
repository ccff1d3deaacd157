"""Truth 11, under load: the reaper deletes no lock in use and never lowers a token."""

from __future__ import annotations

import threading
import time
from collections import defaultdict

import pytest

import dblock
from dblock._runtime.target import resolve
from dblock.admin.reaper import Reaper

CLIENTS, NAMES, SECONDS = 16, 6, 5.0


@pytest.mark.second_stage
def test_reaper_at_full_speed_deletes_no_lock_in_use(dsn: str) -> None:
    tokens: dict[str, list[int]] = defaultdict(list)
    troubles: list[str] = []
    reaped = 0
    began = time.monotonic()

    def goes_on() -> bool:
        """Return whether the time is not over, or a slow machine has not yet shown enough."""
        passed = time.monotonic() - began
        shown = reaped > 20 and sum(map(len, [*tokens.values()])) > 500
        return passed < SECONDS or (passed < 12 * SECONDS and not shown)

    def work(number: int) -> None:
        with dblock.Client(dsn, pool_size=1) as client:
            turn = number
            while goes_on():
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
        while goes_on():
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
