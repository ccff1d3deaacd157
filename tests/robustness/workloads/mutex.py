"""A few locks that everybody wants: waited for, tried, held briefly or past a renewal, renewed by hand, dropped.

Or, with the options `locks` and `hold`, many locks that are mostly free: {"locks": 1000, "hold": 0} is about how many
operations there are in a second.
"""

from __future__ import annotations

from tests.robustness import workloads
from tests.robustness.checkers import durability, linearizability, loss, takeover, token_order, wake_ups
from tests.robustness.traffic import Worker

LOCKS = 3


class Workload(workloads.Base):
    """Every lock is held by one at a time, in the order of tokens."""

    checkers = (
        linearizability.check,
        token_order.check,
        loss.check,
        takeover.check,
        wake_ups.check,
        durability.check,
    )

    def step(self, worker: Worker) -> None:
        dice = worker.dice
        name = f"mutex {dice.randrange(int(worker.options.get('locks', LOCKS)))}"
        if worker.options.get("hold", 1) == 0:
            self._at_once(worker, name)
            return
        ttl = dice.choice([0.5, 1.0, 2.0]) * float(worker.options.get("ttl", 1.0))
        mood = dice.random()
        if mood < 0.15:
            lease = worker.try_acquire(name, ttl=ttl, fair=mood < 0.1)
        else:
            lease = worker.acquire(name, ttl=ttl, timeout=dice.choice([0.05, 1.0, 5.0]), keep_alive=mood < 0.8)
        if lease is None:
            worker.pause(dice.uniform(0, 0.01))
            return
        deed = dice.random()
        # Mostly brief; sometimes for longer than a lease lasts without renewal.
        kept = worker.hold(lease, ttl * 1.2 if deed < 0.03 else dice.uniform(0, 0.01))
        if kept and deed > 0.9:
            worker.renew(lease)
        if kept and deed > 0.98:
            worker.drop(lease)
            return
        worker.release(lease)

    def _at_once(self, worker: Worker, name: str) -> None:
        lease = worker.acquire(name, ttl=2, timeout=1)
        if lease is not None:
            worker.believes(lease)
            worker.release(lease)
