"""Locks that an operator breaks: one thread of each process takes locks from whoever holds them, gently or at once.

Gently, the holder learns of it before anybody else has the lock. At once, it does not, and goes on writing: then only
the fence stands between it and the next.
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
    """Breaking a lock is as safe as it says."""

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
        name = f"forced {worker.dice.randrange(LOCKS)}"
        if worker.name.endswith(".0"):
            _break(worker, name)
        else:
            _hold(worker, name)


def _break(worker: Worker, name: str) -> None:
    now = worker.dice.random() < 0.5
    worker.pause(worker.dice.uniform(0.02, 0.2))
    try:
        overview = _overview(worker)
        token = next((one.number for one in overview.locks(name=name) if one.state == "held"), None)
    except (dblock.DblockError, psycopg.Error):
        return
    if token is None or token <= 0:
        return
    said: dict[str, Any] = {"token": token, "now": now} | ({} if now else {"freed": False})
    worker.recorder.do(
        "force",
        name,
        lambda: overview.force_release(name, token, actor="operator", reason="to see what happens", now=now),
        unknown=(dblock.DblockError, psycopg.Error),
        # Told gently, the lock is not free yet.
        told=lambda taken: {"taken": taken, "freed": taken and now},
        **said,
    )


def _hold(worker: Worker, name: str) -> None:
    dice = worker.dice
    resource = f"resource of {name}"
    claims = [resource] if dice.random() < 0.5 else []
    ttl = dice.choice([0.5, 1.0])
    lease = worker.acquire(name, ttl=ttl, timeout=2, keep_alive=dice.random() < 0.8, claims=claims)
    if lease is None:
        return
    store = worker.own.setdefault("store", None) or fenced_store.FencedStore(worker.orders.direct)
    worker.own["store"] = store
    blind = dice.random() < 0.5
    for number in range(1, dice.randrange(2, 8)):
        # A blind one never looks, and keeps on writing; others end with their lease.
        if not worker.hold(lease, dice.uniform(0, 0.05)) and not blind:
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
        if dice.random() < 0.1:
            worker.renew(lease)
    worker.release(lease)


def _overview(worker: Worker) -> Overview:
    connection: psycopg.Connection[Any] | None = worker.own.get("connection")
    if connection is None or connection.closed or connection.broken:
        connection = worker.own["connection"] = psycopg.connect(worker.orders.direct, autocommit=True)
    return Overview(connection)
