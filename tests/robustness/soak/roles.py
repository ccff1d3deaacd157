"""Run one process of a soak in one of these roles, until its standard input ends.

    python -m tests.robustness.soak.roles few '{"workload": …}'

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
from tests.robustness.traffic.worker import Worker, WorkerConfig
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

    def take_lines(self) -> list[dict[str, Any]]:
        """Return the lines recorded since the last report."""
        return [self._lines.popleft() for _ in range(len(self._lines))]


class Few:
    """Contend for a few locks: wait, try, renew, drop."""

    def __init__(self, config: WorkerConfig) -> None:
        self._mutex = mutex.Workload()

    def step(self, worker: Worker) -> None:
        self._mutex.step(worker)
        worker.pause(worker.rng.uniform(0, 0.02))


class Many:
    """Use thousands of locks with hardly any contention, and new names all the time."""

    def __init__(self, config: WorkerConfig) -> None:
        self._prefix = f"order {config.seed}"
        self._new_names = itertools.count()

    def step(self, worker: Worker) -> None:
        rng = worker.rng
        draw = rng.random()
        name = f"{self._prefix} {next(self._new_names)}" if draw < 0.1 else f"item {rng.randrange(ITEMS)}"
        lease = worker.try_acquire(name, ttl=30.0)
        if lease is not None:
            if draw > 0.9:
                worker.renew(lease)
            worker.believes(lease)
            worker.release(lease)
        worker.pause(rng.uniform(0, 0.02))


class Fenced:
    """Acquire a lock, claim its fence and write a value under its token."""

    def __init__(self, config: WorkerConfig) -> None:
        self._store = fenced_store.FencedStore(config.direct, history=3)

    def step(self, worker: Worker) -> None:
        key = f"account {worker.rng.randrange(ACCOUNTS)}"
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
        worker.pause(worker.rng.uniform(0, 0.05))


class Visitor:
    """Open a client, acquire a lock or two, and close the client."""

    def __init__(self, config: WorkerConfig) -> None:
        self._kinds = itertools.cycle(("sync", "async"))

    def step(self, worker: Worker) -> None:
        with blocking_client(next(self._kinds), worker.config.dsn, patience=2.0) as client:
            guest = Worker(worker.name, client, worker.recorder, worker.config, worker._stop)
            guest.rng = worker.rng
            for _ in range(worker.rng.randrange(1, 4)):
                name = worker.rng.choice([f"item {worker.rng.randrange(ITEMS)}", "mutex 0"])
                lease = guest.acquire(name, ttl=5.0, timeout=worker.rng.choice([0.0, 1.0]))
                if lease is not None:
                    guest.hold(lease, worker.rng.uniform(0, 0.01))
                    if worker.rng.random() < 0.7:  # else the client releases it when it closes
                        guest.release(lease)
            worker.recorder.record("visit", "")
        worker.pause(worker.rng.uniform(0, 0.5))


class Operator:
    """Operate dblock: list locks, force-release one at times, run the doctor and the reaper."""

    def __init__(self, config: WorkerConfig) -> None:
        self._target = resolve(config.direct)
        self._reaper = Reaper(self._target, idle=IDLE)
        self._turns = itertools.count()

    def step(self, worker: Worker) -> None:
        turn = next(self._turns)
        record = worker.recorder.record
        with overview(self._target) as view:
            record("list", "", locks=len(view.locks(include_free=turn % 2 == 0)), waiting=len(view.waiters()))
            view.history()
            held = [one for one in view.locks("mutex *") if one.token]
            if turn % 5 == 0 and held:
                one = worker.rng.choice(held)
                take_lines = view.force_release(one.name, one.number, actor="soak", reason="regular force-release")
                record("force", one.name, token=one.number, freed=take_lines)
        if turn % 5 == 0:
            began = time.monotonic()
            record("reap", "", called=began, gone=self._reaper.once())
        if turn % 30 == 0:
            found = [one.what for one in doctor.examine(self._target).findings if one.level != "note"]
            record("doctor", "", found=found)
        worker.pause(2.0)


ROLES: dict[str, Callable[[WorkerConfig], Any]] = {
    "few": Few,
    "many": Many,
    "fenced": Fenced,
    "visitor": Visitor,
    "operator": Operator,
}


def main() -> None:
    """Run a role until standard input ends."""
    name, config = sys.argv[1], WorkerConfig(**json.loads(sys.argv[2]))
    logging.getLogger("dblock").addHandler(logging.FileHandler(config.history))
    warnings.simplefilter("ignore", ResourceWarning)  # leases are dropped on purpose
    reporter, stop = Reporter(), threading.Event()
    role = ROLES[name](config)
    with blocking_client(config.kind, config.dsn, patience=2.0) as client:
        threads = [
            threading.Thread(
                target=_run, args=(role, Worker(f"{name}.{number}", client, reporter, config, stop)), daemon=True
            )
            for number in range(config.options["threads"])
        ]
        for thread in threads:
            thread.start()
        print("[]", flush=True)
        threading.Thread(target=_report, args=(reporter, stop), daemon=True).start()
        sys.stdin.read()
        stop.set()
        for thread in threads:
            thread.join(20)
            if thread.is_alive():
                reporter.record("trouble", thread.name, what="did not stop")
    print(json.dumps(reporter.take_lines()), flush=True)


def _run(role: Any, worker: Worker) -> None:
    while not worker.stopping:
        try:
            role.step(worker)
        except dblock.DblockError as error:
            # An unexpected error is recorded as trouble, and the soak continues.
            worker.recorder.record("trouble", worker.name, what=f"{type(error).__name__}: {error}")
            worker.pause(1.0)
        except BaseException as error:
            worker.recorder.record("trouble", worker.name, what=f"{type(error).__name__}: {error}; the thread stops")
            raise


def _report(reporter: Reporter, stop: threading.Event) -> None:
    while not stop.wait(EVERY):
        print(json.dumps(reporter.take_lines()), flush=True)


if __name__ == "__main__":
    main()
