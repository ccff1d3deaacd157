"""Put both kinds of client behind one interface, so that each test is written once.

A test awaits every call that does I/O. An asynchronous client is awaited directly. Each call of a synchronous client
runs in a thread. Each task of the test has one thread, so that the calls come as from a program with that many threads.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import pytest

import dblock
from dblock._core.effects import Call
from dblock._core.timings import Timings
from dblock._runtime.call_retry import CallRetry
from dblock._runtime.keepalive_runner import KeepAliveRunner
from dblock._runtime.runner import AsyncRunner, Runner
from dblock._runtime.target import Target
from dblock.several import LockAll, LockAny
from tests.support.timings import timings_with

_LOCAL = {
    "lock",
    "efficiency_lock",
    "read_lock",
    "write_lock",
    "semaphore",
    "barrier",
    "latch",
    "lock_all",
    "lock_any",
    "remaining",
    "raise_if_lost",
    "on_lost",
    "on_danger",
}
"""Methods that do no I/O: plain functions on both kinds of client."""


class Clients(Protocol):
    """Create clients of one kind, and close them."""

    dsn: str
    timings: Timings
    """The timings of the clients that are created from now on."""

    def __call__(self, where: Any = None, **options: Any) -> Any: ...

    async def close(self) -> None: ...

    def before_calls(self, act: Callable[[str], Any], client: Any = None) -> AbstractContextManager[None]:
        """In the body, call `act` before each call of a client, with the name of the function of dblock.

        These are the calls of all clients of this database, or those that the flows of one client make. What `act`
        returns is awaited, if it can be.
        """


class AsyncClients:
    """Create asynchronous clients."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.timings = timings_with()
        self._clients: list[dblock.AsyncClient] = []

    def __call__(self, where: Any = None, **options: Any) -> Any:
        client = dblock.AsyncClient(self.dsn if where is None else where, **{"timings": self.timings, **options})
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    def before_calls(self, act: Callable[[str], Any], client: Any = None) -> AbstractContextManager[None]:
        return _before_calls(self.dsn, act, client)


class SyncClients:
    """Create synchronous clients that a test awaits as if they were asynchronous."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.timings = timings_with()
        self._clients: list[dblock.Client] = []
        self._threads: weakref.WeakKeyDictionary[Any, ThreadPoolExecutor] = weakref.WeakKeyDictionary()
        self._started: list[ThreadPoolExecutor] = []

    def __call__(self, where: Any = None, **options: Any) -> Any:
        client = dblock.Client(self.dsn if where is None else where, **{"timings": self.timings, **options})
        self._clients.append(client)
        return _AsyncFacade(client, self._run)

    async def close(self) -> None:
        for client in self._clients:
            client.close()
        for thread in self._started:
            thread.shutdown()

    def before_calls(self, act: Callable[[str], Any], client: Any = None) -> AbstractContextManager[None]:
        return _before_calls(self.dsn, act, client and client._inner)

    async def _run(self, function: Any, *args: Any, **options: Any) -> Any:
        task = asyncio.current_task()
        if task not in self._threads:
            self._threads[task] = ThreadPoolExecutor(1)
            self._started.append(self._threads[task])
        thread = self._threads[task]
        return await asyncio.get_running_loop().run_in_executor(thread, lambda: function(*args, **options))


def function_of(call: Call) -> str:
    """Return the name of the function of dblock that is called."""
    return call.sql.decode().split('"dblock".', 1)[-1].split("(")[0]


@contextmanager
def _before_calls(dsn: str, act: Callable[[str], Any], client: Any) -> Iterator[None]:
    database = Target(dsn).conninfo()
    under_way = threading.local()

    def is_meant(runner: Any) -> bool:
        # A client of an earlier test may still end its session in the background.
        return bool(runner.target.conninfo() == database and (client is None or runner is client._runtime.runner))

    def observed(original: Callable[..., Any]) -> Callable[..., Any]:
        def call_sync(self: Any, call: Call, *rest: Any) -> Any:
            if getattr(under_way, "call", False):  # the same call, over another connection
                return original(self, call, *rest)
            if is_meant(self):
                act(function_of(call))
            under_way.call = True
            try:
                return original(self, call, *rest)
            finally:
                under_way.call = False

        return call_sync

    asynchronous = AsyncRunner._call

    async def call_async(self: Any, call: Call, lent: bool = False, trouble: CallRetry | None = None) -> Any:
        done = act(function_of(call)) if trouble is None and is_meant(self) else None
        if inspect.isawaitable(done):
            await done
        return await asynchronous(self, call, lent, trouble)

    with pytest.MonkeyPatch.context() as patch:
        for kind in (Runner, KeepAliveRunner):
            patch.setattr(kind, "_call", observed(kind._call))
        patch.setattr(AsyncRunner, "_call", call_async)
        yield


class _AsyncFacade:
    def __init__(self, inner: Any, run: Any) -> None:
        self._inner = inner
        self._run = run

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if not callable(attribute):
            return attribute
        if name in _LOCAL and not isinstance(self._inner, dblock.Latch):
            return lambda *args, **options: self._wrapped(attribute(*args, **options))

        async def call(*args: Any, **options: Any) -> Any:
            return self._wrapped(await self._run(attribute, *args, **options))

        return call

    async def __aenter__(self) -> Any:
        return self._wrapped(await self._run(self._inner.__enter__))

    async def __aexit__(self, *error: Any) -> Any:
        return await self._run(self._inner.__exit__, *error)

    def _wrapped(self, value: Any) -> Any:
        kinds = (
            *(dblock.Lock, dblock.Lease, dblock.EfficiencyLease, dblock.ReadLease, dblock.Client),
            *(dblock.Barrier, dblock.Latch, LockAll, LockAny),
        )
        if isinstance(value, dblock.LockSet):
            return _AsyncSetFacade(value, self._run)
        return _AsyncFacade(value, self._run) if isinstance(value, kinds) else value

    def __repr__(self) -> str:
        return repr(self._inner)


class _AsyncSetFacade(_AsyncFacade):
    """Wraps a set of leases, which is a mapping."""

    def __getitem__(self, name: str) -> Any:
        return self._wrapped(self._inner[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)

    def __bool__(self) -> bool:
        return bool(self._inner)


@contextmanager
def blocking_client(kind: str, dsn: str, **options: Any) -> Iterator[Any]:
    """Yield a client of either kind that any thread can call as if it were synchronous."""
    if kind == "sync":
        with dblock.Client(dsn, **options) as client:
            yield client
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    blocking = _SyncFacade(dblock.AsyncClient(dsn, **options), loop)
    try:
        yield blocking
    finally:
        blocking.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _SyncFacade:
    """Wraps an asynchronous client, lock or lease: each call blocks until it has ended."""

    def __init__(self, inner: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if not callable(attribute):
            return attribute
        if name in ("lock", "efficiency_lock", "read_lock", "write_lock", "semaphore", "election"):
            return lambda *args, **options: _SyncFacade(attribute(*args, **options), self._loop)
        if not inspect.iscoroutinefunction(attribute):
            return attribute

        def call(*args: Any, **options: Any) -> Any:
            result = asyncio.run_coroutine_threadsafe(attribute(*args, **options), self._loop).result()
            kinds = (dblock.AsyncLease, dblock.AsyncReadLease, dblock.AsyncTerm)
            return _SyncFacade(result, self._loop) if isinstance(result, kinds) else result

        return call
