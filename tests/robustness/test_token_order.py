"""Sixteen processes contend for one lock while another process deletes free rows at random: no token falls.

The holder of the lock appends its token to a log in shared memory, so the order of the log is the order of the grants.
A missing entry in the log shows two holders at once.
"""

from __future__ import annotations

import mmap
import multiprocessing
import random
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psycopg
import pytest

import dblock
from tests.support import mutants
from tests.support.machine import UNSAFE

pytestmark = [pytest.mark.second_stage, pytest.mark.timeout(300)]

PROCESSES = 16
GRANTS = 20_000


class Log:
    """Numbers in a shared file: their count, then the numbers. Only the holder of the lock appends to it."""

    def __init__(self, path: Path, size: int = 0) -> None:
        if size:
            path.write_bytes(bytes(8 * (size + PROCESSES + 1)))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def append(self, token: int) -> int:
        count = len(self)
        struct.pack_into("q", self._memory, 8 * (count + 1), token)
        struct.pack_into("q", self._memory, 0, count + 1)
        return count + 1

    def __len__(self) -> int:
        return int(struct.unpack_from("q", self._memory)[0])

    def __iter__(self) -> Iterator[int]:
        return (struct.unpack_from("q", self._memory, 8 * (n + 1))[0] for n in range(len(self)))


def contend(dsn: str, path: Path, grants: int) -> int:
    """Acquire and release the lock until the log is full; return the number of grants to this process."""
    log, had = Log(path), 0
    with dblock.Client(dsn, pool_size=1) as client:
        lock = client.lock("contended", ttl=60)
        while True:
            lease = lock.try_acquire()
            if lease is None:
                time.sleep(random.uniform(0, 0.002))
                continue
            full = len(log) >= grants
            if not full:
                log.append(lease.token)
                had += 1
            lease.release()
            # Let another process acquire it: a lock that comes straight back to this process is not contended.
            time.sleep(random.uniform(0, 0.004))
            if full:
                return had


def delete_free_rows(dsn: str, path: Path, grants: int) -> int:
    """Delete free rows at random moments until the log is full; return the number of deleted rows."""
    log, deleted = Log(path), 0
    with psycopg.connect(dsn, autocommit=True) as connection:
        while len(log) < grants:
            cursor = connection.execute("DELETE FROM dblock.distributed_locks WHERE expires_at <= clock_timestamp()")
            deleted += cursor.rowcount
            time.sleep(random.uniform(0, 0.003))
    return deleted


def run(dsn: str, path: Path, grants: int) -> tuple[list[int], int, int]:
    """Return the tokens in the order of the grants, the grants of all processes, and the number of deleted rows."""
    log = Log(path, grants)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dblock", "psycopg", __name__])
    with ProcessPoolExecutor(PROCESSES + 1, mp_context=context) as processes:
        deleting = processes.submit(delete_free_rows, dsn, path, grants)
        contending = [processes.submit(contend, dsn, path, grants) for _ in range(PROCESSES)]
        had = sum(future.result() for future in contending)
        return list(log), had, deleting.result()


def backwards(tokens: list[int]) -> int:
    """Count the grants whose token was not above every earlier token."""
    highest, count = 0, 0
    for token in tokens:
        count += token <= highest
        highest = max(highest, token)
    return count


@pytest.mark.parametrize("grants", [GRANTS // 8, pytest.param(GRANTS, marks=pytest.mark.nightly)])
def test_grants_under_contention_and_deletion_are_in_token_order(durable_dsn: str, tmp_path: Path, grants: int) -> None:
    tokens, had, deleted = run(durable_dsn, tmp_path / "log", grants)
    print(f"{len(tokens)} grants, {backwards(tokens)} backwards, {deleted} rows deleted")
    assert len(tokens) == had == grants
    assert backwards(tokens) == 0, UNSAFE
    assert deleted > 100, "too few rows were deleted for this to prove anything"


def test_token_order_run_catches_a_token_minted_in_values(durable_dsn: str, tmp_path: Path) -> None:
    with psycopg.connect(durable_dsn, autocommit=True) as owner:
        mutants.replace(owner, mutants.TOKEN_IN_VALUES)
    tokens, _, _ = run(durable_dsn, tmp_path / "log", GRANTS // 10)
    print(f"{len(tokens)} grants, {backwards(tokens)} backwards")
    assert backwards(tokens) > 0
