"""Contend for the permits of two semaphores: wait, try, hold, renew, drop."""

from __future__ import annotations

import time
from typing import Any

import psycopg

from tests.robustness.checkers import durability, permits_back, shared_holds, token_order
from tests.robustness.history.record import Recorder
from tests.robustness.traffic import workloads
from tests.robustness.traffic.worker import Worker

PERMITS = {"permits of one": 1, "permits of three": 3}
TTL = 2.0

BACK_WITHIN = 3 * TTL
"""Seconds after the end of the traffic within which the lease of every dead holder has expired."""


class Workload(workloads.Base):
    """A semaphore has no more holders than permits, and each of them has a permit of its own."""

    checkers = (shared_holds.check, permits_back.check, token_order.check, durability.check)
    threads = 3

    def step(self, worker: Worker) -> None:
        rng = worker.rng
        name = rng.choice(list(PERMITS))
        kept_alive = rng.random() < 0.8
        semaphore = worker.client.semaphore(name, permits=PERMITS[name], ttl=TTL, keep_alive=kept_alive)
        timeout = 0 if rng.random() < 0.3 else rng.choice([0.05, 1.0, 5.0])
        lease = worker.acquire_share(
            semaphore, timeout=timeout, ttl=TTL, mode="permit", permits=PERMITS[name], keep_alive=kept_alive
        )
        if lease is None:
            worker.pause(rng.uniform(0, 0.01))
            return
        action = rng.random()
        kept = worker.hold(lease, TTL * 1.2 if action < 0.03 else rng.uniform(0, 0.03))
        if kept and action > 0.9:
            worker.renew(lease)
        if kept and action > 0.98:
            worker.drop(lease)
            return
        worker.release(lease)

    def record_final_state(self, dsn: str, recorder: Recorder, options: dict[str, Any]) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            for name in PERMITS:
                ends = time.monotonic() + BACK_WITHIN
                while True:
                    row = connection.execute(
                        "SELECT permits, available FROM dblock.shared_state(%s) WHERE kind IS NOT NULL", [name]
                    ).fetchone()
                    if row is None or row[0] == row[1] or time.monotonic() > ends:
                        break
                    time.sleep(0.05)
                if row is not None:
                    recorder.record("available", name, permits=row[0], available=row[1])
