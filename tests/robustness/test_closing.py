"""Clients that are closed in the middle of anything: no lock and no ticket stays.

Threads or tasks acquire and release locks of all kinds. Steps of the clients take a random time, so that a close meets
each of them before and after the others.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import dblock
from dblock._core.lease_state import LeaseState
from dblock._core.renewal import RenewalSchedule
from dblock._core.waiters import LocalWaiters
from dblock._runtime.keepalive import KeepAlive
from dblock._runtime.listener import Listener
from dblock._runtime.pool import AsyncPool, Pool
from dblock._runtime.runner import AsyncRunner, Runner
from dblock._runtime.runtime import ThreadRuntime
from tests.support.eventually import eventually_async
from tests.support.facade import AsyncClients, Clients

pytestmark = [pytest.mark.second_stage]

ROUNDS = 5
TTL = 600

STEPS_OF_THREADS: list[tuple[type, str]] = [
    (Pool, "take"),
    (Pool, "give"),
    (Pool, "close"),
    (Runner, "_call"),
    (Runner, "_connect"),
    (KeepAlive, "add"),
    (KeepAlive, "discard"),
    (KeepAlive, "close"),
    (LeaseState, "let_go"),
    (Listener, "close"),
    (Listener, "join_queue"),
    (LocalWaiters, "wake_all"),
    (RenewalSchedule, "add"),
    (RenewalSchedule, "discard"),
    (ThreadRuntime, "track"),
]

STEPS_OF_TASKS: list[tuple[type, str]] = [(AsyncPool, "take"), (AsyncRunner, "_call"), (AsyncRunner, "_connect")]


def delayed(step: Callable[..., Any], chance: random.Random) -> Callable[..., Any]:
    """Return a step that sometimes begins later."""

    def pause() -> float:
        return chance.choice([0.0005, 0.003, 0.02, 0.1]) if chance.random() < 0.2 else 0.0

    @functools.wraps(step)
    def in_thread(*args: Any, **options: Any) -> Any:
        time.sleep(pause())
        return step(*args, **options)

    @functools.wraps(step)
    async def in_task(*args: Any, **options: Any) -> Any:
        await asyncio.sleep(pause())
        return await step(*args, **options)

    return in_task if inspect.iscoroutinefunction(step) else in_thread


def request(client: Any, chance: random.Random) -> Any:
    """Return a request for some lock."""
    names = chance.sample("abc", 2)
    kind = chance.choice(["lock", "lock_all", "lock_any", "read_lock", "write_lock", "semaphore"])
    if kind == "semaphore":
        return client.semaphore("s", permits=2, ttl=TTL)
    if kind in ("read_lock", "write_lock"):
        return getattr(client, kind)("r", ttl=TTL)
    return getattr(client, kind)(names if kind != "lock" else names[0], ttl=TTL)


async def work(client: Any, chance: random.Random) -> None:
    """Acquire and release locks until the client is closed. Some leases are forgotten, and refuse an upgrade."""
    while True:
        try:
            lease = await request(client, chance).acquire(chance.choice([0, 0.01, 0.2, None]))
        except (dblock.LockTimeout, dblock.DeadlockDetected, dblock.UpgradeRefused):
            continue
        await asyncio.sleep(chance.choice([0, 0.001, 0.02]))
        if chance.random() < 0.9:
            await lease.release()


async def close_in_the_middle(clients: Clients, chance: random.Random, cancels: bool) -> None:
    """Let five workers of two clients contend, and close the clients."""
    options = {} if chance.random() < 0.5 else {"presence": None}
    pair = [clients(**options), clients(**options)]
    workers = [asyncio.ensure_future(work(pair[number % 2], random.Random(chance.random()))) for number in range(5)]
    await asyncio.sleep(chance.choice([0.01, 0.05, 0.3, 0.6]))
    if cancels and chance.random() < 0.4:
        for worker in chance.sample(workers, 3):
            worker.cancel()
    for client in pair:
        await client.close()
    for worker in workers:
        with pytest.raises((dblock.ClientClosed, asyncio.CancelledError)):
            await asyncio.wait_for(worker, 60)


@pytest.mark.filterwarnings("ignore:.*was not released:ResourceWarning")
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 100))]
)
async def test_client_closed_in_the_middle_of_anything_leaves_nothing(
    clients: Clients, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance, are_tasks = random.Random(seed), isinstance(clients, AsyncClients)
    for part, step in STEPS_OF_TASKS if are_tasks else STEPS_OF_THREADS:
        monkeypatch.setattr(part, step, delayed(getattr(part, step), chance))
    stays = (
        "SELECT name FROM distributed_locks WHERE expires_at > clock_timestamp()"
        " UNION ALL SELECT 'a ticket for ' || name FROM lock_tickets"
    )
    for number in range(ROUNDS):
        await close_in_the_middle(clients, chance, cancels=are_tasks)
        await eventually_async(
            lambda: not owner.execute(stays).fetchall(), f"everything is free and nothing waits after round {number}"
        )
