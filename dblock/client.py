"""A client: one process's way to the service.

Nothing happens before the first call: no thread, no connection, no embedded server. Then a small pool serves every
lock of this client; a held lock takes none of its connections. From the first lease on, a keep-alive renews all of
them over a connection of its own.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from dblock.calls import Place, Steps
from dblock.errors import ClientClosed, DblockError, InvalidArgument
from dblock.forks import mind_forks
from dblock.hold import Hold, Reason
from dblock.lease import AsyncEfficiencyLease, AsyncLease, EfficiencyLease, Lease
from dblock.lock import AsyncLock, Lock
from dblock.steps import Service
from dblock.target import Target, resolve
from dblock.terms import DEFAULT_PRESENCE, DEFAULT_TTL, Seconds, brief, check_presence, check_seconds, is_text, terms
from dblock.watch import AsyncWatch, Watch

if TYPE_CHECKING:
    import asyncio

    from dblock.keepalive import AsyncKeepAlive, KeepAlive
    from dblock.listener import Listener
    from dblock.runner import AsyncRunner, Runner
    from dblock.target import Where
    from dblock.task_listener import AsyncListener

T = TypeVar("T")

MOST_PATIENT = 86_400.0


class _ClientBase:
    """What both kinds of client are told at the start."""

    _keeper: Any
    _listener: Any
    _installation = ""

    def __init__(
        self,
        where: Where = None,
        *,
        schema: str = "dblock",
        holder: str | None = None,
        pool_size: int = 4,
        patience: Seconds = 5.0,
        listen_dsn: str | None = None,
        presence: Seconds | None = DEFAULT_PRESENCE,
    ) -> None:
        """Name the database; nothing is opened yet.

        `where` is a DSN (several hosts are fine), a SQLAlchemy Engine or AsyncEngine, or nothing: then $DBLOCK_DSN
        says, and without that it is the embedded Postgres. `holder` is what others see of this client,
        by default the machine and process. `patience` bounds the wait for a free connection, and then for the
        database's answer, which gets a second at least.

        `listen_dsn` leads to the same database past a pooler, for the one connection over which waiters are woken.
        `presence` is how long others wait, once that connection has ended, before they take what this process holds;
        None for as long as the leases last.
        """
        from dblock.schema import check_name

        if holder is not None and (not is_text(holder) or len(holder.encode()) > 512):
            raise InvalidArgument(f"A holder is text of at most 512 bytes without NUL; got {holder!a:.80}.")
        if isinstance(pool_size, bool) or not isinstance(pool_size, int) or pool_size < 1:
            raise InvalidArgument(f"pool_size is a number of connections from 1; got {brief(pool_size)}.")
        self._target = resolve(where)
        self._service = Service(check_name(schema), holder)
        self._schema = schema
        self._pool_size = pool_size
        self._patience = check_seconds("patience", patience)
        if not 0 <= self._patience <= MOST_PATIENT:
            raise InvalidArgument(f"The patience is from 0 s to a day; got {self._patience:g} s.")
        self._listen_target = self._target if listen_dsn is None else _listen_target(listen_dsn)
        if presence is not None:
            presence = check_presence(presence)
        self._grace = presence
        self._closed = False
        self.start_anew()
        mind_forks(self)

    def start_anew(self) -> None:
        raise NotImplementedError

    def _keep(self, hold: Hold, keep_alive: bool) -> None:
        """Look after a lease: renew it if so wanted, and see that it is released."""
        hold.keep_alive = keep_alive
        with hold.presence.lock if hold.presence else contextlib.nullcontext():
            self._keeper.add(hold)
            if hold.presence is not None and (hold.presence.ended or hold.in_doubt):
                # While the grant was on its way. Whether it was taken in that time, nobody has asked.
                hold.lose(Reason.UNREACHABLE)
        if self._grace is not None:
            self._listener.start()
        if self._closed:
            # Closed while the grant was on its way. Looked at after adding, so that one of the two sees the other.
            self._keeper.discard(hold)
            hold.finish()
            closed = ClientClosed()
            closed.granted = True
            raise closed

    def _place(self, name: str, attempt: str) -> Place:
        """Make a place in line for a caller who waits."""
        place: Place = self._listener.place(name, attempt)
        return place

    def _owe(self, name: str, attempt: str) -> None:
        """Have what could not be given up now given up later."""
        listener = getattr(self, "_listener", None)
        if listener is not None and not self._closed:
            listener.start()
            listener.line.owe(name, attempt)

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("A client, its locks and its leases belong to one process. Make a client in the other one.")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._target}{' closed' if self._closed else ''}>"


def _listen_target(listen_dsn: str) -> Target:
    try:
        return resolve(listen_dsn)
    except InvalidArgument as error:
        raise InvalidArgument(f"listen_dsn: {error}") from None


class Client(_ClientBase):
    """The service, for threads. One is enough for a process, shared by all its threads."""

    _runner: Runner | None = None
    _keeper: KeepAlive
    _listener: Listener
    _watch: Watch

    def start_anew(self) -> None:
        """In the child of a fork nobody is opening this client."""
        self._opening = threading.Lock()

    @overload
    def lock(
        self,
        name: str,
        *,
        ttl: Seconds = DEFAULT_TTL,
        timeout: Seconds | None = None,
        meta: Any = None,
        keep_alive: bool = True,
        durable: Literal[True] = True,
        fair: bool = True,
    ) -> Lock[Lease]: ...

    @overload
    def lock(
        self,
        name: str,
        *,
        ttl: Seconds = DEFAULT_TTL,
        timeout: Seconds | None = None,
        meta: Any = None,
        keep_alive: bool = True,
        durable: Literal[False],
        fair: bool = True,
    ) -> Lock[EfficiencyLease]: ...

    def lock(
        self,
        name: str,
        *,
        ttl: Seconds = DEFAULT_TTL,
        timeout: Seconds | None = None,
        meta: Any = None,
        keep_alive: bool = True,
        durable: bool = True,
        fair: bool = True,
    ) -> Lock[Any]:
        """Name a lock and the terms on which to hold it; nothing is sent yet.

        The lease lasts for `ttl`, and is renewed in the background unless `keep_alive` is False. `timeout` bounds the
        wait of `acquire` and `with`: None waits without end, 0 tries once. `meta` is any JSON that others should
        see beside the holder. With `durable=False` a grant does not wait for the disk: a crash of the database may
        forget it, and it has no fencing token. With `fair=False` it may be taken before those who wait in line: more
        grants in a second, and no bound on how long anybody waits.
        """
        return Lock(self, terms(name, ttl, timeout, meta, durable, keep_alive, fair))

    def close(self) -> None:
        """Release what is still held, and close the connections."""
        with self._opening:
            self._closed = True
            runner, self._runner = self._runner, None
        if runner:
            self._shut()

    def _run(self, steps: Steps[T]) -> T:
        return (self._runner or self._open()).run(steps)

    def _run_last(self, steps: Steps[T]) -> T:
        """Run these also if the client was closed meanwhile."""
        if not self._closed:
            return self._run(steps)
        from dblock.runner import Runner

        last = Runner(self._target, self._schema, 1, 1.0)
        try:
            return last.run(steps)
        finally:
            last.close()

    def _open(self) -> Runner:
        from dblock.closing import shut
        from dblock.keepalive import KeepAlive
        from dblock.listener import Listener
        from dblock.runner import Runner

        with self._opening:
            if self._closed:
                raise ClientClosed
            if self._runner is None:
                runner = Runner(self._target, self._schema, self._pool_size, self._patience)
                try:
                    runner.open()
                except BaseException:
                    runner.close()
                    raise
                # Without prepared statements it needs fewer round trips to its first answer.
                keepers = Runner(self._target, self._schema, 1, self._patience, prepares=False)
                self._keeper = KeepAlive(keepers, self._service)
                self._listener = Listener(
                    runner,
                    keepers,
                    self._listen_target,
                    self._service,
                    self._schema,
                    runner.installation,
                    self._keeper,
                    self._grace,
                )
                self._watch = Watch()
                # Also when nobody closes the client: it goes out of use, or the interpreter ends.
                self._shut = weakref.finalize(
                    self, shut, runner, keepers, self._keeper, self._watch, self._listener, self._service
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


class AsyncClient(_ClientBase):
    """The service, for asyncio. One is enough for an event loop, shared by all its tasks."""

    _runner: AsyncRunner | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _opening_here: asyncio.Lock
    _keeper: AsyncKeepAlive
    _listener: AsyncListener
    _watch: AsyncWatch

    def start_anew(self) -> None:
        """In the child of a fork there is no event loop yet, and nothing is open."""
        self._loop = self._runner = None

    @overload
    def lock(
        self,
        name: str,
        *,
        ttl: Seconds = DEFAULT_TTL,
        timeout: Seconds | None = None,
        meta: Any = None,
        keep_alive: bool = True,
        durable: Literal[True] = True,
        fair: bool = True,
    ) -> AsyncLock[AsyncLease]: ...

    @overload
    def lock(
        self,
        name: str,
        *,
        ttl: Seconds = DEFAULT_TTL,
        timeout: Seconds | None = None,
        meta: Any = None,
        keep_alive: bool = True,
        durable: Literal[False],
        fair: bool = True,
    ) -> AsyncLock[AsyncEfficiencyLease]: ...

    def lock(
        self,
        name: str,
        *,
        ttl: Seconds = DEFAULT_TTL,
        timeout: Seconds | None = None,
        meta: Any = None,
        keep_alive: bool = True,
        durable: bool = True,
        fair: bool = True,
    ) -> AsyncLock[Any]:
        """Name a lock and the terms on which to hold it; nothing is sent yet.

        The lease lasts for `ttl`, and is renewed in the background unless `keep_alive` is False. `timeout` bounds the
        wait of `acquire` and `async with`: None waits without end, 0 tries once. `meta` is any JSON that others should
        see beside the holder. With `durable=False` a grant does not wait for the disk: a crash of the database may
        forget it, and it has no fencing token. With `fair=False` it may be taken before those who wait in line: more
        grants in a second, and no bound on how long anybody waits.
        """
        return AsyncLock(self, terms(name, ttl, timeout, meta, durable, keep_alive, fair))

    async def close(self) -> None:
        """Release what is still held, and close the connections."""
        self._closed = True
        runner, self._runner = self._runner, None
        if runner:
            from dblock.closing import say_goodbye

            try:
                await say_goodbye(runner, self._keeper, self._listener, self._service)
            finally:
                self._shut()

    async def _run(self, steps: Steps[T]) -> T:
        return await (await self._open()).run(steps)

    async def _run_last(self, steps: Steps[T]) -> T:
        """Run these also if the client was closed meanwhile."""
        if not self._closed:
            return await self._run(steps)
        from dblock.runner import AsyncRunner

        last = AsyncRunner(self._target, self._schema, 1, 1.0)
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
        from dblock.closing import shut_async
        from dblock.keepalive import AsyncKeepAlive
        from dblock.runner import AsyncRunner
        from dblock.task_listener import AsyncListener

        async with self._opening_here:
            if self._closed:
                raise ClientClosed
            if self._runner is None:
                runner = AsyncRunner(self._target, self._schema, self._pool_size, self._patience)
                try:
                    await runner.open()
                except BaseException:
                    runner.close()
                    raise
                # Without prepared statements it needs fewer round trips to its first answer.
                keepers = AsyncRunner(self._target, self._schema, 1, self._patience, prepares=False)
                self._keeper = AsyncKeepAlive(keepers, self._service)
                self._listener = AsyncListener(
                    runner,
                    keepers,
                    self._listen_target,
                    self._service,
                    self._schema,
                    runner.installation,
                    self._keeper,
                    self._grace,
                )
                self._watch = AsyncWatch(loop)
                # Also when nobody closes the client: it goes out of use, or the interpreter ends.
                self._shut = weakref.finalize(
                    self, shut_async, runner, keepers, self._keeper, self._listener, self._service
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
