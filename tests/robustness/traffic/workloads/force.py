"""Force-release locks: one thread of each process force-releases held locks, with notice to the holder or at once.

With notice, the holder learns of it before the next grant. At once, the holder does not learn of it and continues to
write. Then only the fence protects the resource from that holder.
"""

from __future__ import annotations

from typing import Any

import psycopg

import dblock
import fenced_store
from dblock.admin.inspect import Overview
from tests.robustness.checkers import durability, fence, forced, linearizability, loss, token_order, wake_ups
from tests.robustness.traffic import workloads
from tests.robustness.traffic.resources import REFUSED, UNKNOWN
from tests.robustness.traffic.worker import Worker

LOCKS = 3


class Workload(workloads.Base):
    """A force-release keeps its promises."""

    checkers = (
        forced.check,
        fence.check,
        linearizability.check,
        token_order.check,
        loss.check,
        wake_ups.check,
        durability.check,
    )
    threads = 3

    def step(self, worker: Worker) -> None:
        name = f"forced {worker.rng.randrange(LOCKS)}"
        if worker.name.endswith(".0"):
            _force_release(worker, name)
        else:
            _hold(worker, name)


def _force_release(worker: Worker, name: str) -> None:
    now = worker.rng.random() < 0.5
    worker.pause(worker.rng.uniform(0.02, 0.2))
    try:
        overview = _overview(worker)
        token = next((one.number for one in overview.locks(name=name) if one.state == "held"), None)
    except (dblock.DblockError, psycopg.Error):
        return
    if token is None or token <= 0:
        return
    details: dict[str, Any] = {"token": token, "now": now} | ({} if now else {"freed": False})
    worker.recorder.do(
        "force",
        name,
        lambda: overview.force_release(name, token, actor="operator", reason="robustness test", now=now),
        unknown=(dblock.DblockError, psycopg.Error),
        # With notice, the lock is not free yet.
        describe=lambda taken: {"taken": taken, "freed": taken and now},
        **details,
    )


def _hold(worker: Worker, name: str) -> None:
    rng = worker.rng
    resource = f"resource of {name}"
    claims = [resource] if rng.random() < 0.5 else []
    ttl = rng.choice([0.5, 1.0])
    lease = worker.acquire(name, ttl=ttl, timeout=2, keep_alive=rng.random() < 0.8, claims=claims)
    if lease is None:
        return
    store = worker.state.setdefault("store", None) or fenced_store.FencedStore(worker.config.direct)
    worker.state["store"] = store
    blind = rng.random() < 0.5
    for number in range(1, rng.randrange(2, 8)):
        # A blind worker ignores the loss and continues to write. Other workers stop when their lease is lost.
        if not worker.hold(lease, rng.uniform(0, 0.05)) and not blind:
            break
        worker.recorder.do(
            "write",
            resource,
            lambda number=number: store.put(resource, number, fence=lease.token, write=number),  # type: ignore[misc]
            refused=REFUSED,
            unknown=UNKNOWN,
            token=lease.token,
            number=number,
        )
        if rng.random() < 0.1:
            worker.renew(lease)
    worker.release(lease)


def _overview(worker: Worker) -> Overview:
    connection: psycopg.Connection[Any] | None = worker.state.get("connection")
    if connection is None or connection.closed or connection.broken:
        connection = worker.state["connection"] = psycopg.connect(worker.config.direct, autocommit=True)
    return Overview(connection)
