"""A client for asyncio: the twin of `dblock.client`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from dblock._core.acquire import LockFlows
from dblock._core.options import DEFAULT_TTL, Claimer, Seconds, lock_options
from dblock._core.shared_acquire import read_write_options, semaphore_options
from dblock._runtime.runtime import Settings, TaskRuntime
from dblock.client_base import ClientBase, recipe
from dblock.decorators import AsyncRunsLocked, AsyncRunsOrSkips, DecoratorSettings, TaskDecorator
from dblock.lease import AsyncEfficiencyLease, AsyncLease
from dblock.lock import AsyncLock
from dblock.several import AsyncLockAll, AsyncLockAny, names_of_all, names_of_any, set_options
from dblock.shared import AsyncReadLease, AsyncSemaphore, AsyncSharedLock, AsyncWriteLease

if TYPE_CHECKING:
    from dblock.recipes.barriers import AsyncBarrier, AsyncLatch
    from dblock.recipes.elections import AsyncElection, AsyncTerm
    from dblock.recipes.schedules.schedule import AsyncDecorator


class AsyncClient(ClientBase):
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
        reentrant: bool = False,
    ) -> AsyncLock[AsyncLease]:
        """Return a lock with these options. Nothing is sent yet.

        A lease lasts for `ttl`. The keep-alive renews it in the background unless `keep_alive` is False. `timeout`
        bounds the wait of `acquire` and `async with`: None waits without end, and 0 tries once. `meta` is any JSON to
        show beside the holder. With `fair=False` the lock may be granted ahead of the waiters in its queue: more
        grants in a second, and no bound on how long a waiter waits.

        `claims` are resources of fenced_store. The grant itself raises their fences, so that a stale holder is refused
        before the new holder's first write. A name is a resource in the lock's own database. For other databases give
        `store.claims(…)`, which is claimed right after the grant.

        With `reentrant=True`, a task that holds the lock and acquires it again shares its grant and token, at once.
        The lock is released with the last of these leases. The longest of their ttls counts.
        """
        return AsyncLock(
            self._runtime, lock_options(name, ttl, timeout, meta, True, keep_alive, fair, claims, reentrant), AsyncLease
        )

    @overload
    def locked(
        self,
        name: str,
        *,
        on_busy: Literal["wait", "raise"] = "wait",
        ttl: Seconds = DEFAULT_TTL,
        timeout: Seconds | None = None,
        meta: Any = None,
        keep_alive: bool = True,
        fair: bool = True,
        claims: Sequence[str | Claimer] = (),
        reentrant: bool = False,
    ) -> AsyncRunsLocked: ...

    @overload
    def locked(
        self,
        name: str,
        *,
        on_busy: Literal["skip"],
        ttl: Seconds = DEFAULT_TTL,
        timeout: Seconds | None = None,
        meta: Any = None,
        keep_alive: bool = True,
        fair: bool = True,
        claims: Sequence[str | Claimer] = (),
        reentrant: bool = False,
    ) -> AsyncRunsOrSkips: ...

    def locked(
        self,
        name: str,
        *,
        on_busy: str = "wait",
        ttl: Seconds = DEFAULT_TTL,
        timeout: Seconds | None = None,
        meta: Any = None,
        keep_alive: bool = True,
        fair: bool = True,
        claims: Sequence[str | Claimer] = (),
        reentrant: bool = False,
    ) -> Any:
        """Return a decorator: the coroutine function runs under the lock whose name the arguments of each call give.

        `name` has placeholders for them, as in "user:{user_id}", "job:{self.id}" or "item:{item[id]}". They are
        checked against the parameters of the function at once. The resources in `claims` may have placeholders too.

        `on_busy` says what happens if the lock is not free: `wait` waits up to `timeout`, `skip` does not run the
        function and returns `dblock.SKIPPED`, `raise` raises LockTimeout at once. Inside the function,
        `dblock.current_lease()` is its lease. The other options are those of `lock`.
        """
        settings = DecoratorSettings(
            name,
            on_busy,
            timeout,
            claims,
            ttl=ttl,
            meta=meta,
            keep_alive=keep_alive,
            fair=fair,
            reentrant=reentrant,
        )
        return TaskDecorator(self._runtime, settings)

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

    def read_lock(
        self,
        name: str,
        *,
        ttl: Seconds = DEFAULT_TTL,
        timeout: Seconds | None = None,
        meta: Any = None,
        keep_alive: bool = True,
    ) -> AsyncSharedLock[AsyncReadLease]:
        """Return the readers' side of a read-write lock. Nothing is sent yet.

        Any number of readers hold it together, and none beside a writer. A reader that arrives after a waiting writer
        waits behind that writer. The options are those of `lock`. A reader's token passes no fence, so it claims
        nothing.
        """
        options = read_write_options("read", name, ttl, timeout, meta, keep_alive)
        return AsyncSharedLock(self._runtime, options, AsyncReadLease)

    def write_lock(
        self,
        name: str,
        *,
        ttl: Seconds = DEFAULT_TTL,
        timeout: Seconds | None = None,
        meta: Any = None,
        keep_alive: bool = True,
        claims: Sequence[str | Claimer] = (),
    ) -> AsyncSharedLock[AsyncWriteLease]:
        """Return the writers' side of a read-write lock. Nothing is sent yet.

        A writer holds it alone. The lease can be turned into a read lease with `downgrade()`. The options are those of
        `lock`.
        """
        options = read_write_options("write", name, ttl, timeout, meta, keep_alive, claims)
        return AsyncSharedLock(self._runtime, options, AsyncWriteLease)

    def semaphore(
        self,
        name: str,
        *,
        permits: int | None = None,
        ttl: Seconds = DEFAULT_TTL,
        timeout: Seconds | None = None,
        meta: Any = None,
        keep_alive: bool = True,
        claims: Sequence[str] = (),
    ) -> AsyncSemaphore:
        """Return a semaphore. Nothing is sent yet.

        At most `permits` leases are held at a time, each with a permit number and a token of its own. All clients give
        the same number, or None to take the number that the semaphore has. The options are those of `lock`. In a
        claim, {permit} stands for the permit's number, as in `claims=["gpu:{permit}"]`.
        """
        return AsyncSemaphore(self._runtime, semaphore_options(permits, name, ttl, timeout, meta, keep_alive, claims))

    def lock_all(
        self, names: Iterable[str], *, ttl: Seconds = DEFAULT_TTL, timeout: Seconds | None = None, meta: Any = None
    ) -> AsyncLockAll:
        """Return a request for all of these locks. Nothing is sent yet.

        It has `acquire`, `try_acquire` and `async with`, as a lock has, and each of them yields an AsyncLockSet: the
        leases by name. The caller gets all the locks or none. The names may come in any order, more than once, or not
        at all. Callers cannot deadlock among each other, because every caller takes the locks in the order of their
        names. `ttl`, `timeout` and `meta` are those of `lock`. `timeout` bounds the wait for all the locks together.
        """
        several = names_of_all(names)
        return AsyncLockAll(self._runtime, several, set_options(several, ttl, timeout, meta), AsyncLease)

    def lock_any(
        self, names: Iterable[str], *, ttl: Seconds = DEFAULT_TTL, timeout: Seconds | None = None, meta: Any = None
    ) -> AsyncLockAny:
        """Return a request for one of these locks, whichever is free first. Nothing is sent yet.

        It has `acquire`, `try_acquire` and `async with`, as a lock has, and each of them yields an ordinary lease.
        Its `name` says which lock was granted. If several are free, it is the first of them in the order given. The
        options are those of `lock`.
        """
        several = names_of_any(names)
        return AsyncLockAny(self._runtime, several, set_options(several, ttl, timeout, meta), AsyncLease)

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
        return recipe("schedules.schedule", "AsyncDecorator")(  # type: ignore[no-any-return]
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
        options = recipe("elections.records", "election_options")(
            name, ttl, value, priority, version, on_started, on_stopped
        )
        return recipe("elections", "AsyncElection")(self._runtime, options)  # type: ignore[no-any-return]

    def barrier(self, name: str, *, parties: int) -> AsyncBarrier:
        """Return a barrier, which trips when `parties` parties wait at it. Nothing is sent yet.

        Every client must give the same number of `parties`. Otherwise `wait` raises CountsDiffer.
        """
        return recipe("barriers", "AsyncBarrier")(self._runtime, name, parties)  # type: ignore[no-any-return]

    def latch(self, name: str, *, count: int) -> AsyncLatch:
        """Return a latch, which opens when it was counted down by `count` in all. Nothing is sent yet.

        Every client must give the same `count`. Otherwise each call raises CountsDiffer. A latch that is open stays
        open, so use another name for the next time.
        """
        return recipe("barriers", "AsyncLatch")(self._runtime, name, count)  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Release the leases that are still held, and close the connections."""
        await self._runtime.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
