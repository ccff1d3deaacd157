"""Clients over HTTP, SQL and Python queue for the same locks, and the checkers of the robustness tests judge them."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable
from typing import Any

import httpx
import psycopg
import pytest

import dblock
from tests.dblock.server.conftest import Served
from tests.robustness.checkers import linearizability, queue_order, token_order
from tests.robustness.history.record import OK, History, Operation
from tests.robustness.traffic.workloads.queue import TICKETS
from tests.support.machine import measured

pytestmark = [pytest.mark.second_stage]

KINDS = ("http", "python", "sql")
TTL = 20.0
LEAST_SECONDS, MOST_SECONDS, LEAST_GRANTS = 8.0, 60.0, 20


class Traffic:
    """What the clients do, as the checkers read it."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.order = random.Random(7)
        self._began = time.monotonic()

    @property
    def continues(self) -> bool:
        took = time.monotonic() - self._began
        enough = min(self.grants(kind) for kind in KINDS) >= LEAST_GRANTS
        return took < LEAST_SECONDS or (took < MOST_SECONDS and not enough)

    def grants(self, kind: str) -> int:
        """Return how many grants clients of this kind have got."""
        return sum(one.kind == "acquire" and one.process.startswith(kind) for one in self.operations)

    def name(self) -> str:
        return self.order.choice(("x", "y"))

    def note(self, process: str, kind: str, key: str, called: float, **details: Any) -> None:
        self.operations.append(Operation(process, kind, key, called, time.monotonic(), OK, details))


async def over_http(traffic: Traffic, process: str, servers: list[Served], wait: float) -> None:
    """Acquire, renew and release, each at any server. With a short wait, continue with a ticket."""
    async with servers[0].client() as first, servers[1].client() as second:

        def client() -> httpx.AsyncClient:
            return traffic.order.choice((first, second))

        while traffic.continues:
            name, called, body = traffic.name(), time.monotonic(), {"ttl": TTL, "wait": wait}
            while (response := await client().post(f"/v1/locks/{name}", json=body)).status_code != 200:
                assert response.status_code == 202, response.text
                body = {**body, "ticket": response.json()["ticket"]}
            grant = response.json()
            traffic.note(process, "acquire", name, called, token=grant["token"], ttl=TTL)
            called = time.monotonic()
            assert (await client().put(f"/v1/leases/{grant['lease']}")).status_code == 200
            traffic.note(process, "renew", name, called, token=grant["token"], ttl=TTL)
            called = time.monotonic()
            assert (await client().delete(f"/v1/leases/{grant['lease']}")).status_code == 204
            traffic.note(process, "release", name, called, token=grant["token"], freed=True)


async def over_python(traffic: Traffic, process: str, dsn: str) -> None:
    async with dblock.AsyncClient(dsn) as client:
        while traffic.continues:
            name, called = traffic.name(), time.monotonic()
            lease = await client.lock(name, ttl=TTL).acquire(timeout=60)
            traffic.note(process, "acquire", name, called, token=lease.token, ttl=TTL)
            called = time.monotonic()
            freed = await lease.release()
            traffic.note(process, "release", name, called, token=lease.token, freed=freed is not False)


async def over_sql(traffic: Traffic, process: str, dsn: str) -> None:
    """Queue with the two statements that a script needs."""
    ask = "SELECT granted, token FROM dblock.acquire(%s, %s, attempt => %s, client => %s, had_ticket => %s)"
    client = uuid.uuid4()
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        while traffic.continues:
            name, called, attempt, granted, asked = traffic.name(), time.monotonic(), uuid.uuid4(), False, False
            while not granted:
                if asked:
                    await asyncio.sleep(traffic.order.random() * 0.02)
                cursor = await connection.execute(ask, [name, f"{TTL} s", attempt, client, asked])
                granted, token = (await cursor.fetchall())[0]
                asked = True
            traffic.note(process, "acquire", name, called, token=token, ttl=TTL)
            called = time.monotonic()
            await connection.execute("SELECT dblock.release(%s, %s, false)", [name, token])
            traffic.note(process, "release", name, called, token=token, freed=True)


def witnessed(owner: psycopg.Connection) -> list[Operation]:
    """Return what the database has recorded of its queues."""
    rows = owner.execute(
        "SELECT event, name, number, token, ticket, attempt::text, act::text FROM public.queue_witness ORDER BY number"
    ).fetchall()
    return [
        Operation("database", event, name, order, order, OK, {
            "order": order, "token": token, "ticket": ticket, "attempt": attempt, "act": act,
        })
        for event, name, order, token, ticket, attempt, act in rows
    ]  # fmt: skip


async def test_grants_over_http_sql_and_python_are_in_one_order(
    start_server: Callable[..., Served], dsn: str, owner: psycopg.Connection
) -> None:
    owner.execute(TICKETS)
    servers = [start_server(), start_server()]
    traffic = Traffic()
    with measured() as lateness:
        await asyncio.gather(
            *(over_http(traffic, f"http {n}", servers, 0.3 if n > 1 else 60) for n in range(4)),
            *(over_python(traffic, f"python {n}", dsn) for n in range(2)),
            *(over_sql(traffic, f"sql {n}", dsn) for n in range(2)),
        )
        # A waiter whose process stood still for three seconds may be passed over.
        stood_still = lateness() > 1
    for check, operations in (
        (linearizability.check, traffic.operations),
        (token_order.check, traffic.operations),
        (queue_order.check, [] if stood_still else witnessed(owner)),
    ):
        finding = check(History(operations))
        assert finding.checked > 20 or stood_still
        assert not finding.violations, finding.violations[:3]
    assert min(traffic.grants(kind) for kind in KINDS) >= LEAST_GRANTS
    assert owner.execute("SELECT FROM lock_tickets").fetchall() == [], "no ticket is left"
