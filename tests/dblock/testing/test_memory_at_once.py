"""The short way for a free lock in memory does what the usual way does."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from typing import Any

import pytest

import dblock
from dblock.testing import AsyncMemoryClient, Clock, MemoryClient, MemoryDatabase


class Steps:
    """Two clients that take random steps on two locks, and what they see."""

    def __init__(self, seed: int) -> None:
        self.database = MemoryDatabase()
        self.seen: list[Any] = []
        self._chance = random.Random(seed)
        self._clients = [MemoryClient(self.database, holder=name) for name in "xy"]
        self._leases: list[dblock.Lease] = []

    def step(self) -> None:
        """Take a step, and note the result and the state of the tables."""
        client, name = self._chance.choice(self._clients), self._chance.choice("ab")
        options: dict[str, Any] = {
            "ttl": self._chance.choice([1, 30]),
            "keep_alive": self._chance.random() < 0.8,
            "fair": self._chance.random() < 0.8,
            "meta": self._chance.choice([None, {"n": len(self.seen)}]),
        }
        what = self._chance.choices(["try", "acquire", "release", "tick", "force", "loss"], [4, 3, 6, 2, 1, 1])[0]
        result: Any = None
        if what == "try":
            result = self._took(client.lock(name, **options).try_acquire())
        elif what == "acquire":
            try:
                result = self._took(client.lock(name, timeout=2, **options).acquire())
            except (dblock.LockTimeout, dblock.DeadlockDetected) as error:
                result = str(error)
        elif what == "release" and self._leases:
            result = self._leases.pop(self._chance.randrange(len(self._leases))).release()
        elif what == "tick":
            self.database.clock.tick(self._chance.choice([0.01, 0.3, 2, 20]))
        elif what == "force":
            row = self.database.store.tables.rows.get(name)
            result = row is not None and self.database.store.force_release(name, row.token, self._chance.random() < 0.5)
        lost = [(lease.lost.reason, lease.remaining()) for lease in self._leases]
        self.seen.append((what, result, lost, self.database.clock(), self._tables()))

    def _took(self, lease: dblock.Lease | None) -> Any:
        if lease is None:
            return None
        self._leases.append(lease)
        return lease.token, lease.expires_at, lease.trusted_until, repr(lease)

    def _tables(self) -> list[Any]:
        """Return the rows without the names of the requests, which are random."""
        tables = self.database.store.tables
        rows = [dataclasses.replace(row, attempt=row.attempt and "a request") for row in tables.rows.values()]
        return [*rows, *(len(line) for line in tables.tickets.values())]

    def close(self) -> None:
        for client in self._clients:
            client.close()


@pytest.mark.parametrize("seed", range(3))
def test_short_way_and_usual_way_see_the_same(seed: int) -> None:
    short, usual = Steps(seed), Steps(seed)
    usual.database.intercept = lambda call: None
    for _ in range(400):
        short.step()
        usual.step()
        assert short.seen[-1] == usual.seen[-1]
    assert short.database.attempts > 50
    assert usual.database.store.tables.sequence == short.database.store.tables.sequence
    short.close()
    usual.close()


def calls_of(client: MemoryClient) -> int:
    """Return how many grants of a pair came the short way."""
    before = client.database.attempts
    lease = client.lock("a").acquire()
    assert lease.release() is True
    return client.database.attempts - before


def test_usual_way_is_taken_for_logs_observers_and_clocks_of_threads(caplog: pytest.LogCaptureFixture) -> None:
    with MemoryClient() as client:
        assert [calls_of(client), calls_of(client)] == [1, 1]
        with caplog.at_level(logging.DEBUG, "dblock"):
            assert calls_of(client) == 0
        assert [record.getMessage().split(",")[0] for record in caplog.records] == [
            "lock 'a': acquiring",
            "lock 'a': granted",
            "lock 'a': released",
        ]
    with MemoryClient(clock=Clock(auto=False)) as client:
        assert isinstance(client.lock("a"), dblock.Lock)
        calls_of(client)


def test_closed_client_takes_nothing_the_short_way() -> None:
    client = MemoryClient()
    lock = client.lock("a")
    lock.acquire().release()
    lease = lock.acquire()
    client.close()
    assert lease.release() is False
    with pytest.raises(dblock.ClientClosed):
        lock.acquire()


def test_async_client_of_another_event_loop_is_refused() -> None:
    client = AsyncMemoryClient()
    lock = client.lock("a")

    async def pair() -> dblock.AsyncLease:
        await (await lock.acquire()).release()
        return await lock.acquire()

    lease = asyncio.run(pair())
    for call in (lambda: lock.try_acquire(), lambda: lock.acquire(), lambda: lease.release()):

        async def elsewhere(call: Any = call) -> None:
            with pytest.raises(dblock.DblockError, match="another event loop"):
                await call()

        asyncio.run(elsewhere())
    asyncio.run(client.close())
