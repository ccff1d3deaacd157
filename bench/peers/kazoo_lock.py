"""The Lock of kazoo, on ZooKeeper."""

from __future__ import annotations

import logging
from typing import Any

from bench.harness.contender import TTL, Release


class Kazoo:
    """kazoo.recipe.lock.Lock. The session's timeout is its ttl."""

    def __init__(self, where: str, *, ttl: float = TTL) -> None:
        from kazoo.client import KazooClient

        logging.getLogger("kazoo").setLevel(logging.CRITICAL)
        self._client = KazooClient(hosts=where, timeout=ttl)
        self._client.start()

    def acquire(self, name: str) -> Release:
        return self._acquired(self._client.Lock(f"/locks/{name}"))

    def _acquired(self, lock: Any) -> Release:
        assert lock.acquire()
        return lock.release  # type: ignore[no-any-return]

    def close(self) -> None:
        self._client.stop()
        self._client.close()


class KazooReadLock(Kazoo):
    """kazoo.recipe.lock.ReadLock."""

    def acquire(self, name: str) -> Release:
        return self._acquired(self._client.ReadLock(f"/shared/{name}"))


class KazooWriteLock(Kazoo):
    """kazoo.recipe.lock.WriteLock."""

    def acquire(self, name: str) -> Release:
        return self._acquired(self._client.WriteLock(f"/shared/{name}"))


class KazooSemaphore(Kazoo):
    """kazoo.recipe.lock.Semaphore, of four leases."""

    def acquire(self, name: str) -> Release:
        return self._acquired(self._client.Semaphore(f"/semaphores/{name}", max_leases=4))


class KazooElection(Kazoo):
    """The lock inside kazoo.recipe.election.Election, whose `run` is a loop around it."""

    def acquire(self, name: str) -> Release:
        return self._acquired(self._client.Election(f"/elections/{name}").lock)
