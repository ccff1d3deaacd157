"""The server as a program: it stops in time, its leases outlive it, and its grants are in one order with all others."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx
import psycopg
import pytest

import dblock
from tests.dblock.server.conftest import Served
from tests.robustness.checkers import linearizability, token_order
from tests.robustness.history.record import OK, History, Operation
from tests.support.machine import measured
from tests.support.shell import until

pytestmark = pytest.mark.second_stage

StartServer = Callable[..., Served]


async def acquired(client: httpx.AsyncClient, name: str, **asked: Any) -> dict[str, Any]:
    response = await client.post(f"/v1/locks/{name}", json=asked)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def waiters(owner: psycopg.Connection, name: str) -> int:
    ((found,),) = owner.execute("SELECT json_array_length(queue(%s))", [name]).fetchall()
    return int(found)


async def test_sigterm_ends_fifty_long_polls_within_two_seconds(
    start_server: StartServer, owner: psycopg.Connection
) -> None:
    served = start_server()
    async with served.client() as client:
        await acquired(client, "a", ttl=60)
        polls = [asyncio.ensure_future(client.post("/v1/locks/a", json={"wait": 60})) for _ in range(50)]
        while waiters(owner, "a") < 50:
            await asyncio.sleep(0.05)
        with measured() as lateness:
            began = time.monotonic()
            served.process.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(served.process.wait, 30)
            assert time.monotonic() - began < 2 + 3 * lateness()
        assert code == 0
        answers = await asyncio.gather(*polls)
    assert {answer.status_code for answer in answers} == {202}
    assert waiters(owner, "a") == 50, "every ticket keeps its position"


async def test_sigterm_ends_a_server_whose_database_does_not_reply(
    start_server: StartServer, owner: psycopg.Connection
) -> None:
    """Neither can a ticket be parked, nor can the server tell the database that it ends."""
    served = start_server()
    async with served.client() as client:
        await acquired(client, "a", ttl=60)
        polls = [asyncio.ensure_future(client.post("/v1/locks/a", json={"wait": 60})) for _ in range(5)]
        while waiters(owner, "a") < 5:
            await asyncio.sleep(0.05)
        with owner.transaction(), measured() as lateness:
            owner.execute("LOCK TABLE lock_tickets, lock_clients")
            began = time.monotonic()
            served.process.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(served.process.wait, 30)
            assert time.monotonic() - began < 2 + 3 * lateness()
        assert code == 0
        await asyncio.gather(*polls, return_exceptions=True)


async def test_leases_outlive_a_killed_server_and_another_renews_them(
    start_server: StartServer, owner: psycopg.Connection
) -> None:
    first = start_server()
    async with first.client() as client:
        grants = [await acquired(client, f"lock{number}", ttl=20) for number in range(5)]
    first.process.kill()
    first.process.wait()
    held = "SELECT name, token FROM list_locks()"
    assert owner.execute(held).fetchall() == [(grant["lock"], grant["token"]) for grant in grants]
    async with start_server().client() as client:
        for grant in grants:
            renewed = await client.put(f"/v1/leases/{grant['lease']}", json={"ttl": 60})
            assert (renewed.status_code, renewed.json()["token"]) == (200, grant["token"])
        assert (await client.delete(f"/v1/leases/{grants[0]['lease']}")).status_code == 204
    assert len(owner.execute(held).fetchall()) == 4


async def test_lease_of_a_killed_server_ends_with_its_ttl(start_server: StartServer, client: dblock.Client) -> None:
    served = start_server()
    with measured() as lateness:
        async with served.client() as http:
            began = time.monotonic()
            await acquired(http, "a", ttl=4)
            told = time.monotonic()
        served.process.kill()
        await asyncio.to_thread(client.lock("a").acquire, 30)
        assert time.monotonic() - began >= 4, "the lease was not taken from its holder before its deadline"
        assert time.monotonic() - told < 4.5 + 3 * lateness()


async def test_client_whose_connection_breaks_leaves_the_queue(
    start_server: StartServer, owner: psycopg.Connection
) -> None:
    served = start_server()
    async with served.client() as client:
        await acquired(client, "a", ttl=60)
        with measured() as lateness:
            poll = asyncio.ensure_future(client.post("/v1/locks/a", json={"wait": 60}))
            while not waiters(owner, "a"):
                await asyncio.sleep(0.02)
            poll.cancel()
            began = time.monotonic()
            while waiters(owner, "a"):
                await asyncio.sleep(0.02)
            assert time.monotonic() - began < 1 + 3 * lateness()


async def test_grants_over_http_sql_and_python_are_in_one_order(start_server: StartServer, dsn: str) -> None:
    """Each kind of client acquires, believes, renews and releases, and the checkers of the robustness tests judge."""
    operations: list[Operation] = []
    names, until_ = ("x", "y"), time.monotonic() + 8
    order = random.Random(7)

    def note(process: str, kind: str, key: str, called: float, **details: Any) -> None:
        operations.append(Operation(process, kind, key, called, time.monotonic(), OK, details))

    async def over_http(process: str, address: str, resumes: bool) -> None:
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:
            while time.monotonic() < until_:
                name, called, body = order.choice(names), time.monotonic(), {"ttl": 5.0, "wait": 0.3 if resumes else 10}
                while True:
                    response = await client.post(f"/v1/locks/{name}", json=body)
                    if response.status_code == 200:
                        break
                    assert response.status_code == 202, response.text
                    body = {**body, "ticket": response.json()["ticket"]}
                grant = response.json()
                note(process, "acquire", name, called, token=grant["token"], ttl=5.0)
                called = time.monotonic()
                assert (await client.put(f"/v1/leases/{grant['lease']}")).status_code == 200
                note(process, "renew", name, called, token=grant["token"], ttl=5.0)
                called = time.monotonic()
                assert (await client.delete(f"/v1/leases/{grant['lease']}")).status_code == 204
                note(process, "release", name, called, token=grant["token"], freed=True)

    async def over_python(process: str) -> None:
        async with dblock.AsyncClient(dsn) as client:
            while time.monotonic() < until_:
                name, called = order.choice(names), time.monotonic()
                lease = await client.lock(name, ttl=5).acquire(timeout=30)
                note(process, "acquire", name, called, token=lease.token, ttl=5.0)
                called = time.monotonic()
                freed = await lease.release()
                note(process, "release", name, called, token=lease.token, freed=freed is not False)

    async def over_sql(process: str) -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            while time.monotonic() < until_:
                name, called = order.choice(names), time.monotonic()
                cursor = await connection.execute("SELECT granted, token FROM dblock.try_acquire(%s, '5 s')", [name])
                granted, token = (await cursor.fetchall())[0]
                if granted:
                    note(process, "acquire", name, called, token=token, ttl=5.0)
                    called = time.monotonic()
                    await connection.execute("SELECT dblock.release(%s, %s, false)", [name, token])
                    note(process, "release", name, called, token=token, freed=True)
                await asyncio.sleep(order.random() * 0.02)

    servers = [start_server(), start_server()]
    await asyncio.gather(
        *(over_http(f"http {n}", servers[n % 2].address, n > 1) for n in range(4)),
        *(over_python(f"python {n}") for n in range(2)),
        *(over_sql(f"sql {n}") for n in range(2)),
    )
    history = History(operations)
    counts = {kind: sum(one.process.startswith(kind) for one in history.of("acquire")) for kind in ("http", "python")}
    assert min(counts.values()) > 10, counts
    for check in (linearizability.check, token_order.check):
        finding = check(history)
        assert finding.checked > 20
        assert not finding.violations, finding.violations[:3]


def test_further_signals_do_not_disturb_the_end(start_server: StartServer) -> None:
    """They come until the process has ended, because its handlers are removed before."""
    served = start_server()

    def ended() -> bool:
        served.process.send_signal(signal.SIGINT)
        served.process.send_signal(signal.SIGTERM)
        return served.process.poll() is not None

    until(ended)
    assert served.process.returncode == 0
