"""Run one traffic process: it runs a workload until its standard input ends, and writes its history.

    python -m tests.robustness.traffic.worker '{"workload": "mutex", "dsn": …}'

Its standard input ends with the process that started it. A workload uses locks only through a Worker, which records
every operation. The configuration decides whether the client is synchronous or asynchronous.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy.exc import DBAPIError

import dblock
import fenced_store
from tests.robustness import mutations
from tests.robustness.history.record import Recorder
from tests.robustness.traffic import workloads
from tests.robustness.traffic.interruptions import CANCELLED, Interruptions
from tests.support.facade import blocking_client
from tests.support.orphans import die_with_parent


class WorkerConfig(NamedTuple):
    """The configuration of a traffic process."""

    workload: str
    dsn: str
    direct: str
    """The DSN that bypasses every proxy in front of the server; for the resources, not for the locks."""
    history: str
    seed: int
    kind: str = "sync"
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    bug: str | None = None


class Worker:
    """One thread of the traffic, with the operations that a workload can use."""

    # A claim outside the lock's database may come too late, or get no reply.
    REFUSED = (dblock.LockTimeout, dblock.LeaseLost, fenced_store.StaleTokenError)
    UNKNOWN = (dblock.DatabaseError, dblock.ClientClosed, fenced_store.OutcomeUnknown, DBAPIError, *CANCELLED)

    def __init__(
        self,
        name: str,
        client: Any,
        recorder: Recorder,
        config: WorkerConfig,
        stop: threading.Event,
        interruptions: Interruptions | None = None,
    ) -> None:
        self.name = name
        self.client = client
        self.recorder = recorder
        self.config = config
        self.options = config.options
        self.rng = random.Random(f"{config.seed} {name}")
        self.state: dict[str, Any] = {}
        """State that the workload keeps for this thread between steps."""
        self._stop = stop
        self.interruptions = interruptions or Interruptions()

    @property
    def stopping(self) -> bool:
        """Whether the worker must stop."""
        return self._stop.is_set()

    def pause(self, seconds: float) -> None:
        """Pause for this time, or until the worker must stop."""
        self._stop.wait(seconds)

    def acquire(self, name: str, *, timeout: float | None = 5.0, ttl: float = 30.0, **lock_options: Any) -> Any:
        """Wait for the lock; return a lease or None."""
        lock = self.client.lock(name, ttl=ttl, **lock_options)
        return self._grant(name, ttl, lock_options | {"timeout": timeout}, lambda: lock.acquire(timeout=timeout))

    def try_acquire(self, name: str, *, ttl: float = 30.0, **lock_options: Any) -> Any:
        """Try once to acquire the lock; return a lease or None."""
        lock = self.client.lock(name, ttl=ttl, **lock_options)

        def ask() -> Any:
            lease = lock.try_acquire()
            if lease is None:
                raise dblock.LockTimeout(name, 0)
            return lease

        return self._grant(name, ttl, lock_options | {"timeout": 0}, ask)

    def acquire_share(self, lock: Any, *, timeout: float, ttl: float, **details: Any) -> Any:
        """Wait for a share of this lock, or try once if the timeout is 0; return a lease or None."""

        def ask() -> Any:
            lease = lock.acquire(timeout=timeout) if timeout else lock.try_acquire()
            if lease is None:
                raise dblock.LockTimeout(lock.name, 0)
            return lease

        return self._grant(lock.name, ttl, details | {"timeout": timeout}, ask)

    def _grant(self, name: str, ttl: float, lock_options: dict[str, Any], ask: Callable[[], Any]) -> Any:
        details: dict[str, Any] = {
            key: value for key, value in lock_options.items() if isinstance(value, (bool, int, float, str))
        }
        if lock_options.get("claims"):
            details["claims"] = [
                str(one) for named in lock_options["claims"] for one in getattr(named, "resources", [named])
            ]
        lease = self.recorder.do(
            "acquire",
            name,
            self.interruptions.interruptible(ask),
            refused=self.REFUSED,
            unknown=self.UNKNOWN,
            describe=lambda lease: {
                "token": lease.token,
                **({"permit": lease.permit} if hasattr(lease, "permit") else {}),
            },
            ttl=ttl,
            worker=self.name,
            **details,
        )
        return self.interruptions.remember(lease)

    def believes(self, lease: Any) -> bool:
        """Return whether the lease is still trusted; if so, record that with a time from before the check."""
        before = time.monotonic()
        if lease.lost.is_set() or not lease.remaining():
            return False
        self.recorder.record("believe", lease.name, called=before, token=lease.token)
        return True

    def hold(self, lease: Any, seconds: float, every: float = 0.005) -> bool:
        """Hold the lock for this time and check the lease repeatedly; return False as soon as it is lost."""
        ends = time.monotonic() + seconds
        while self.believes(lease):
            left = ends - time.monotonic()
            if left <= 0:
                return True
            time.sleep(min(every, left))
        self.recorder.record("loss", lease.name, token=lease.token, reason=str(lease.lost.reason))
        return False

    def renew(self, lease: Any) -> None:
        """Renew the lease explicitly."""
        self.recorder.do(
            "renew",
            lease.name,
            self.interruptions.interruptible(lease.renew),
            refused=self.REFUSED,
            unknown=self.UNKNOWN,
            token=lease.token,
        )

    def release(self, lease: Any) -> None:
        """Release the lock."""
        self.recorder.do(
            "release",
            lease.name,
            self.interruptions.interruptible(lease.release),
            refused=self.REFUSED,
            unknown=self.UNKNOWN,
            describe=lambda freed: {"freed": freed},
            token=lease.token,
        )

    def drop(self, lease: Any) -> None:
        """Drop the lease without a release: the client gives the lock back at some time, or never."""
        self.recorder.begin("release", lease.name, token=lease.token)


def main() -> None:
    """Run the workload until standard input ends."""
    die_with_parent()
    config = WorkerConfig(**json.loads(sys.argv[1]))
    logging.getLogger("dblock").addHandler(logging.FileHandler(Path(config.history).with_suffix(".log")))
    mutations.insert_into_client(config.bug)
    workload = workloads.named(config.workload)
    recorder = Recorder(Path(config.history))
    stop = threading.Event()
    name = Path(config.history).stem
    with blocking_client(config.kind, config.dsn, patience=2.0, **config.options.get("client", {})) as client:
        own_recorder = [recorder]
        _count_wake_ups(own_recorder)
        interruptions = Interruptions()

        def worker(name: str, recorder: Recorder = recorder) -> Worker:
            return Worker(name, client, recorder, config, stop, interruptions)

        def worker_of_child(recorder: Recorder) -> Worker:
            # The child records everything from now on in its own history.
            own_recorder[:] = [recorder]
            return worker(name, recorder)

        interruption = config.options.get("interruption")
        if interruption == "fork":
            interruptions.expect_forks(client, name, Path(config.history), config.seed, worker_of_child)
        if interruption == "cancel":
            interruptions.expect_cancellations(client, config.seed)
        workers = [worker(f"{name}.{number}") for number in range(int(config.options.get("threads", workload.threads)))]
        # Python raises exceptions from signal handlers, as Ctrl-C does, in the main thread only.
        in_main = [workers.pop()] if interruption == "cancel" and config.kind == "sync" else []
        threads = [threading.Thread(target=_run, args=(workload, one), daemon=True) for one in workers]
        for thread in threads:
            thread.start()
        print("ready", flush=True)
        if in_main:
            threading.Thread(target=_end_with_input, args=(stop,), daemon=True).start()
            _run(workload, in_main[0])
        else:
            _end_with_input(stop)
        for thread in threads:
            thread.join(20)
            if thread.is_alive():
                recorder.record("trouble", thread.name, what="did not stop")
                faulthandler.dump_traceback()  # shows where, in the output that is kept of a failed run
        interruptions.wait_for_children(recorder)


def _end_with_input(stop: threading.Event) -> None:
    sys.stdin.read()
    stop.set()


def _run(workload: Any, worker: Worker) -> None:
    try:
        while not worker.stopping:
            workload.step(worker)
    except BaseException as error:
        # An unexpected error is recorded as trouble. This process does not judge it.
        worker.recorder.record("trouble", worker.name, what=f"{type(error).__name__}: {error}")
        raise


def _count_wake_ups(own_recorder: list[Recorder]) -> None:
    """Record every notification that wakes a waiter, in the history of the process that receives it."""
    from dblock._core.waiters import LocalWaiter, LocalWaiters

    add, notified = LocalWaiters.add, LocalWaiters.notified
    names: dict[str, str] = {}

    def added(self: LocalWaiters, waiter: LocalWaiter) -> None:
        names[waiter.attempt] = waiter.name
        add(self, waiter)

    def recorded(self: LocalWaiters, payload: str) -> None:
        # The attempt is the last word. A waiter that has left may still be notified.
        attempt = payload.split()[-1]
        own_recorder[0].record("woken", names.get(attempt.replace("-", ""), ""), attempt=attempt)
        notified(self, payload)

    LocalWaiters.add, LocalWaiters.notified = added, recorded  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
