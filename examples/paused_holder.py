"""Pause a holder past its lease, and watch the store refuse its late write.

A worker process acquires the lock and is stopped with SIGSTOP before it writes. Its lease expires, and this process
acquires the lock and writes. Then the worker continues. It does not know that it was paused, and writes with its old
token.

    python examples/paused_holder.py

On Linux and macOS.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import dblock
import fenced_store
from dblock import embedded
from dblock.admin import schema

NAME = "example:balance"


def worker(dsn: str) -> None:
    """Acquire the lock, wait for a line on standard input, and write without checking the lease."""
    with dblock.Client(dsn) as client, fenced_store.FencedStore(dsn) as store:
        lease = client.lock(NAME, ttl=1).acquire()
        print("acquired", flush=True)
        sys.stdin.readline()
        try:
            store.put(NAME, 130, fence=lease)
            print("worker: wrote 130", flush=True)
        except fenced_store.StaleTokenError as error:
            order = "lower" if error.offered < error.stored else "not lower"
            print("worker: refused, because its token is", order, "than the stored one", flush=True)
        print("worker: its lease is", "lost" if lease.lost.is_set() else "held", flush=True)


def main() -> None:
    dsn = os.environ.get("DBLOCK_DSN") or embedded.start().url
    schema.install(dsn)
    fenced_store.install(dsn)
    paused = subprocess.Popen(
        [sys.executable, __file__, dsn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert paused.stdin is not None
    assert paused.stdout is not None
    with paused, dblock.Client(dsn) as client, fenced_store.FencedStore(dsn) as store:
        assert paused.stdout.readline() == "acquired\n"
        paused.send_signal(signal.SIGSTOP)
        print("the worker is stopped; waiting for its lease to expire")
        with client.lock(NAME, timeout=30) as lease:
            store.put(NAME, 150, fence=lease)
            print("this process acquired the lock and wrote 150")
        paused.send_signal(signal.SIGCONT)
        print(paused.communicate("write\n")[0], end="")
        stored = store.get(NAME)
        print("stored:", stored.value if stored else None)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        worker(sys.argv[1])
    else:
        main()
