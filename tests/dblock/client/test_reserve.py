"""The second connection of a client whose leases are tied to a presence: the end of one session costs no lease."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from dblock._runtime.target import Target
from tests.dblock.client.test_home import (  # noqa: F401
    ONE,
    connections,
    full,
    generous,
    inner,
    only_home,
    quick,
    renewed,
    watched,
)
from tests.support.eventually import eventually_async
from tests.support.facade import Clients

GRACE = 6.0
"""Longer than the default, so that a busy machine has no part in the outcome."""


def lasts_after(seconds: float, clients: Clients) -> None:
    """Let a lease of clients that are opened from now on count as lasting after so many seconds."""
    clients.timings = replace(clients.timings, lasting=seconds, lasting_in_loop=seconds)


@pytest.fixture(autouse=True)
def soon(clients: Clients) -> None:
    lasts_after(0.1, clients)
    clients.timings = replace(clients.timings, reserved_for=0.1)


async def tied(client: Any, lease: Any) -> Any:
    """Return the presence of the client once the database knows that the lease is tied to it."""
    flows, state = inner(client).flows, lease._state
    await eventually_async(lambda: flows.presence and state.presence is flows.presence and not state.unreachable)
    return flows.presence


def has_reserve(client: Any) -> bool:
    return bool(inner(client).listener._keepalive_runner._pool.has_idle)


@pytest.mark.second_stage
@pytest.mark.usefixtures("quick")
async def test_holder_with_presence_keeps_a_second_connection_until_it_is_idle(
    clients: Clients, owner: psycopg.Connection
) -> None:
    client = watched(clients, presence=GRACE)
    lease = await client.lock("a", ttl=3).acquire()
    await tied(client, lease)
    await eventually_async(lambda: has_reserve(client) and connections(owner) == 2)
    await renewed(lease, times=2)
    assert connections(owner) == 2
    assert await lease.release()
    await only_home(client, owner)


@pytest.mark.usefixtures("quick", "generous")
async def test_lease_over_the_only_connection_opens_a_second_one(clients: Clients, owner: psycopg.Connection) -> None:
    lasts_after(1000.0, clients)
    client = watched(clients, presence=GRACE)
    assert await (await client.lock("a").acquire()).release()
    await only_home(client, owner)
    lease = await client.lock("a").acquire()
    await eventually_async(lambda: connections(owner) == 2)
    await asyncio.sleep(0.5)  # more than the quiet time
    assert connections(owner) == 2
    assert await lease.release()


@pytest.mark.second_stage
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("lasting", [True, False])
async def test_end_of_the_presence_on_a_full_server_costs_no_lease(
    clients: Clients,
    owner: psycopg.Connection,
    full: Callable[[], None],  # noqa: F811
    lasting: bool,
) -> None:
    if not lasting:
        lasts_after(1000.0, clients)
    client = watched(clients, presence=GRACE)
    lease = await client.lock("a", ttl=60).acquire()
    presence = await tied(client, lease)
    await eventually_async(lambda: connections(owner) == 2 and has_reserve(client) == lasting)
    full()
    owner.execute("SELECT pg_terminate_backend(session) FROM lock_presence WHERE presence = %s", [presence.name])
    await eventually_async(lambda: presence.ended)  # it was withdrawn over the second connection
    lease.raise_if_lost()
    assert await lease.release()


@pytest.mark.usefixtures("quick")
async def test_renewal_does_not_wait_for_a_reserve_that_is_slow_to_open(
    clients: Clients, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = watched(clients, patience=60)
    await client.lock("a").acquire()
    home = await only_home(client, owner)
    runner, opens, connect = inner(client).listener._keepalive_runner, threading.Event(), Target.connect

    def connect_late(target: Target) -> Any:
        opens.wait(60)
        return connect(target)

    monkeypatch.setattr(Target, "connect", connect_late)
    runner._begin(runner._open_own)
    await eventually_async(lambda: runner._pool.in_use)
    try:
        with home.lock:
            renewing = asyncio.create_task(asyncio.to_thread(runner.perform, ONE))
            await eventually_async(lambda: home._renewals)
        assert await asyncio.wait_for(renewing, 20) == ONE.args
    finally:
        opens.set()
