"""The Lock of kazoo, on ZooKeeper."""

from __future__ import annotations

import logging

from bench.harness.contender import TTL, Release


class Kazoo:
    """kazoo.recipe.lock.Lock. The session's timeout is its ttl."""

    def __init__(self, where: str, *, ttl: float = TTL) -> None:
        from kazoo.client import KazooClient

        logging.getLogger("kazoo").setLevel(logging.CRITICAL)
        self._client = KazooClient(hosts=where, timeout=ttl)
        self._client.start()

    def acquire(self, name: str) -> Release:
        lock = self._client.Lock(f"/locks/{name.replace('/', '_')}")
        assert lock.acquire()
        return lock.release  # type: ignore[no-any-return]

    def close(self) -> None:
        self._client.stop()
        self._client.close()
