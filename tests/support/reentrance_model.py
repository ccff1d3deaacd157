"""Re-entrant locks beside a plain model: for each lock, its owner and the leases that are not released.

Three owners, threads or tasks, use two clients and two names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import psycopg
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import dblock
from tests.support.state_machines import Machine, picked, picks

T = TypeVar("T")

NAMES = ("a", "b")

names = st.sampled_from(NAMES)


class Actor:
    """A task that does what it is told. With synchronous clients it has a thread of its own."""

    def __init__(self) -> None:
        self._orders: asyncio.Queue[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]] = asyncio.Queue()
        self._task = asyncio.create_task(self._work())

    async def do(self, call: Callable[[], Awaitable[Any]]) -> Any:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._orders.put_nowait((call, reply))
        return await reply

    def end(self) -> None:
        self._task.cancel()

    async def _work(self) -> None:
        while True:
            call, reply = await self._orders.get()
            try:
                reply.set_result(await call())
            except Exception as error:
                reply.set_exception(error)


class Held:
    """What the model knows of one lock that is held."""

    def __init__(self, client: Any, actor: Actor, lease: Any) -> None:
        self.client = client
        self.actor = actor
        self.token: int = lease.token
        self.leases = [lease]


class Owners:
    """The clients and the actors of all runs of a test. The loop runs while a call is made."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clients: list[Any], connection: psycopg.Connection) -> None:
        self.loop, self.clients, self.connection = loop, clients, connection
        self.actors = self.run(self._new_actors())

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(call)

    async def _new_actors(self) -> list[Actor]:
        return [Actor() for _ in range(3)]

    def end(self) -> None:
        for actor in self.actors:
            actor.end()


class ReentranceMachine(Machine):
    def __init__(self, owners: Owners) -> None:
        super().__init__()
        self.owners = owners
        self.held: dict[str, Held] = {}
        self.over: list[Any] = []
        self.latest = 0

    def teardown(self) -> None:
        for mine in self.held.values():
            for lease in mine.leases:
                self.owners.run(lease.release())

    def compare(self) -> None:
        for name in NAMES:
            mine = self.held.get(name)
            assert self._token(name) == (mine.token if mine else None)
            assert all(lease.remaining() > 0 for lease in (mine.leases if mine else []))
        assert not any(lease.remaining() for lease in self.over)
        for client in self.owners.clients:
            if client._runtime.runner is not None:
                kept = client._runtime.keepalive.flow.schedule._states
                assert len(kept) == sum(lock.client is client for lock in self.held.values())

    def _token(self, name: str) -> int | None:
        query = "SELECT token FROM distributed_locks WHERE name = %s AND expires_at > clock_timestamp()"
        found = self.owners.connection.execute(query, [name]).fetchone()
        return int(found[0]) if found else None

    def _acquire(self, name: str, client: Any, actor: Actor, ttl: int) -> None:
        lock = client.lock(name, ttl=ttl, reentrant=True)
        mine = self.held.get(name)
        lease = self.owners.run(actor.do(lock.try_acquire))
        if mine is None:
            assert lease.token > self.latest
            self.latest = lease.token
            self.held[name] = Held(client, actor, lease)
        elif (mine.client, mine.actor) == (client, actor):
            assert lease.token == mine.token
            mine.leases.append(lease)
        else:
            assert lease is None, "the lock is held by another owner"

    @rule(name=names, client=picks, actor=picks, ttl=st.sampled_from([20, 60]))
    def acquire(self, name: str, client: int, actor: int, ttl: int) -> None:
        self._acquire(name, picked(self.owners.clients, client), picked(self.owners.actors, actor), ttl)

    @precondition(lambda self: self.held)
    @rule(pick=picks, ttl=st.sampled_from([20, 60]))
    def acquire_again(self, pick: int, ttl: int) -> None:
        name = picked([*self.held], pick)
        self._acquire(name, self.held[name].client, self.held[name].actor, ttl)

    @precondition(lambda self: self.held)
    @rule(pick=picks, which=picks, actor=picks)
    def release(self, pick: int, which: int, actor: int) -> None:
        """Any thread or task may release a lease."""
        name = picked([*self.held], pick)
        mine = self.held[name]
        lease = picked(mine.leases, which)
        mine.leases.remove(lease)
        assert self.owners.run(picked(self.owners.actors, actor).do(lease.release)) is True
        self.over.append(lease)
        if not mine.leases:
            del self.held[name]

    @precondition(lambda self: self.over)
    @rule(pick=picks, actor=picks)
    def release_again(self, pick: int, actor: int) -> None:
        lease = picked(self.over[-8:], pick)
        assert self.owners.run(picked(self.owners.actors, actor).do(lease.release)) is False

    @precondition(lambda self: self.held)
    @rule(pick=picks)
    def lose(self, pick: int) -> None:
        name = picked([*self.held], pick)
        self.owners.connection.execute(
            "UPDATE distributed_locks SET expires_at = clock_timestamp() WHERE name = %s", [name]
        )
        lost = self.held.pop(name).leases
        with pytest.raises(dblock.LeaseLost):
            self.owners.run(lost[0].renew())
        for lease in lost:
            assert lease.lost.reason == "expired"
            assert self.owners.run(lease.release()) is False
        self.over.extend(lost)
