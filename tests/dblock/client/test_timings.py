"""The timings of a client: one object, which reaches each of its parts."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

import dblock
from dblock._core import timings
from dblock._core.timings import Timings
from dblock.testing import AsyncMemoryClient, MemoryClient
from tests.support.eventually import eventually_async
from tests.support.facade import Clients
from tests.support.timings import timings_with

NOWHERE = "host=127.0.0.1 port=1 dbname=none"


class Watched:
    """Timings that count who reads them."""

    def __init__(self, default: Timings) -> None:
        self._default = default
        self.read: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.read.append(name)
        return getattr(self._default, name)


@pytest.mark.parametrize("presence", [0.15, None])
async def test_parts_of_a_client_read_only_its_own_timings(
    clients: Clients, owner: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, presence: float | None
) -> None:
    watched = Watched(timings.default)
    monkeypatch.setattr(timings, "default", watched)
    client, other = clients(presence=presence), clients(presence=presence)
    held = await client.lock("a").acquire()
    waiting = asyncio.create_task(other.lock("a").acquire())
    await eventually_async(lambda: owner.execute("SELECT FROM lock_tickets").fetchall(), "the ticket")
    await held.release()
    assert await (await waiting).release()
    assert await (await client.lock_all(["a", "b"]).acquire()).release()
    assert await (await client.lock_any(["a", "b"]).acquire()).release()
    assert await (await client.semaphore("s", permits=1).acquire()).release()
    assert await client.barrier("b", parties=1).wait() == 0
    assert await client.latch("l", count=1).count_down() == 0
    await clients.close()
    assert watched.read == []


@pytest.mark.parametrize("kind", [dblock.Client, dblock.AsyncClient])
def test_client_without_timings_uses_the_default_of_its_beginning(
    kind: type[dblock.Client] | type[dblock.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = timings.default
    older = kind(NOWHERE)
    replaced = timings_with(least_patience=20.0, connect_timeout=60)
    monkeypatch.setattr(timings, "default", replaced)
    newer = kind(NOWHERE)
    assert older._runtime.flows.timings is before
    assert newer._runtime.flows.timings is replaced
    assert "connect_timeout=60" in newer._runtime.settings.target.conninfo()


@pytest.mark.parametrize("kind", [dblock.Client, dblock.AsyncClient])
def test_connect_timeout_holds_for_calls_and_listener_unless_the_dsn_has_one(
    kind: type[dblock.Client] | type[dblock.AsyncClient],
) -> None:
    given = timings_with(connect_timeout=60)
    settings = kind(NOWHERE, listen_dsn=f"{NOWHERE} connect_timeout=7", timings=given)._runtime.settings
    assert "connect_timeout=60" in settings.target.conninfo()
    assert "connect_timeout=7" in settings.listen_target.conninfo()
    settings = kind(f"{NOWHERE} connect_timeout=7", listen_dsn=NOWHERE, timings=given)._runtime.settings
    assert "connect_timeout=7" in settings.target.conninfo()
    assert "connect_timeout=60" in settings.listen_target.conninfo()


@pytest.mark.parametrize("kind", [MemoryClient, AsyncMemoryClient])
def test_memory_client_takes_timings_too(kind: type[MemoryClient] | type[AsyncMemoryClient]) -> None:
    given = timings_with(heartbeat_interval=2.0)
    assert kind(timings=given)._runtime.flows.timings is given
