"""`dblock demo`: workers, one lock, told as it happens.

Real processes contend for one lock on a real Postgres. This module is both sides: the conductor, who tells the
workers when to act and prints what they report, and (run as a program) a worker. Nothing they report is made up:
each line is printed when it has happened, with the token and the time that came with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from dblock.client import Client
from dblock.errors import DblockError
from dblock.lease import Lease
from dblock.target import Target

LOCK = "demo:ledger"
TTL = 2.0


class _Worker:
    """A worker process: it is told one word at a time and reports what came of it."""

    def __init__(self, name: str, conninfo: str, schema: str) -> None:
        self.name = name
        # The DSN goes by the environment: a command line can be read by every user of the machine.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dblock.demo", name, schema],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"DBLOCK_DSN": conninfo},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise DblockError(f"Worker {self.name} ended unexpectedly; what it said is above.")
        report: dict[str, Any] = json.loads(line)
        if "error" in report:
            raise DblockError(f"Worker {self.name}: {report['error']}")
        return report

    def ask(self, word: str) -> dict[str, Any]:
        self.tell(word)
        return self.hear()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


def tell_story(target: Target, schema: str, say: Callable[[str], None]) -> None:
    """Let workers contend for a lock, hand it over, survive a kill and a freeze; say each thing as it happens."""
    import fenced_store

    fenced_store.install(target.conninfo())
    began = time.monotonic()

    def line(who: str, what: str) -> None:
        say(f"{time.monotonic() - began:6.2f} s  {who:<7} {what}")

    with (
        _Worker("alice", target.conninfo(), schema) as alice,
        _Worker("bob", target.conninfo(), schema) as bob,
        _Worker("carol", target.conninfo(), schema) as carol,
    ):
        for worker in (alice, bob, carol):
            worker.hear()
            line(worker.name, f"is here, process {worker.pid}")

        first = alice.ask("acquire")
        line("alice", f"holds {LOCK!r} under token {first['token']}, for {TTL:g} s unless renewed")
        line("bob", f"tries, and is told that {bob.ask('try')['holder']} has it")
        bob.tell("acquire")
        line("bob", "waits for it")
        time.sleep(0.5)
        alice.ask("renew")
        line("alice", "renews: the two seconds start anew")
        time.sleep(0.5)
        released_at = time.monotonic()
        alice.ask("release")
        line("alice", "releases it")
        second = bob.hear()
        after = (time.monotonic() - released_at) * 1000
        line("bob", f"holds it under token {second['token']}, {after:.0f} ms after the release")

        alice.tell("acquire")
        line("alice", "wants it back, and waits")
        time.sleep(0.3)
        killed_at = time.monotonic()
        bob.kill()
        line("bob", "is killed with kill -9, holding the lock")
        third = alice.hear()
        after = (time.monotonic() - killed_at) * 1000
        line("alice", f"holds it under token {third['token']}, {after:.0f} ms after: bob was seen to be gone")

        alice.stop()
        line("alice", "is frozen with SIGSTOP, holding the lock")
        fourth = carol.ask("acquire")
        line("carol", f"holds it under token {fourth['token']}, when alice's {TTL:g} s are over")
        line("carol", f"writes the ledger, showing her token: {carol.ask('write')['outcome']}")
        alice.tell("write")
        alice.go_on()
        outcome = alice.hear()["outcome"]
        line("alice", f"goes on, and writes as if nothing had happened: {outcome}")
        if outcome == "stored":
            raise DblockError("A stale write was accepted. This is a bug; please report it.")
        carol.ask("release")

    tokens = [first["token"], second["token"], third["token"], fourth["token"]]
    line("", f"tokens in the order of the grants: {', '.join(map(str, tokens))}")
    if sorted(set(tokens)) != tokens:
        raise DblockError("The tokens did not rise with the grants. This is a bug; please report it.")


def _work(name: str, schema: str) -> None:
    def report(**what: Any) -> None:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()

    import fenced_store

    lease: Lease | None = None
    try:
        with Client(holder=name, schema=schema) as client, fenced_store.FencedStore(os.environ["DBLOCK_DSN"]) as store:
            lock = client.lock(LOCK, ttl=TTL, timeout=30)
            report(ready=True, holder=str(lock.holder()))
            for word in map(str.strip, sys.stdin):
                if word == "acquire":
                    lease = lock.acquire()
                    report(token=lease.token)
                elif word == "try":
                    if lock.try_acquire() is not None:
                        raise DblockError("the lock was granted to two at once. This is a bug; please report it.")
                    holder = lock.holder()
                    report(holder=holder.holder if holder else "nobody")
                elif lease is not None and word == "renew":
                    lease.renew()
                    report(renewed=True)
                elif lease is not None and word == "write":
                    try:
                        store.put(LOCK, f"written by {name}", fence=lease)
                        report(outcome="stored")
                    except fenced_store.StaleTokenError as error:
                        report(outcome=f"refused, for token {error.stored} was seen")
                elif lease is not None and word == "release":
                    report(released=lease.release())
    except (DblockError, fenced_store.FencedStoreError) as error:
        report(error=str(error))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the conductor's to handle; it ends its workers.
    _work(*sys.argv[1:])
