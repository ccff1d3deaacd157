"""A client: one process's way to the service.

Nothing happens before the first call: no thread, no connection, no embedded server. Then a small pool serves every
lock of this client; a held lock takes none of its connections. From the first lease on, a keep-alive renews all of
them over a connection of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from dblock._core.effects import GIVE_UP_WITHIN, Flow
from dblock._core.options import DEFAULT_TTL, Claimer, Seconds, lock_options
from dblock._runtime.callbacks import AsyncCallbackTimer, CallbackTimer
from dblock._runtime.client_base import ClientBase
from dblock._runtime.forks import importing
from dblock.errors import ClientClosed, DblockError
from dblock.lease import AsyncEfficiencyLease, AsyncLease, EfficiencyLease, Lease
from dblock.lock import AsyncLock, Lock

if TYPE_CHECKING:
    import asyncio

    from dblock._runtime.keepalive import AsyncKeepAlive, KeepAlive
    from dblock._runtime.listener import AsyncListener, Listener
    from dblock._runtime.runner import AsyncRunner, Runner

T = TypeVar("T")


class Client(ClientBase):
    """The service, for threads. One is enough for a process, shared by all its threads."""

    _runner: Runner | None = None
    _keepalive: KeepAlive
    _listener: Listener
    _callbacks: CallbackTimer

    def reset_after_fork(self) -> None:
        """In the child of a fork nobody is opening this client."""
        self._opening = threading.Lock()

    def lock(
        self,
        name: str,
        *,
        ttl: Seconds = DEFAULT_TTL,
        timeout: Seconds | None = None,
        meta: Any = None,
        keep_alive: bool = True,
        fair: bool = True,
        claims: Sequence[str | Claimer] = (),
    ) -> Lock[Lease]:
        """Return a lock with these options. Nothing is sent yet.

        A lease lasts for `ttl`. The keep-alive renews it in the background unless `keep_alive` is False. `timeout`
        bounds the wait of `acquire` and `with`: None waits without end, and 0 tries once. `meta` is any JSON to show
        beside the holder. With `fair=False` the lock may be granted ahead of the waiters in its queue: more grants in a
        second, and no bound on how long a waiter waits.

        `claims` are resources of fenced_store. The grant itself raises their fences, so that a stale holder is refused
        before the new holder's first write. A name is a resource in the lock's own database. For other databases give
        `store.claims(…)`, which is claimed right after the grant.
        """
        return Lock(self, lock_options(name, ttl, timeout, meta, True, keep_alive, fair, claims), Lease)

    def efficiency_lock(
        self,
        name: str,
        *,
        ttl: Seconds = DEFAULT_TTL,
        timeout: Seconds | None = None,
        meta: Any = None,
        keep_alive: bool = True,
        fair: bool = True,
    ) -> Lock[EfficiencyLease]:
        """Return a lock for work that is only wasted when it is done twice. Nothing is sent yet.

        Its grants do not wait for the disk. A crash of the database may forget one, so they have no fencing token and
        claim nothing. The options are those of `lock`, and both kinds of lock exclude each other.
        """
        return Lock(self, lock_options(name, ttl, timeout, meta, False, keep_alive, fair), EfficiencyLease)

    def close(self) -> None:
        """Release what is still held, and close the connections."""
        with self._opening:
            self._closed = True
            runner, self._runner = self._runner, None
        if runner:
            self._shut()

    def _run(self, steps: Flow[T]) -> T:
        return (self._runner or self._open()).run(steps)

    def _run_last(self, steps: Flow[T]) -> T:
        """Run these also if the client was closed meanwhile."""
        if not self._closed:
            return self._run(steps)
        from dblock._runtime.runner import Runner

        last = Runner(self._target, self._schema, 1, GIVE_UP_WITHIN, prepares=False)
        try:
            return last.run(steps)
        finally:
            last.close()

    def _open(self) -> Runner:
        with importing:
            from dblock._runtime.keepalive import KeepAlive
            from dblock._runtime.listener import Listener
            from dblock._runtime.runner import Runner
            from dblock._runtime.shutdown import shut
            from dblock.admin.schema import install

        with self._opening:
            if self._closed:
                raise ClientClosed
            if self._runner is None:
                runner = Runner(self._target, self._schema, self._pool_size, self._patience)
                try:
                    runner.open(install)
                except BaseException:
                    runner.close()
                    raise
                # Without prepared statements it needs fewer round trips to its first answer. Where the server has no
                # room for another connection, leases are renewed over one of ours.
                keepalive_runner = Runner(self._target, self._schema, 1, self._patience, prepares=False, spare=runner)
                self._keepalive = KeepAlive(keepalive_runner, self._flows)
                self._listener = Listener(
                    runner,
                    keepalive_runner,
                    self._listen_target,
                    self._flows,
                    runner.installation,
                    self._keepalive,
                    self._grace,
                )
                runner.join_queue = self._listener.join_queue
                self._callbacks = CallbackTimer()
                # Also when nobody closes the client: it goes out of use, or the interpreter ends.
                self._shut = weakref.finalize(
                    self, shut, runner, keepalive_runner, self._keepalive, self._callbacks, self._listener, self._flows
                )
                self._installation = runner.installation
                self._runner = runner
            return self._runner

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(ClientBase):
    """The service, for asyncio. One is enough for an event loop, shared by all its tasks."""

    _runner: AsyncRunner | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _opening_here: asyncio.Lock
    _keepalive: AsyncKeepAlive
    _listener: AsyncListener
    _callbacks: AsyncCallbackTimer

    def reset_after_fork(self) -> None:
        """In the child of a fork there is no event loop yet, and nothing is open."""
        self._loop = self._runner = None

    def lock(
        self,
        name: str,
        *,
        ttl: Seconds = DEFAULT_TTL,
        timeout: Seconds | None = None,
        meta: Any = None,
        keep_alive: bool = True,
        fair: bool = True,
        claims: Sequence[str | Claimer] = (),
    ) -> AsyncLock[AsyncLease]:
        """Return a lock with these options. Nothing is sent yet.

        A lease lasts for `ttl`. The keep-alive renews it in the background unless `keep_alive` is False. `timeout`
        bounds the wait of `acquire` and `async with`: None waits without end, and 0 tries once. `meta` is any JSON to
        show beside the holder. With `fair=False` the lock may be granted ahead of the waiters in its queue: more
        grants in a second, and no bound on how long a waiter waits.

        `claims` are resources of fenced_store. The grant itself raises their fences, so that a stale holder is refused
        before the new holder's first write. A name is a resource in the lock's own database. For other databases give
        `store.claims(…)`, which is claimed right after the grant.
        """
        return AsyncLock(self, lock_options(name, ttl, timeout, meta, True, keep_alive, fair, claims), AsyncLease)

    def efficiency_lock(
        self,
        name: str,
        *,
        ttl: Seconds = DEFAULT_TTL,
        timeout: Seconds | None = None,
        meta: Any = None,
        keep_alive: bool = True,
        fair: bool = True,
    ) -> AsyncLock[AsyncEfficiencyLease]:
        """Return a lock for work that is only wasted when it is done twice. Nothing is sent yet.

        Its grants do not wait for the disk. A crash of the database may forget one, so they have no fencing token and
        claim nothing. The options are those of `lock`, and both kinds of lock exclude each other.
        """
        return AsyncLock(self, lock_options(name, ttl, timeout, meta, False, keep_alive, fair), AsyncEfficiencyLease)

    async def close(self) -> None:
        """Release what is still held, and close the connections."""
        self._closed = True
        runner, self._runner = self._runner, None
        if runner:
            from dblock._runtime.shutdown import aclose

            try:
                await aclose(runner, self._keepalive_runner, self._keepalive, self._listener, self._flows)
            except BaseException:
                self._shut()
                raise
            self._shut.detach()

    async def _run(self, steps: Flow[T]) -> T:
        return await (await self._open()).run(steps)

    async def _run_last(self, steps: Flow[T]) -> T:
        """Run these also if the client was closed meanwhile."""
        if not self._closed:
            return await self._run(steps)
        from dblock._runtime.runner import AsyncRunner

        last = AsyncRunner(self._target, self._schema, 1, GIVE_UP_WITHIN, prepares=False)
        try:
            return await last.run(steps)
        finally:
            last.close()

    async def _open(self) -> AsyncRunner:
        import asyncio

        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop, self._opening_here = loop, asyncio.Lock()
        if self._loop is not loop:
            raise DblockError("This AsyncClient belongs to another event loop. Make one for each loop.")
        if self._runner is not None:
            return self._runner
        with importing:
            from dblock._runtime.keepalive import AsyncKeepAlive
            from dblock._runtime.listener import AsyncListener
            from dblock._runtime.runner import AsyncRunner
            from dblock._runtime.shutdown import shut_async
            from dblock.admin.schema import install

        async with self._opening_here:
            if self._closed:
                raise ClientClosed
            if self._runner is None:
                runner = AsyncRunner(self._target, self._schema, self._pool_size, self._patience)
                try:
                    await runner.open(install)
                except BaseException:
                    runner.close()
                    raise
                # Without prepared statements it needs fewer round trips to its first answer. Where the server has no
                # room for another connection, leases are renewed over one of ours.
                self._keepalive_runner = keepalive_runner = AsyncRunner(
                    self._target, self._schema, 1, self._patience, prepares=False, spare=runner
                )
                self._keepalive = AsyncKeepAlive(keepalive_runner, self._flows)
                self._listener = AsyncListener(
                    runner,
                    keepalive_runner,
                    self._listen_target,
                    self._flows,
                    runner.installation,
                    self._keepalive,
                    self._grace,
                )
                runner.join_queue = self._listener.join_queue
                self._callbacks = AsyncCallbackTimer(loop)
                # Also when nobody closes the client: it goes out of use, or the interpreter ends.
                self._shut = weakref.finalize(
                    self, shut_async, runner, keepalive_runner, self._keepalive, self._listener, self._flows
                )
                if self._closed:
                    self._shut()
                    raise ClientClosed
                self._installation = runner.installation
                self._runner = runner
            return self._runner

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
