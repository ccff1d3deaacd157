"""A client: one process's way to the service.

Nothing happens before the first call: no thread, no connection, no embedded server. Then a small pool serves every
lock of this client; a held lock takes none of its connections. From the first lease on, a keep-alive renews all of
them over a connection of its own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dblock._core.acquire import LockFlows
from dblock._core.options import (
    DEFAULT_PRESENCE,
    DEFAULT_TTL,
    Claimer,
    Seconds,
    brief,
    check_presence,
    check_seconds,
    is_text,
    lock_options,
)
from dblock._runtime.forks import importing
from dblock._runtime.runtime import Settings, TaskRuntime, ThreadRuntime
from dblock._runtime.target import Target, resolve
from dblock.errors import InvalidArgument
from dblock.lease import AsyncEfficiencyLease, AsyncLease, EfficiencyLease, Lease
from dblock.lock import AsyncLock, Lock

if TYPE_CHECKING:
    from dblock._runtime.target import Where
    from dblock.recipes.elections import AsyncElection, AsyncTerm, Election, Term
    from dblock.recipes.schedules.schedule import AsyncDecorator, Decorator

MOST_PATIENT = 86_400.0
HOLDER_BYTES = 512


class _ClientBase:
    """What both kinds of client do: check their settings, and belong to one process."""

    _runtime: ThreadRuntime | TaskRuntime

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
        embedded: bool = False,
        fences: str | None = None,
    ) -> None:
        """Name the database. Nothing is opened yet.

        `where` is a DSN (several hosts are fine), or a SQLAlchemy Engine or AsyncEngine. Without it, $DBLOCK_DSN names
        the database. With `embedded=True` it is the embedded Postgres of this user, and without a DSN also if
        DBLOCK_EMBEDDED=1 is set. Otherwise ConfigurationError is raised. `holder` is the name of this client that
        others see, by default the machine and process. `patience` limits the wait for a free connection, and then the
        wait for the database's reply, but never to less than one second.

        `listen_dsn` leads to the same database past a pooler, for the one connection over which waiters are woken.
        `presence` is the grace: how long other clients wait, once that connection has ended, before they take the locks
        that this process holds. With None they wait until the leases expire. `fences` is the schema of fenced_store in
        which `claims` are names. It is needed only if the database has several.
        """
        with importing:
            from dblock._core.schema_version import check_name

        if holder is not None and (not is_text(holder) or len(holder.encode()) > HOLDER_BYTES):
            raise InvalidArgument(f"A holder is text of at most {HOLDER_BYTES} bytes without NUL; got {brief(holder)}.")
        if isinstance(pool_size, bool) or not isinstance(pool_size, int) or pool_size < 1:
            raise InvalidArgument(f"pool_size is a number of connections from 1; got {brief(pool_size)}.")
        with importing:  # psycopg, which reads a DSN
            target = resolve(where, embedded=embedded)
        flows = LockFlows(
            check_name(schema),
            _default_holder() if holder is None else holder,
            fences=None if fences is None else check_name(fences),
        )
        seconds = check_seconds("patience", patience)
        if not 0 <= seconds <= MOST_PATIENT:
            raise InvalidArgument(f"The patience is from 0 s to a day; got {seconds:g} s.")
        listen_target = target if listen_dsn is None else _listen_target(listen_dsn)
        grace = None if presence is None else check_presence(presence)
        self._open(Settings(target, listen_target, schema, pool_size, seconds, grace, _install), flows)

    def _open(self, settings: Settings, flows: LockFlows) -> None:
        raise NotImplementedError

    def __reduce__(self) -> tuple[object, ...]:
        return self._runtime.__reduce__()

    def __repr__(self) -> str:
        runtime = self._runtime
        return f"<{type(self).__name__} {runtime.settings.target}{' closed' if runtime.closed else ''}>"


class Client(_ClientBase):
    """The service, for threads. One is enough for a process, shared by all its threads."""

    _runtime: ThreadRuntime

    def _open(self, settings: Settings, flows: LockFlows) -> None:
        self._runtime = ThreadRuntime(settings, flows)

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
        options = lock_options(name, ttl, timeout, meta, True, keep_alive, fair, claims)
        return Lock(self._runtime, options, Lease)

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
        options = lock_options(name, ttl, timeout, meta, False, keep_alive, fair)
        return Lock(self._runtime, options, EfficiencyLease)

    def once(
        self,
        name: str,
        *,
        every: Seconds | None = None,
        cron: str | None = None,
        tz: str | None = None,
        delay: Seconds | None = None,
        catch_up: str = "none",
        overlap: str = "skip",
        delivery: str = "at-most-once",
        grace: Seconds | None = None,
        at_least: Seconds | None = None,
        at_most: Seconds | None = None,
        ttl: Seconds = DEFAULT_TTL,
    ) -> Decorator:
        """Return a decorator: the function runs once per slot of the schedule, on whichever host calls it first.

        Give one of `every` (an interval), `cron` (an expression of five fields, in the time zone `tz`, UTC by default)
        and `delay` (counted from the end of the last run). A call returns the function's result, or `dblock.SKIPPED` if
        no slot is due for this host.

        `catch_up` says what becomes of slots at which no host called: `none` (a slot may start `grace` late, by default
        half the time to the next slot and at most ten minutes), `latest` or `all`. `overlap` says what becomes of a
        slot that is due while a run is active: `skip`, `queue` (one) or `allow`. With `delivery="at-least-once"` the
        slot runs again if its runner died. No other run starts for `at_least` after a start, and the lease ends
        `at_most` after the start: these are ShedLock's lockAtLeastFor and lockAtMostFor.
        """
        return _recipe("schedules.schedule", "Decorator")(  # type: ignore[no-any-return]
            self._runtime,
            name,
            every=every,
            cron=cron,
            tz=tz,
            delay=delay,
            catch_up=catch_up,
            overlap=overlap,
            delivery=delivery,
            grace=grace,
            at_least=at_least,
            at_most=at_most,
            ttl=ttl,
        )

    def election(
        self,
        name: str,
        *,
        ttl: Seconds = DEFAULT_TTL,
        value: Any = None,
        priority: int = 0,
        version: str | None = None,
        on_started: Callable[[Term], object] | None = None,
        on_stopped: Callable[[Term], object] | None = None,
    ) -> Election:
        """Return a candidate of an election. Nothing is sent yet.

        A term lasts for `ttl` unless it is renewed in the background. `value` is any JSON to show beside the leader,
        such as its address. Of the candidates that wait, one with the highest `priority` leads next, and among these
        one with the highest `version`, such as 1.20.3. A leader with a lower one is asked to hand over. `on_started`
        is called before the body of each term, and `on_stopped` once after it.
        """
        options = _recipe("elections.records", "election_options")(
            name, ttl, value, priority, version, on_started, on_stopped
        )
        return _recipe("elections", "Election")(self._runtime, options)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Release the leases that are still held, and close the connections."""
        self._runtime.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(_ClientBase):
    """The service, for asyncio. One is enough for an event loop, shared by all its tasks.

    Its leases are renewed in a thread, so that a blocked event loop keeps them.
    """

    _runtime: TaskRuntime

    def _open(self, settings: Settings, flows: LockFlows) -> None:
        self._runtime = TaskRuntime(settings, flows)

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
        return AsyncLock(
            self._runtime, lock_options(name, ttl, timeout, meta, True, keep_alive, fair, claims), AsyncLease
        )

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
        return AsyncLock(
            self._runtime, lock_options(name, ttl, timeout, meta, False, keep_alive, fair), AsyncEfficiencyLease
        )

    def once(
        self,
        name: str,
        *,
        every: Seconds | None = None,
        cron: str | None = None,
        tz: str | None = None,
        delay: Seconds | None = None,
        catch_up: str = "none",
        overlap: str = "skip",
        delivery: str = "at-most-once",
        grace: Seconds | None = None,
        at_least: Seconds | None = None,
        at_most: Seconds | None = None,
        ttl: Seconds = DEFAULT_TTL,
    ) -> AsyncDecorator:
        """Return a decorator: the function runs once per slot of the schedule, on whichever host calls it first.

        Give one of `every` (an interval), `cron` (an expression of five fields, in the time zone `tz`, UTC by default)
        and `delay` (counted from the end of the last run). A call returns the function's result, or `dblock.SKIPPED` if
        no slot is due for this host.

        `catch_up` says what becomes of slots at which no host called: `none` (a slot may start `grace` late, by default
        half the time to the next slot and at most ten minutes), `latest` or `all`. `overlap` says what becomes of a
        slot that is due while a run is active: `skip`, `queue` (one) or `allow`. With `delivery="at-least-once"` the
        slot runs again if its runner died. No other run starts for `at_least` after a start, and the lease ends
        `at_most` after the start: these are ShedLock's lockAtLeastFor and lockAtMostFor.
        """
        return _recipe("schedules.schedule", "AsyncDecorator")(  # type: ignore[no-any-return]
            self._runtime,
            name,
            every=every,
            cron=cron,
            tz=tz,
            delay=delay,
            catch_up=catch_up,
            overlap=overlap,
            delivery=delivery,
            grace=grace,
            at_least=at_least,
            at_most=at_most,
            ttl=ttl,
        )

    def election(
        self,
        name: str,
        *,
        ttl: Seconds = DEFAULT_TTL,
        value: Any = None,
        priority: int = 0,
        version: str | None = None,
        on_started: Callable[[AsyncTerm], object] | None = None,
        on_stopped: Callable[[AsyncTerm], object] | None = None,
    ) -> AsyncElection:
        """Return a candidate of an election. Nothing is sent yet.

        A term lasts for `ttl` unless it is renewed in the background. `value` is any JSON to show beside the leader,
        such as its address. Of the candidates that wait, one with the highest `priority` leads next, and among these
        one with the highest `version`, such as 1.20.3. A leader with a lower one is asked to hand over. `on_started`
        is called before the body of each term, and `on_stopped` once after it.
        """
        options = _recipe("elections.records", "election_options")(
            name, ttl, value, priority, version, on_started, on_stopped
        )
        return _recipe("elections", "AsyncElection")(self._runtime, options)  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Release the leases that are still held, and close the connections."""
        await self._runtime.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _default_holder() -> Callable[[], str]:
    host = socket.gethostname()
    return lambda: f"{host} pid {os.getpid()}"


def _recipe(module: str, name: str) -> Any:
    """Import a recipe when it is first used. Recipes are built on clients, so this module does not import them."""
    with importing:
        return getattr(import_module(f"dblock.recipes.{module}"), name)


def _listen_target(listen_dsn: str) -> Target:
    try:
        return resolve(listen_dsn)
    except InvalidArgument as error:
        raise InvalidArgument(f"listen_dsn: {error}") from None


def _install(target: Target, schema: str) -> None:
    with importing:
        from dblock.admin.schema import install
    install(target, schema)
