"""dblock, as its README shows: `client.lock(name)` for each acquisition."""

from __future__ import annotations

from typing import Any

from psycopg import conninfo

import dblock
from bench.harness.contender import PATIENCE, TTL, AsyncRelease, Release


def patient(where: str) -> str:
    """Return the address with a longer time to connect, for a machine that starts many clients at once."""
    return conninfo.make_conninfo(where, connect_timeout=60)


class Dblock:
    """A Client."""

    def __init__(self, where: str, *, durable: bool = True, ttl: float = TTL, **options: Any) -> None:
        self.client = dblock.Client(patient(where), **{"patience": PATIENCE, **options})
        self._durable, self._ttl = durable, ttl

    def acquire(self, name: str) -> Release:
        if self._durable:
            return self.client.lock(name, ttl=self._ttl).acquire().release
        return self.client.efficiency_lock(name, ttl=self._ttl).acquire().release

    def close(self) -> None:
        self.client.close()


class KeptLock(Dblock):
    """A Client whose Lock objects are kept and used again."""

    def __init__(self, where: str, **options: Any) -> None:
        super().__init__(where, **options)
        self._locks: dict[str, dblock.Lock[Any]] = {}

    def acquire(self, name: str) -> Release:
        if name not in self._locks:
            self._locks[name] = self.client.lock(name, ttl=self._ttl)
        lease = self._locks[name].acquire()
        return lease.release  # type: ignore[no-any-return]


class AsyncDblock:
    """An AsyncClient."""

    def __init__(self, where: str, *, durable: bool = True, ttl: float = TTL, **options: Any) -> None:
        self.client = dblock.AsyncClient(patient(where), **{"patience": PATIENCE, **options})
        self._durable, self._ttl = durable, ttl

    async def acquire(self, name: str) -> AsyncRelease:
        if self._durable:
            return (await self.client.lock(name, ttl=self._ttl).acquire()).release
        return (await self.client.efficiency_lock(name, ttl=self._ttl).acquire()).release

    async def close(self) -> None:
        await self.client.close()
