"""Run jobs as cron on several hosts does: try a lock or wait for it, hold it for a while, and pause.

Unlike in the other workloads, the locks are free for most of the time.
"""

from __future__ import annotations

from tests.robustness.checkers import free_locks, kept_leases, linearizability, loss, token_order
from tests.robustness.traffic import workloads
from tests.robustness.traffic.worker import Worker

JOBS = 2
TTL = 2.0


class Workload(workloads.Base):
    """A free lock is granted, and a lease lasts as long as its holder wants."""

    checkers = (linearizability.check, token_order.check, loss.check, free_locks.check, kept_leases.check)

    def step(self, worker: Worker) -> None:
        rng = worker.rng
        name = f"job {rng.randrange(JOBS)}"
        if rng.random() < 0.6:
            lease = worker.try_acquire(name, ttl=TTL, keep_alive=True)
        else:
            lease = worker.acquire(name, ttl=TTL, timeout=1.0, keep_alive=True)
        if lease is not None:
            worker.hold(lease, TTL * 1.2 if rng.random() < 0.1 else rng.uniform(0, 0.3))
            worker.release(lease)
        worker.pause(rng.uniform(0, 1.5))
