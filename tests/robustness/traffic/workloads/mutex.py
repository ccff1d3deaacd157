"""Contend for a few locks: wait, try, hold briefly or past a renewal, renew explicitly, drop.

With the options `locks` and `hold`, use many locks that are mostly free: {"locks": 1000, "hold": 0} performs as many
operations per second as possible.
"""

from __future__ import annotations

from tests.robustness.checkers import (
    durability,
    hand_over,
    linearizability,
    loss,
    releases,
    takeover,
    token_order,
    wake_ups,
)
from tests.robustness.traffic import workloads
from tests.robustness.traffic.worker import Worker

LOCKS = 3


class Workload(workloads.Base):
    """Every lock has one holder at a time, in the order of tokens."""

    checkers = (
        linearizability.check,
        token_order.check,
        loss.check,
        takeover.check,
        hand_over.check,
        releases.check,
        wake_ups.check,
        durability.check,
    )

    def step(self, worker: Worker) -> None:
        rng = worker.rng
        options = worker.options
        name = f"mutex {rng.randrange(int(options.get('locks', LOCKS)))}"
        if options.get("hold", 1) == 0:
            self._at_once(worker, name)
            return
        ttl = rng.choice([0.5, 1.0, 2.0]) * float(options.get("ttl", 1.0))
        draw = rng.random()
        tried = float(options.get("tried", 0.15))
        if draw < tried:
            lease = worker.try_acquire(name, ttl=ttl, fair=draw < tried * 2 / 3)
        else:
            kept_alive = draw < float(options.get("kept_alive", 0.8))
            lease = worker.acquire(name, ttl=ttl, timeout=rng.choice([0.05, 1.0, 5.0]), keep_alive=kept_alive)
        if lease is None:
            worker.pause(rng.uniform(0, 0.01))
            return
        action = rng.random()
        # Mostly brief, and sometimes for longer than a lease lasts without renewal.
        brief = rng.uniform(0, float(options.get("brief", 0.01)))
        kept = worker.hold(lease, ttl * 1.2 if action < float(options.get("long", 0.03)) else brief)
        if kept and action > 0.9:
            worker.renew(lease)
        if kept and action > 0.98:
            worker.drop(lease)
            return
        worker.release(lease)

    def _at_once(self, worker: Worker, name: str) -> None:
        lease = worker.acquire(name, ttl=2, timeout=1)
        if lease is not None:
            worker.believes(lease)
            worker.release(lease)
