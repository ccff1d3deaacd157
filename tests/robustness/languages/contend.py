"""Contend for a lock with a Python client, and record a history: contend HISTORY LOCK STOP TTL sync|async."""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

from tests.robustness.history.record import Recorder
from tests.robustness.traffic.worker import Worker, WorkerConfig
from tests.support.facade import blocking_client


def main() -> None:
    """Take turns, from the first line of standard input until the file `STOP` exists."""
    path, lock, stop, ttl, kind = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]), sys.argv[5]
    dsn = os.environ["DBLOCK_DSN"]
    config = WorkerConfig("", dsn, dsn, str(path), 0)
    with blocking_client(kind, dsn) as client:
        worker = Worker(path.stem, client, Recorder(path), config, threading.Event())
        client.lock("warm up").acquire().release()
        print("ready", flush=True)
        sys.stdin.readline()
        number = 0
        while not stop.exists():
            number += 1
            # Every tenth wait may end before its turn, and one of forty holds outlasts a lease that is not renewed.
            timeout = 0.02 if number % 10 == 5 else 30
            lease = worker.acquire(lock, timeout=timeout, ttl=ttl, keep_alive=True)
            if lease is not None:
                worker.hold(lease, ttl * 1.3 if number % 40 == 10 else random.uniform(0, 0.01))
                worker.release(lease)


if __name__ == "__main__":
    main()
