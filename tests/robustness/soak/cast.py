"""Run one process of a soak in one of these roles, until its standard input ends.

    python -m tests.robustness.soak.cast few '{"workload": …}'

Every few seconds it reports what it did to the process that started it, as a line of JSON, and forgets it. So neither a
file nor the memory of this process grows with the length of the run.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import dblock
import fenced_store
from dblock._runtime.target import resolve
from dblock.admin import doctor
from dblock.admin.inspect import overview
from dblock.admin.reaper import Reaper
from tests.robustness.history.record import Recorder
from tests.robustness.traffic.worker import Orders, Worker
from tests.robustness.traffic.workloads import mutex
from tests.support.facade import blocking_client

EVERY = 5.0
"""Seconds between two reports."""

ITEMS, ACCOUNTS = 5_000, 8
IDLE = 30.0
"""Seconds after which the reaper deletes an idle lock; short, so that tables reach a plateau within minutes."""


class Reporter(Recorder):
    """A recorder that keeps operations only until the next report."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._lines: deque[dict[str, Any]] = deque()

    def _write(self, line: dict[str, Any]) -> None:
        self._lines.append(line)

    def close(self) -> None:
        pass

    def taken(self) -> list[dict[str, Any]]:
        """Return the lines recorded since the last report."""
        return [self._lines.popleft() for _ in range(len(self._lines))]


class Few:
    """Contend for a few locks: wait, try, renew, drop."""

    def __init__(self, orders: Orders) -> None:
        self._mutex = mutex.Workload()

    def step(self, worker: Worker) -> None:
        self._mutex.step(worker)
        worker.pause(worker.dice.uniform(0, 0.02))


class Many:
    """Use thousands of locks with hardly any contention, and new names all the time."""

    def __init__(self, orders: Orders) -> None:
        self._prefix = f"order {orders.seed}"
        self._orders = itertools.count()

    def step(self, worker: Worker) -> None:
        dice = worker.dice
        mood = dice.random()
        name = f"{self._prefix} {next(self._orders)}" if mood < 0.1 else f"item {dice.randrange(ITEMS)}"
        lease = worker.try_acquire(name, ttl=30.0)
        if lease is not None:
            if mood > 0.9:
                worker.renew(lease)
            worker.believes(lease)
            worker.release(lease)
        worker.pause(dice.uniform(0, 0.02))


class Fenced:
    """Acquire a lock, claim its fence and write a value under its token."""

    def __init__(self, orders: Orders) -> None:
        self._store = fenced_store.FencedStore(orders.direct, history=3)

    def step(self, worker: Worker) -> None:
        key = f"account {worker.dice.randrange(ACCOUNTS)}"
        lease = worker.acquire(key, ttl=10.0, claims=[key])
        if lease is not None:
            worker.recorder.do(
                "put",
                key,
                lambda: self._store.put(key, {"by": worker.name, "at": time.time()}, fence=lease.token),
                refused=(fenced_store.StaleTokenError,),
                token=lease.token,
            )
            worker.release(lease)
        worker.pause(worker.dice.uniform(0, 0.05))


class Visitor:
    """Open a client, acquire a lock or two, and close the client."""

    def __init__(self, orders: Orders) -> None:
        self._kinds = itertools.cycle(("sync", "async"))

    def step(self, worker: Worker) -> None:
        with blocking_client(next(self._kinds), worker.orders.dsn, patience=2.0) as client:
            guest = Worker(worker.name, client, worker.recorder, worker.orders, worker._over)
            guest.dice = worker.dice
            for _ in range(worker.dice.randrange(1, 4)):
                name = worker.dice.choice([f"item {worker.dice.randrange(ITEMS)}", "mutex 0"])
                lease = guest.acquire(name, ttl=5.0, timeout=worker.dice.choice([0.0, 1.0]))
                if lease is not None:
                    guest.hold(lease, worker.dice.uniform(0, 0.01))
                    if worker.dice.random() < 0.7:  # else the client releases it when it closes
                        guest.release(lease)
            worker.recorder.note("visit", "")
        worker.pause(worker.dice.uniform(0, 0.5))


class Operator:
    """Operate dblock: list locks, force-release one at times, run the doctor and the reaper."""

    def __init__(self, orders: Orders) -> None:
        self._target = resolve(orders.direct)
        self._reaper = Reaper(self._target, idle=IDLE)
        self._turns = itertools.count()

    def step(self, worker: Worker) -> None:
        turn = next(self._turns)
        note = worker.recorder.note
        with overview(self._target) as look:
            note("list", "", locks=len(look.locks(include_free=turn % 2 == 0)), waiting=len(look.waiters()))
            look.history()
            held = [one for one in look.locks("mutex *") if one.token]
            if turn % 5 == 0 and held:
                one = worker.dice.choice(held)
                taken = look.force_release(one.name, one.number, actor="soak", reason="regular force-release")
                note("force", one.name, token=one.number, freed=taken)
        if turn % 5 == 0:
            began = time.monotonic()
            note("reap", "", called=began, gone=self._reaper.once())
        if turn % 30 == 0:
            found = [one.what for one in doctor.examine(self._target).findings if one.level != "note"]
            note("doctor", "", found=found)
        worker.pause(2.0)


PARTS: dict[str, Callable[[Orders], Any]] = {
    "few": Few,
    "many": Many,
    "fenced": Fenced,
    "visitor": Visitor,
    "operator": Operator,
}


def main() -> None:
    """Run a role until standard input ends."""
    part, orders = sys.argv[1], Orders(**json.loads(sys.argv[2]))
    logging.getLogger("dblock").addHandler(logging.FileHandler(orders.history))
    warnings.simplefilter("ignore", ResourceWarning)  # leases are dropped on purpose
    reporter, over = Reporter(), threading.Event()
    played = PARTS[part](orders)
    with blocking_client(orders.kind, orders.dsn, patience=2.0) as client:
        threads = [
            threading.Thread(
                target=_go, args=(played, Worker(f"{part}.{number}", client, reporter, orders, over)), daemon=True
            )
            for number in range(orders.options["threads"])
        ]
        for thread in threads:
            thread.start()
        print("[]", flush=True)
        threading.Thread(target=_report, args=(reporter, over), daemon=True).start()
        sys.stdin.read()
        over.set()
        for thread in threads:
            thread.join(20)
            if thread.is_alive():
                reporter.note("trouble", thread.name, what="did not stop")
    print(json.dumps(reporter.taken()), flush=True)


def _go(played: Any, worker: Worker) -> None:
    while not worker.over:
        try:
            played.step(worker)
        except dblock.DblockError as error:
            # An unexpected error is recorded as trouble, and the soak continues.
            worker.recorder.note("trouble", worker.name, what=f"{type(error).__name__}: {error}")
            worker.pause(1.0)
        except BaseException as error:
            worker.recorder.note("trouble", worker.name, what=f"{type(error).__name__}: {error}; the thread stops")
            raise


def _report(reporter: Reporter, over: threading.Event) -> None:
    while not over.wait(EVERY):
        print(json.dumps(reporter.taken()), flush=True)


if __name__ == "__main__":
    main()
