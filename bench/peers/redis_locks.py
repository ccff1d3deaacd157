"""The Lock of redis-py, which polls every 0.1 s by default, and python-redis-lock, which is woken by a push."""

from __future__ import annotations

from bench.harness.contender import TTL, AsyncRelease, Release


class RedisPy:
    """redis.lock.Lock, with its defaults."""

    def __init__(self, where: str, *, ttl: float = TTL) -> None:
        import redis

        self._client, self._ttl = redis.Redis.from_url(where), ttl

    def acquire(self, name: str) -> Release:
        lock = self._client.lock(name, timeout=self._ttl)
        assert lock.acquire()
        return lock.release  # type: ignore[no-any-return]

    def close(self) -> None:
        self._client.close()


class AsyncRedisPy:
    """redis.asyncio.lock.Lock, with its defaults."""

    def __init__(self, where: str, *, ttl: float = TTL) -> None:
        import redis.asyncio

        self._client, self._ttl = redis.asyncio.Redis.from_url(where), ttl

    async def acquire(self, name: str) -> AsyncRelease:
        lock = self._client.lock(name, timeout=self._ttl)
        assert await lock.acquire()
        return lock.release

    async def close(self) -> None:
        await self._client.aclose()


class PythonRedisLock:
    """redis_lock.Lock. It waits by BLPOP, so each waiter has a connection of its own."""

    def __init__(self, where: str, *, ttl: float = TTL, renewed: bool = False) -> None:
        import redis
        import redis_lock

        # redis-py gives up a reply after 5 s by default, and so a wait.
        self._client = redis.Redis.from_url(where, socket_timeout=None)
        self._ttl, self._make = int(ttl), redis_lock.Lock
        self._renewed = renewed

    def acquire(self, name: str) -> Release:
        lock = self._make(self._client, name, expire=self._ttl, auto_renewal=self._renewed)
        assert lock.acquire()
        return lock.release  # type: ignore[no-any-return]

    def close(self) -> None:
        self._client.close()
