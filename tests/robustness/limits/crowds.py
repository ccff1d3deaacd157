"""Control several processes with many clients each, and add up their replies."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[3]


class Crowds:
    """Several processes with the same number of clients each."""

    def __init__(self, dsn: str, processes: int, clients: int, ttl: float) -> None:
        self._processes = [
            subprocess.Popen(
                [
                    sys.executable, "-m", "tests.robustness.limits.crowd",
                    dsn, str(clients), f"crowd {number}", str(ttl),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=ROOT,
            )
            for number in range(processes)
        ]  # fmt: skip
        self.pids = [process.pid for process in self._processes]

    def all(self, command: str, only: int | None = None) -> dict[str, Any]:
        """Send a command to all processes (or the first few) at once, and return the sum of their replies."""
        chosen = self._processes[:only]
        for process in chosen:
            assert process.stdin is not None
            process.stdin.write(f"{command}\n")
            process.stdin.flush()
        totals: Counter[str] = Counter()
        counters: dict[str, Counter[str]] = {"errors": Counter(), "lost": Counter()}
        for process in chosen:
            assert process.stdout is not None
            for key, value in json.loads(process.stdout.readline()).items():
                if key in counters:
                    counters[key].update(value)
                else:
                    totals[key] += value
        return {**totals, **counters}

    def __enter__(self) -> Crowds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if kind is not None:
                process.kill()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.wait()
            process.stdout.close()
