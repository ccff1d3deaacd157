"""Dramatiq actors under a lock: four worker threads, and never two reports of one customer at the same time.

    python examples/dramatiq_locks.py                # on $DBLOCK_DSN, or on the embedded Postgres

The broker is the one that Dramatiq brings for tests, so that the example needs no other. Needs dramatiq.
"""

from __future__ import annotations

import itertools
import os
import time

import dramatiq
from dramatiq.brokers.stub import StubBroker

import dblock
from dblock import embedded
from dblock.admin import schema
from dblock.integrations.dramatiq import LockMiddleware

DSN = os.environ.get("DBLOCK_DSN") or embedded.start().url

broker = StubBroker()
broker.add_middleware(LockMiddleware(DSN))
dramatiq.set_broker(broker)

runs: list[tuple[float, float, int]] = []
refreshes: list[str] = []


@dramatiq.actor(lock="report:{customer}", lock_retry_in=0.2, max_retries=0)
def build_report(customer: str) -> None:
    began = time.monotonic()
    time.sleep(0.2)  # the work; pass the token to every resource that it writes to
    runs.append((began, time.monotonic(), dblock.current_lease().token))


@dramatiq.actor(lock="cache", lock_on_busy="skip")
def refresh_cache() -> None:
    time.sleep(0.5)
    refreshes.append("refreshed")


def main() -> None:
    schema.install(DSN)
    worker = dramatiq.Worker(broker, worker_timeout=100, worker_threads=4)
    worker.start()
    for _ in range(3):
        build_report.send("ada")
    for _ in range(2):
        refresh_cache.send()
    while len(runs) < 3:
        time.sleep(0.05)
    broker.join("default", timeout=30_000)
    worker.stop()
    runs.sort()
    apart = all(before[1] <= after[0] for before, after in itertools.pairwise(runs))
    print("three reports of one customer ran one after the other:", apart)
    print("each under a higher token:", [run[2] for run in runs] == sorted({run[2] for run in runs}))
    print("two refreshes at once:", refreshes)


if __name__ == "__main__":
    main()
