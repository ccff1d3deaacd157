"""Measure a soak: the processes from outside, through the kernel, and the server by queries."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psycopg

from tests.robustness.history.record import Operation

STEP = math.log(1.05)
"""Latencies are counted in buckets that are five per cent apart."""

COUNTED = ("acquire", "renew", "release")
"""The kinds of operations on a lock."""


def of_process(pid: int) -> dict[str, float] | None:
    """Return the memory (MB), threads and open files of a process, or None if it has exited."""
    try:
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        if "VmRSS" not in status:
            return None
        return {
            "memory": int(status["VmRSS"].split()[0]) / 1024,
            "threads": int(status["Threads"]),
            "files": len(os.listdir(f"/proc/{pid}/fd")),
        }
    except (FileNotFoundError, ProcessLookupError):
        return None


class ServerSampler:
    """Sample the server over one connection of its own."""

    def __init__(self, dsn: str) -> None:
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._wal = self._position()

    def sample(self) -> dict[str, Any]:
        """Return the current state of the server, and the WAL written since the last sample."""
        ask = self._connection.execute
        backends = [
            pid
            for (pid,) in ask(
                "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            ).fetchall()
        ]
        tables = ask(
            "SELECT c.relname::text, pg_table_size(c.oid), pg_indexes_size(c.oid), coalesce(s.n_dead_tup, 0),"
            " coalesce(s.n_live_tup, 0)"
            " FROM pg_class AS c LEFT JOIN pg_stat_all_tables AS s ON s.relid = c.oid"
            " WHERE c.relkind = 'r' AND c.relnamespace::regnamespace::text IN ('dblock', 'fenced_store') ORDER BY 1"
        ).fetchall()
        before, self._wal = self._wal, self._position()
        return {
            "connections": len(backends),
            # The private memory of each session. Shared buffers would be counted once for each.
            "memory": sum(_own_memory(pid) for pid in backends),
            "tables": {
                name: {"table": table, "indexes": indexes, "dead": dead, "live": live}
                for name, table, indexes, dead, live in tables
            },
            "wal": self._wal - before,
        }

    def _position(self) -> int:
        row = self._connection.execute("SELECT pg_current_wal_lsn() - '0/0'").fetchone()
        assert row is not None
        return int(row[0])

    def close(self) -> None:
        self._connection.close()


def _own_memory(pid: int) -> float:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0.0


def of_operations(operations: Iterable[Operation], seconds: float) -> dict[str, Any]:
    """Return the number of operations by kind, and the latency of the operations on free locks."""
    counts: Counter[str] = Counter()
    unknown = 0
    buckets: Counter[int] = Counter()
    for one in operations:
        counts[one.kind] += 1
        unknown += one.outcome == "unknown"
        # Only on the many locks, where no client waits for another, so that the latency is the service's own.
        if one.ok and one.kind in ("acquire", "release") and one.key.startswith(("item", "order")):
            buckets[int(math.log(max(one.returned - one.called, 1e-6) * 1e6) / STEP)] += 1
    locking = sum(counts[kind] for kind in COUNTED)
    return {
        "counts": dict(counts),
        "unknown": unknown,
        "rate": locking / seconds,
        "p50": _quantile(buckets, 0.5),
        "p99": _quantile(buckets, 0.99),
    }


def _quantile(buckets: Counter[int], part: float) -> float | None:
    """Return a quantile in milliseconds."""
    left = part * sum(buckets.values())
    for bucket in sorted(buckets):
        left -= buckets[bucket]
        if left <= 0:
            return math.exp((bucket + 0.5) * STEP) / 1000
    return None
