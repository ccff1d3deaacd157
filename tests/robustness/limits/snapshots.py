"""Hold a snapshot open elsewhere while one lock is acquired and released thousands of times: measure what that costs,
and for how long after the snapshot has ended.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import psycopg

import dblock
from dblock._runtime.target import resolve
from dblock.admin import doctor, schema
from dblock.admin.doctor import Limits
from tests.robustness.limits import Failure, Measured, Progress, ms, server_with, timed

MOST_AROUND = 1_000
"""Most cycles to measure before and after."""


def measure(cycles: int = 30_000, durable: bool = True, progress: Progress = lambda _: None) -> Measured:
    """Cycle a hot lock with and without an old snapshot."""
    found = Measured(f"A snapshot open elsewhere for {cycles:,} cycles of one lock")
    around = min(MOST_AROUND, cycles // 10)
    with server_with(durable) as server:
        schema.install(server.url)
        with dblock.Client(server.url) as client, psycopg.connect(server.url, autocommit=True) as owner:
            lock = client.lock("hot", ttl=30)

            def cycle() -> float:
                return timed(lambda: lock.acquire().release())

            before = median([cycle() for _ in range(around)])
            size_before = _size(owner)
            with psycopg.connect(server.url) as report:
                report.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                report.execute("SELECT count(*) FROM dblock.distributed_locks")
                tenths = []
                for part in range(10):
                    tenths.append(median([cycle() for _ in range(cycles // 10)]))
                    progress(f"{(part + 1) * cycles // 10:,} cycles: {ms(tenths[-1])}")
                size_grown = _size(owner)
                findings = [one for one in _examined(server.url) if one.id in ("old-snapshot", "hot-updates", "bloat")]
            right_after = median([cycle() for _ in range(around)])
            owner.execute("VACUUM dblock.distributed_locks")
            vacuumed = median([cycle() for _ in range(around)])
            size_after = _size(owner)
            owner.execute("VACUUM FULL dblock.distributed_locks")
            size_full = _size(owner)
    found.numbers |= {
        "slower": tenths[-1] / before,
        "right after": right_after / before,
        "vacuumed": vacuumed / before,
        "bytes": (size_grown - size_before) / cycles,
    }
    found.figures |= {
        "a cycle before": ms(before),
        "a cycle in each tenth": ", ".join(f"{one / before:.2f}" for one in tenths) + " times as long as before",
        "the table": f"{size_before / 1024:.0f} kB → {size_grown / 1024:.0f} kB, "
        f"{(size_grown - size_before) / cycles:.0f} bytes per cycle",
        "a cycle right after the snapshot has ended": f"{right_after / before:.2f} times as long as before",
        "a cycle after a vacuum": f"{vacuumed / before:.2f} times as long as before",
        "the table after a vacuum": f"{size_after / 1024:.0f} kB; after VACUUM FULL {size_full / 1024:.0f} kB",
        "findings of the doctor": "; ".join(f"`{one.id}`: {one.what}" for one in findings) or "none",
    }
    found.claims["the doctor names the snapshot"] = any(one.id == "old-snapshot" for one in findings)
    found.claims["the table grows while the snapshot is open"] = size_grown > size_before
    found.claims["the table stops growing once the snapshot has ended"] = size_after <= size_grown
    found.failures.append(
        Failure(
            "a transaction open for long",
            f"cycles of a hot lock get slower: {tenths[-1] / before:.1f} times after {cycles:,}; normal once it ends",
            "`dblock doctor`, `old-snapshot`: Process … has been in a transaction for … s",
        )
    )
    return found


def _size(owner: psycopg.Connection[Any]) -> int:
    # Without the maps that vacuum creates beside a table.
    row = owner.execute(
        "SELECT pg_relation_size('dblock.distributed_locks') + pg_relation_size('dblock.distributed_locks_pkey')"
    ).fetchone()
    assert row is not None
    return int(row[0])


def _examined(dsn: str) -> list[doctor.Finding]:
    return doctor.examine(resolve(dsn), limits=Limits(snapshot_age=0.1)).findings
