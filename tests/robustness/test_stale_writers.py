"""A holder is stopped past its lease, another client takes over, and the first one resumes and writes.

This is what fencing tokens are for. Real processes and SIGSTOP show it for each kind of resource, and once without the
fence, to prove that the stale write would do harm.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

import dblock
from fenced_store import FencedStore, StaleTokenError
from tests.support import isolation
from tests.support.backends import TABLE
from tests.support.databases import Databases
from tests.support.machine import UNSAFE
from tests.support.mutants import altered_fence
from tests.support.paused_holder import KINDS, Resources
from tests.support.s3 import new_bucket, running_s3
from tests.support.service import running_service
from tests.support.stages import first
from tests.support.warm_start import Program

AT_ONCE = 5
TTL = 0.6


class Holders:
    """Processes that hold locks and can be stopped."""

    def __init__(self, dsn: str, where: dict[str, str]) -> None:
        root = Path(__file__).parents[2]
        self._processes = [
            Program(
                [sys.executable, "-m", "tests.support.paused_holder", dsn, json.dumps(where)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=root,
            )
            for _ in range(AT_ONCE)
        ]

    def send(self, messages: list[dict[str, Any]]) -> None:
        for process, message in zip(self._processes, messages, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()

    def receive(self) -> list[dict[str, Any]]:
        return [json.loads(process.stdout.readline()) for process in self._processes]  # type: ignore[union-attr]

    def signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(20)
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture(scope="module")
def environment(
    databases: Databases, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Holders, Resources]]:
    """Yield a database, an S3 server, a folder, a service and holders for all tests of this module, because they take
    time to start.
    """
    with (
        databases.taken(waiters_stay=False) as dsn,
        running_s3() as s3,
        running_service(dsn) as http,
    ):
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(TABLE.format("things").encode())
        files = str(tmp_path_factory.mktemp("files"))
        where = {"s3": s3, "bucket": new_bucket(s3), "files": files, "http": http}
        holders, resources = Holders(dsn, where), Resources(dsn, where)
        yield dsn, holders, resources
        holders.close()
        resources.close()


def take_over_and_resume(
    environment: tuple[str, Holders, Resources], kind: str, fenced: bool, writes: bool, claims: bool, label: str
) -> tuple[list[str], list[Any], list[str]]:
    """Return the results of the stopped holders, the final values, and the values that the next holders wrote.

    The resources belong to the module, and keep their connections.
    """
    with isolation.kept():
        return _take_over_and_resume(environment, kind, fenced, writes, claims, label)


def _take_over_and_resume(
    environment: tuple[str, Holders, Resources], kind: str, fenced: bool, writes: bool, claims: bool, label: str
) -> tuple[list[str], list[Any], list[str]]:
    dsn, holders, resources = environment
    names = [f"{label}_{number}" for number in range(AT_ONCE)]
    resources.prepare(kind, names, fenced)
    holders.send([{"kind": kind, "name": name, "fenced": fenced, "ttl": TTL} for name in names])
    tokens = [results["token"] for results in holders.receive()]
    holders.signal(signal.SIGSTOP)
    should_be = []
    with dblock.Client(dsn) as client:
        for name, token in zip(names, tokens, strict=True):
            wanted = resources.claims(kind, name) if claims else []
            lease = client.lock(f"{kind} {name}", claims=wanted).acquire(timeout=20)
            assert lease.token > token
            if writes:
                resources.write(kind, name, lease, f"new {lease.token}", fenced)
            should_be.append(f"new {lease.token}" if writes else "start")
        holders.send([{}] * AT_ONCE)
        holders.signal(signal.SIGCONT)
        results = [one["outcome"] for one in holders.receive()]
    return results, [resources.read(kind, name, fenced) for name in names], should_be


ORDER = sorted(KINDS, key=lambda kind: kind not in ("row", "http"))
"""The kinds of resource, those first that have the least in common."""

HOW = pytest.mark.parametrize("how", first(1, ["claim alone", "first write"]))


@HOW
@pytest.mark.parametrize("kind", first(0, ORDER))
@pytest.mark.parametrize("rounds", [1, pytest.param(40, marks=pytest.mark.nightly)])
def test_stale_write_is_refused_every_time(
    environment: tuple[str, Holders, Resources], kind: str, how: str, rounds: int
) -> None:
    for number in range(rounds):
        label = f"{kind[:3]}{how[:1]}{rounds}_{number}"
        results, found, should_be = take_over_and_resume(
            environment, kind, True, how == "first write", how == "claim alone", label
        )
        assert results == ["stale"] * AT_ONCE, UNSAFE
        assert found == should_be, UNSAFE


@pytest.mark.second_stage
@pytest.mark.parametrize("kind", first(1, ORDER))
def test_stale_writer_without_a_fence_does_harm(environment: tuple[str, Holders, Resources], kind: str) -> None:
    if kind == "key":
        environment[2]._raw.execute("CREATE TABLE IF NOT EXISTS keys (id text PRIMARY KEY, v text)")
    results, found, should_be = take_over_and_resume(environment, kind, False, True, False, f"{kind[:3]}_bare")
    assert results == ["written"] * AT_ONCE
    assert all(value != wanted and value.startswith("stale") for value, wanted in zip(found, should_be, strict=True))


WRITERS = 16


def shuffled_writes(dsn: str, total: int) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]], Any]:
    """Send (token, write number) pairs from several writers in any order, some twice.

    Return the accepted writes as (version, token, number), all pairs that were sent, and the final value.
    """
    tokens = total // 10
    pairs = [(token, number) for token in range(1, tokens + 1) for number in range(1, 11)]
    random.shuffle(pairs)
    # In random order, but rising overall, so that more than the first few are accepted.
    pairs.sort(key=lambda pair: pair[0] + random.gauss(0, 2))
    accepted: list[tuple[int, int, int]] = []

    def write(writer: int) -> None:
        # All of them wait for one key, and Postgres does not serve them in order.
        with FencedStore(dsn, history=0, writer=f"writer {writer}", patience=120) as store:
            for token, number in pairs[writer::WRITERS]:
                for _ in range(random.choice([1, 1, 1, 2])):
                    try:
                        stored = store.put("k", f"{token}.{number}", fence=token, write=number)
                    except StaleTokenError:
                        continue
                    if not stored.repeated:
                        accepted.append((stored.version, token, number))

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, range(WRITERS)))
    with FencedStore(dsn) as store:
        last = store.get("k")
    return sorted(accepted), pairs, last


def check(accepted: list[tuple[int, int, int]], pairs: list[tuple[int, int]], last: Any) -> None:
    assert [version for version, _, _ in accepted] == list(range(1, len(accepted) + 1)), "a write was stored twice"
    order = [(token, number) for _, token, number in accepted]
    assert order == sorted(set(order)), "accepted pairs do not strictly rise"
    assert order[-1] == max(pairs)
    assert last.value == "{}.{}".format(*max(pairs))


@pytest.mark.parametrize(
    "total", [500, *first(0, [3000]), pytest.param(50_000, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])]
)
def test_fence_orders_the_writes_of_sixteen_writers_with_shuffled_tokens(dsn: str, total: int) -> None:
    accepted, pairs, last = shuffled_writes(dsn, total)
    check(accepted, pairs, last)
    assert len(accepted) > total / 50, "too few were accepted for this to prove much"


@pytest.mark.second_stage
def test_stale_writer_run_catches_a_fence_that_accepts_lower_tokens(dsn: str, owner: psycopg.Connection) -> None:
    wrong = altered_fence(
        "20_write.sql",
        "(excluded.token, excluded.write_number) > (f.token, f.write_number)",
        "(excluded.token, excluded.write_number) >= (f.token - 20, 0)",
    )
    with owner.transaction():
        owner.execute("SET LOCAL search_path TO fenced_store, pg_temp")
        owner.execute(wrong.encode())
    with pytest.raises(AssertionError):
        check(*shuffled_writes(dsn, 3000))
