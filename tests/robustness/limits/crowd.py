"""Run one process with many clients: it reads one command per line, and replies with one line of JSON.

python -m tests.robustness.limits.crowd DSN CLIENTS PREFIX TTL
"""

from __future__ import annotations

import json
import resource
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dblock

AT_ONCE = 8
"""Number of clients that start in parallel."""


class Crowd:
    """The clients of this process. Each holds its own lock, once it could acquire it."""

    def __init__(self, dsn: str, size: int, prefix: str, ttl: float) -> None:
        self._prefix = prefix
        self._ttl = ttl
        self._clients = [dblock.Client(dsn, pool_size=1) for _ in range(size)]
        self._leases: dict[int, Any] = {}
        self._losses: Counter[str] = Counter()

    def take(self) -> dict[str, Any]:
        """Let each client without a lease acquire its lock; count the errors of those that cannot."""
        before = _memory()
        errors: Counter[str] = Counter()

        def run(number: int) -> None:
            try:
                lock = self._clients[number].lock(f"{self._prefix} {number}", ttl=self._ttl)
                self._leases[number] = lock.acquire(timeout=10)
            except dblock.DblockError as error:
                errors[f"{type(error).__name__}: {error}"] += 1

        self._each(run, [number for number in range(len(self._clients)) if number not in self._leases])
        return {"holds": len(self._leases), "errors": errors, "memory": _memory() - before}

    def check(self) -> dict[str, Any]:
        """Return the number of held leases, and the reasons of the lost ones."""
        lost = Counter(str(one.lost.reason) for one in self._leases.values() if one.lost.is_set())
        return {"holds": len(self._leases) - sum(lost.values()), "lost": lost}

    def serve(self) -> dict[str, Any]:
        """Let each client wait for one and the same lock, and release it."""
        served: list[int] = []
        errors: Counter[str] = Counter()

        def run(number: int) -> None:
            try:
                with self._clients[number].lock("of all", ttl=self._ttl, timeout=60):
                    served.append(number)
            except dblock.DblockError as error:
                errors[f"{type(error).__name__}: {error}"] += 1

        self._each(run, sorted(self._leases), at_once=64)
        return {"served": len(served), "errors": errors}

    def close_all(self) -> dict[str, Any]:
        """Close all clients."""
        for client in self._clients:
            client.close()
        return {}

    def _each(self, act: Callable[[int], None], numbers: list[int], at_once: int = AT_ONCE) -> None:
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(act, numbers))


def _memory() -> float:
    """Return the memory of this process in kB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return float(line.split()[1])
    return 0.0


def main() -> None:
    """Perform commands until standard input ends."""
    # A thousand clients have three connections each.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    dsn, size, prefix, ttl = sys.argv[1:]
    crowd = Crowd(dsn, int(size), prefix, float(ttl))
    for command in sys.stdin:
        print(json.dumps(getattr(crowd, command.strip())()), flush=True)


if __name__ == "__main__":
    main()
