"""A client: one process's way to the service.

Nothing happens before the first call: no thread, no connection, no embedded server. Then a small pool serves every
lock of this client; a held lock takes none of its connections. From the first lease on, a keep-alive renews all of
them over a connection of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from dblock._core.acquire import LockFlows
from dblock._core.options import DEFAULT_TTL, Claimer, Seconds, lock_options
from dblock._core.shared_acquire import read_write_options, semaphore_options
from dblock._runtime.runtime import Settings, ThreadRuntime
from dblock.client_base import ClientBase, recipe
from dblock.decorators import DecoratorSettings, RunsLocked, RunsOrSkips, ThreadDecorator
from dblock.lease import EfficiencyLease, Lease
from dblock.lock import Lock
from dblock.several import LockAll, LockAny, names_of_all, names_of_any, set_options
from dblock.shared import ReadLease, Semaphore, SharedLock, WriteLease

if TYPE_CHECKING:
    from dblock.recipes.barriers import Barrier, Latch
    from dblock.recipes.elections import Election, Term
    from dblock.recipes.schedules.schedule import Decorator


class Client(ClientBase):
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
        reentrant: bool = False,
    ) -> Lock[Lease]:
        """Return a lock with these options. Nothing is sent yet.

        A lease lasts for `ttl`. The keep-alive renews it in the background unless `keep_alive` is False. `timeout`
        bounds the wait of `acquire` and `with`: None waits without end, and 0 tries once. `meta` is any JSON to show
        beside the holder. With `fair=False` the lock may be granted ahead of the waiters in its queue: more grants in a
        second, and no bound on how long a waiter waits.

        `claims` are resources of fenced_store. The grant itself raises their fences, so that a stale holder is refused
        before the new holder's first write. A name is a resource in the lock's own database. For other databases give
        `store.claims(…)`, which is claimed right after the grant.

        With `reentrant=True`, a thread that holds the lock and acquires it again shares its grant and token, at once.
        The lock is released with the last of these leases. The longest of their ttls counts.
        """
        options = lock_options(name, ttl, timeout, meta, True, keep_alive, fair, claims, reentrant)
        return Lock(self._runtime, options, Lease)

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
    ) -> RunsLocked: ...

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
    ) -> RunsOrSkips: ...

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
        """Return a decorator: the function runs under the lock whose name the arguments of each call give.

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
        return ThreadDecorator(self._runtime, settings)

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

    def read_lock(
        self,
        name: str,
        *,
        ttl: Seconds = DEFAULT_TTL,
        timeout: Seconds | None = None,
        meta: Any = None,
        keep_alive: bool = True,
    ) -> SharedLock[ReadLease]:
        """Return the readers' side of a read-write lock. Nothing is sent yet.

        Any number of readers hold it together, and none beside a writer. A reader that arrives after a waiting writer
        waits behind that writer. The options are those of `lock`. A reader's token passes no fence, so it claims
        nothing.
        """
        options = read_write_options("read", name, ttl, timeout, meta, keep_alive)
        return SharedLock(self._runtime, options, ReadLease)

    def write_lock(
        self,
        name: str,
        *,
        ttl: Seconds = DEFAULT_TTL,
        timeout: Seconds | None = None,
        meta: Any = None,
        keep_alive: bool = True,
        claims: Sequence[str | Claimer] = (),
    ) -> SharedLock[WriteLease]:
        """Return the writers' side of a read-write lock. Nothing is sent yet.

        A writer holds it alone. The lease can be turned into a read lease with `downgrade()`. The options are those of
        `lock`.
        """
        options = read_write_options("write", name, ttl, timeout, meta, keep_alive, claims)
        return SharedLock(self._runtime, options, WriteLease)

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
    ) -> Semaphore:
        """Return a semaphore. Nothing is sent yet.

        At most `permits` leases are held at a time, each with a permit number and a token of its own. All clients give
        the same number, or None to take the number that the semaphore has. The options are those of `lock`. In a
        claim, {permit} stands for the permit's number, as in `claims=["gpu:{permit}"]`.
        """
        return Semaphore(self._runtime, semaphore_options(permits, name, ttl, timeout, meta, keep_alive, claims))

    def lock_all(
        self, names: Iterable[str], *, ttl: Seconds = DEFAULT_TTL, timeout: Seconds | None = None, meta: Any = None
    ) -> LockAll:
        """Return a request for all of these locks. Nothing is sent yet.

        It has `acquire`, `try_acquire` and `with`, as a lock has, and each of them yields a LockSet: the leases by
        name. The caller gets all the locks or none. The names may come in any order, more than once, or not at all.
        Callers cannot deadlock among each other, because every caller takes the locks in the order of their names.
        `ttl`, `timeout` and `meta` are those of `lock`. `timeout` bounds the wait for all the locks together.
        """
        several = names_of_all(names)
        return LockAll(self._runtime, several, set_options(several, ttl, timeout, meta), Lease)

    def lock_any(
        self, names: Iterable[str], *, ttl: Seconds = DEFAULT_TTL, timeout: Seconds | None = None, meta: Any = None
    ) -> LockAny:
        """Return a request for one of these locks, whichever is free first. Nothing is sent yet.

        It has `acquire`, `try_acquire` and `with`, as a lock has, and each of them yields an ordinary lease. Its
        `name` says which lock was granted. If several are free, it is the first of them in the order given. The options
        are those of `lock`.
        """
        several = names_of_any(names)
        return LockAny(self._runtime, several, set_options(several, ttl, timeout, meta), Lease)

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
        return recipe("schedules.schedule", "Decorator")(  # type: ignore[no-any-return]
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
        options = recipe("elections.records", "election_options")(
            name, ttl, value, priority, version, on_started, on_stopped
        )
        return recipe("elections", "Election")(self._runtime, options)  # type: ignore[no-any-return]

    def barrier(self, name: str, *, parties: int) -> Barrier:
        """Return a barrier, which trips when `parties` parties wait at it. Nothing is sent yet.

        Every client must give the same number of `parties`. Otherwise `wait` raises CountsDiffer.
        """
        return recipe("barriers", "Barrier")(self._runtime, name, parties)  # type: ignore[no-any-return]

    def latch(self, name: str, *, count: int) -> Latch:
        """Return a latch, which opens when it was counted down by `count` in all. Nothing is sent yet.

        Every client must give the same `count`. Otherwise each call raises CountsDiffer. A latch that is open stays
        open, so use another name for the next time.
        """
        return recipe("barriers", "Latch")(self._runtime, name, count)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Release the leases that are still held, and close the connections."""
        self._runtime.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
