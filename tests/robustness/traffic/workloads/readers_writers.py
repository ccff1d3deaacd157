"""Read and write under a few read-write locks: wait, try, hold, renew, drop, and turn write leases into read leases."""

from __future__ import annotations

from typing import Any

from tests.robustness.checkers import durability, shared_holds, token_order, writers_in_turn
from tests.robustness.traffic import workloads
from tests.robustness.traffic.worker import Worker

LOCKS = 2


class Workload(workloads.Base):
    """A writer holds the lock alone, waits for no later reader, and lets no other writer in when it downgrades."""

    checkers = (shared_holds.check, writers_in_turn.check, token_order.check, durability.check)
    threads = 3

    def step(self, worker: Worker) -> None:
        rng = worker.rng
        name = f"readers and writers {rng.randrange(int(worker.options.get('locks', LOCKS)))}"
        ttl = rng.choice([1.0, 2.0])
        mode = "read" if rng.random() < float(worker.options.get("reads", 0.6)) else "write"
        kept_alive = rng.random() < 0.8
        lock = getattr(worker.client, f"{mode}_lock")(name, ttl=ttl, keep_alive=kept_alive)
        timeout = 0 if rng.random() < 0.15 else rng.choice([0.05, 2.0, 10.0])
        lease = worker.acquire_share(lock, timeout=timeout, ttl=ttl, mode=mode, keep_alive=kept_alive)
        if lease is None:
            worker.pause(rng.uniform(0, 0.01))
            return
        action = rng.random()
        kept = worker.hold(lease, ttl * 1.2 if action < 0.03 else rng.uniform(0, 0.02))
        if kept and action > 0.9:
            worker.renew(lease)
        if kept and mode == "write" and action < 0.4:
            lease = self._downgrade(worker, lease, ttl)
            if lease is None:
                return
            kept = worker.hold(lease, rng.uniform(0, 0.02))
        if kept and action > 0.98:
            worker.drop(lease)
            return
        worker.release(lease)

    def _downgrade(self, worker: Worker, lease: Any, ttl: float) -> Any:
        """Turn a write lease into a read lease, which is recorded as a grant. Return None if that fails."""
        reading = worker.recorder.do(
            "acquire",
            lease.name,
            worker.interruptions.interruptible(lease.downgrade),
            refused=worker.REFUSED,
            unknown=worker.UNKNOWN,
            describe=lambda reading: {"token": reading.token},
            writer=lease.token,
            mode="read",
            ttl=ttl,
            worker=worker.name,
        )
        if reading is None:
            if worker.believes(lease):  # held as before, if the downgrade had no effect
                worker.hold(lease, 0.2)
            worker.release(lease)
        return worker.interruptions.remember(reading)
