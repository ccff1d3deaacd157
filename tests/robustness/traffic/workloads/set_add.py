"""Add elements to sets in a resource of every kind: under the lock, read the set, add an element, write it back fenced.

Before it reads, a holder claims the resource, with the lock or by itself, so that it reads all that any earlier holder
will ever have written. It never checks its lease: after a freeze it writes what it had read long before, and the
resource must refuse that write.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.robustness.checkers import durability, fence, linearizability, loss, sets, token_order
from tests.robustness.history.record import Recorder
from tests.robustness.traffic import workloads
from tests.robustness.traffic.resources import CLASSES, KINDS, REFUSED, UNKNOWN, Resource
from tests.robustness.traffic.worker import Worker

VARIANTS = KINDS
SETS = 2
MOST = 400
"""Number of elements after which the next set is begun."""
TABLES = 40
"""Number of tables for each set, which must be created beforehand."""


class Workload(workloads.Base):
    """At the end, every acknowledged element is there, once."""

    checkers = (sets.check, fence.check, linearizability.check, token_order.check, loss.check, durability.check)

    def prepare(self, dsn: str) -> None:
        CLASSES[self.variant].prepare(dsn, [f"s{one}_{age}" for one in range(SETS) for age in range(TABLES)])

    @contextmanager
    def set_up(self, dsn: str, folder: Path) -> Iterator[dict[str, Any]]:
        with CLASSES[self.variant].set_up(dsn, folder) as where:
            yield {"where": where}

    def step(self, worker: Worker) -> None:
        resource = self._resource(worker)
        rng, ages = worker.rng, worker.state.setdefault("ages", {})
        which = rng.randrange(SETS)
        name = f"s{which}_{ages.get(which, 0)}"
        ttl = rng.choice([0.3, 0.5, 1.0])
        with_lock = rng.random() < 0.5 and (worker.config.kind == "sync" or resource.claims_from_tasks)
        draw = rng.random()
        # Some workers let their lease expire before they write, and some wait between reading and writing, so that the
        # late writes meet the slow ones.
        late, lingers = draw < float(worker.options.get("late", 0.06)), draw > 0.85
        kept_alive = not late and rng.random() < float(worker.options.get("kept_alive", 1.0))
        claims = resource.claims(name) if with_lock else ()
        lease = worker.acquire(name, ttl=0.3 if late else ttl, timeout=3, keep_alive=kept_alive, claims=claims)
        if lease is None:
            return
        key = resource.name(name)
        worker.believes(lease)
        if with_lock or self._claim(worker, resource, key, name, lease):
            pause = rng.uniform(0.25, 0.5) if late else rng.uniform(0.05, 0.2) if lingers else rng.uniform(0, 0.01)
            self._add(worker, resource, name, lease, which, pause)
        worker.release(lease)

    def _claim(self, worker: Worker, resource: Resource, key: str, name: str, lease: Any) -> bool:
        def claim() -> bool:
            resource.claim(name, lease)
            return True

        return bool(
            worker.recorder.do("claim", key, claim, refused=REFUSED, unknown=UNKNOWN, token=lease.token),
        )

    def _add(self, worker: Worker, resource: Resource, name: str, lease: Any, which: int, pause: float) -> None:
        key, ages = resource.name(name), worker.state["ages"]
        try:
            there = resource.read(name)
        except UNKNOWN:
            return
        if len(there) >= MOST and (self.variant != "table" or ages.get(which, 0) < TABLES - 1):
            ages[which] = ages.get(which, 0) + 1
            return
        for number in (1, 2) if worker.rng.random() > 0.8 else (1,):
            time.sleep(pause)
            element = f"{lease.token}.{worker.name}.{number}"
            there = [*there, element]
            details = {"token": lease.token, "element": element} | ({"number": number} if resource.numbered else {})
            writing = partial(resource.write, name, there, lease.token, number)
            if not worker.recorder.do("write", key, writing, refused=REFUSED, unknown=UNKNOWN, **details):
                return

    def _resource(self, worker: Worker) -> Resource:
        if "resource" not in worker.state:
            worker.state["resource"] = CLASSES[self.variant](worker.config.direct, worker.options["where"])
        found: Resource = worker.state["resource"]
        return found

    def record_final_state(self, dsn: str, recorder: Recorder, options: dict[str, Any]) -> None:
        resource = CLASSES[self.variant](dsn, options["where"])
        for which in range(SETS):
            age = 0
            while self.variant != "table" or age < TABLES:
                there = resource.read(f"s{which}_{age}")
                if not there and self.variant != "table":
                    break
                recorder.record("final", resource.name(f"s{which}_{age}"), elements=there)
                age += 1
        resource.close()
