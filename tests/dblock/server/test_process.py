"""The server as a program: it stops in time, its leases outlive it, and connections that break leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx
import psycopg
import pytest

import dblock
from tests.dblock.server.conftest import RECORD_GRANTS, Served
from tests.support.eventually import eventually, eventually_async
from tests.support.machine import measured

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


@pytest.mark.alone
async def test_sigterm_ends_fifty_long_polls_within_two_seconds(
    start_server: StartServer, owner: psycopg.Connection
) -> None:
    served = start_server()
    async with served.client() as client:
        await acquired(client, "a", ttl=60)
        polls = [asyncio.ensure_future(client.post("/v1/locks/a", json={"wait": 60})) for _ in range(50)]
        await eventually_async(lambda: waiters(owner, "a") >= 50, "fifty waiters")
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
        await eventually_async(lambda: waiters(owner, "a") >= 5, "five waiters")
        with owner.transaction(), measured() as lateness:
            owner.execute("LOCK TABLE lock_clients")
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
            await eventually_async(lambda: waiters(owner, "a"), "a waiter")
            poll.cancel()
            began = time.monotonic()
            await eventually_async(lambda: not waiters(owner, "a"), "an empty queue")
            assert time.monotonic() - began < 1 + 3 * lateness()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("requests", [200, pytest.param(1000, marks=pytest.mark.nightly)])
async def test_cut_sockets_make_no_second_grant_and_no_orphan(
    requests: int, start_server: StartServer, owner: psycopg.Connection
) -> None:
    """Each connection is cut at another moment, and its request is sent again with its key to the other server.

    Every tenth client does not come back.
    """
    owner.execute(RECORD_GRANTS)
    servers = [start_server(), start_server()]
    tokens: list[int] = []

    async def cut(served: Served, path: str, body: dict[str, Any], key: str, after: float) -> None:
        url, content = httpx.URL(served.address), json.dumps(body)
        _, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST {path} HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Idempotency-Key: {key}\r\nContent-Length: {len(content)}\r\n\r\n{content}".encode())
        await asyncio.sleep(after)
        writer.transport.abort()

    async def come_and_go(number: int, clients: list[httpx.AsyncClient]) -> None:
        leaves = number % 10 == 9
        path = f"/v1/locks/{f'left{number}' if leaves else f'lock{number % 5}'}"
        body, key = {"wait": 60, "ttl": 3 if leaves else 120}, f"key-{number}"
        for turn in range(3):
            await cut(servers[(number + turn) % 2], path, body, key, (number * 7 % 13 + turn) * 0.003)
        while not leaves:
            response = await clients[number % 2].post(path, json=body, headers={"Idempotency-Key": key})
            if response.status_code == 200:
                tokens.append(response.json()["token"])
                released = await clients[(number + 1) % 2].delete(f"/v1/leases/{response.json()['lease']}")
                assert released.status_code == 204
                break
            assert response.status_code in (202, 409), response.text

    async with servers[0].client() as first, servers[1].client() as second:
        for start in range(0, requests, 20):
            await asyncio.gather(*(come_and_go(number, [first, second]) for number in range(start, start + 20)))
    with measured() as lateness:
        began = time.monotonic()
        await eventually_async(lambda: not owner.execute("SELECT FROM list_locks()").fetchall(), "every lock is free")
        assert time.monotonic() - began < 3.5 + 3 * lateness(), "a lease outlasts its ttl"
    granted = owner.execute("SELECT token FROM public.grants WHERE name NOT LIKE 'left%'").fetchall()
    assert sorted(token for (token,) in granted) == sorted(tokens), "each key was granted once"
    assert len(tokens) == requests * 9 // 10
    twice = "SELECT name FROM public.grants WHERE name LIKE 'left%' GROUP BY name HAVING count(*) > 1"
    assert owner.execute(twice).fetchall() == []


def test_further_signals_do_not_change_the_exit_code(start_server: StartServer) -> None:
    """They come until the process has ended, because its handlers are removed before."""
    served = start_server()

    def ended() -> bool:
        served.process.send_signal(signal.SIGINT)
        served.process.send_signal(signal.SIGTERM)
        return served.process.poll() is not None

    eventually(ended, "the end of the server")
    assert served.process.returncode == 0
