"""Measure one client that waits for many different locks: it is first in every queue, and has to check every holder."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import psycopg

import dblock
from dblock.admin import schema
from tests.robustness.limits import Failure, Measured, Progress, server_with
from tests.support.eventually import eventually_async


def measure(
    sizes: Sequence[int] = (10, 100, 1_000, 3_000),
    observe_for: float = 4.0,
    durable: bool = True,
    progress: Progress = lambda _: None,
) -> Measured:
    """Let one client hold this number of locks and another wait for all of them; observe the wait for this time."""
    found = Measured("One client that waits for many different locks")
    with server_with(durable) as server:
        schema.install(server.url)
        for size in sizes:
            progress(f"{size:,} locks")
            asyncio.run(_measure(found, server.url, size, observe_for))
    found.failures.append(
        Failure(
            "thousands of different locks awaited by one client",
            "queuing takes seconds, and its polls take a part of a core on the server",
            "none",
        )
    )
    return found


async def _measure(found: Measured, dsn: str, size: int, observe_for: float) -> None:
    async with (
        dblock.AsyncClient(dsn) as holder,
        dblock.AsyncClient(dsn) as waiter,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as owner,
    ):
        leases = [await holder.lock(f"{size} {number}", ttl=60).acquire() for number in range(size)]

        async def all_queued() -> bool:
            return bool(await _one(owner, "SELECT count(*) FROM dblock.lock_tickets") >= size)

        began = time.monotonic()
        waits = [
            asyncio.ensure_future(waiter.lock(f"{size} {number}", ttl=60, timeout=300).acquire())
            for number in range(size)
        ]
        await eventually_async(all_queued, "the waits are queued", 300)
        queued = time.monotonic() - began
        rows = await (
            await owner.execute("SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'")
        ).fetchall()
        before, began = sum(_processor(pid) for (pid,) in rows), time.monotonic()
        await asyncio.sleep(observe_for)
        share = (sum(_processor(pid) for (pid,) in rows) - before) / (time.monotonic() - began)
        began = time.monotonic()
        for lease in leases:
            await lease.release()
        had = await asyncio.gather(*waits)
        served = time.monotonic() - began
    found.numbers |= {f"share {size}": share, f"served {size}": len(had)}
    found.figures[f"{size:,} locks"] = (
        f"queued after {queued:.2f} s; waiting takes {share:.2f} of a core in the server; all granted after "
        f"{served:.2f} s"
    )
    found.claims[f"all {size:,} locks were granted"] = len(had) == size


async def _one(owner: psycopg.AsyncConnection[tuple[int]], statement: str) -> int:
    row = await (await owner.execute(statement.encode())).fetchone()
    assert row is not None
    return int(row[0])


def _processor(pid: int) -> float:
    """Return the processor time of a process in seconds."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
