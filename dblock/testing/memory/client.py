"""Clients of a database in memory: for tests of code that uses locks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dblock._core.acquire import LockFlows
from dblock._core.options import Seconds, brief
from dblock._core.shared_acquire import SharedFlows
from dblock._core.statements import DEFAULT_FENCES
from dblock.async_client import AsyncClient
from dblock.client import Client
from dblock.client_base import check_holder, observe
from dblock.errors import InvalidArgument
from dblock.testing.clock import Clock
from dblock.testing.memory import at_once
from dblock.testing.memory.client_clock import MemoryClientClock
from dblock.testing.memory.database import MemoryDatabase
from dblock.testing.memory.runtime import AsyncMemoryRuntime, MemoryRuntime

if TYPE_CHECKING:
    from dblock._core.observation import Observer
    from dblock._core.timings import Timings
    from dblock.recipes.schedules.schedule import Schedule
    from dblock.testing.memory.schedules import Host


class _MemoryClient:
    """What both memory clients share."""

    _runtime: Any

    def __init__(
        self,
        database: MemoryDatabase | None = None,
        *,
        clock: Clock | None = None,
        holder: str | None = None,
        observers: Sequence[Observer] = (),
        pool_size: int = 4,
        patience: Seconds = 5.0,
        presence: Seconds | None = None,
        timings: Timings | None = None,
    ) -> None:
        """Use a database in memory, by default a new one on this clock, which by default is a new one too.

        `holder`, `observers` and `timings` are those of a real client. The other options are accepted and have no
        effect: there is no connection to pool, no reply to wait for, and no process that could die.
        """
        if database is None:
            database = MemoryDatabase(clock)
        elif not isinstance(database, MemoryDatabase):
            raise InvalidArgument(
                f"A memory client uses a MemoryDatabase, such as other.database; got {brief(database)}."
            )
        elif clock is not None and clock is not database.clock:
            raise InvalidArgument("The database has a clock already. Pass the database or the clock.")
        name = check_holder(holder)
        flows = SharedFlows(
            "dblock",
            name if isinstance(name, str) else name(),  # the child of a fork has a database of its own
            MemoryClientClock(database.clock),
            fences=DEFAULT_FENCES,
            timings=timings,
        )
        observe(flows, observers)
        self._runtime = self._make(database, flows)

    def _make(self, database: MemoryDatabase, flows: LockFlows) -> Any:
        raise NotImplementedError

    @property
    def database(self) -> MemoryDatabase:
        """The database in memory. Another client of it competes for the same locks."""
        database: MemoryDatabase = self._runtime.database
        return database

    @property
    def clock(self) -> Clock:
        """The clock of the database."""
        return self.database.clock

    def __reduce__(self) -> tuple[object, ...]:
        found: tuple[object, ...] = self._runtime.__reduce__()
        return found

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{' closed' if self._runtime.closed else ''}>"


class MemoryClient(_MemoryClient, Client):
    """A `Client` without a database, a thread or a sleep. It waits on a clock that the test moves."""

    def _make(self, database: MemoryDatabase, flows: LockFlows) -> MemoryRuntime:
        return MemoryRuntime(database, flows)

    if not TYPE_CHECKING:

        @functools.wraps(Client.lock)
        def lock(self, *args: Any, **options: Any) -> Any:
            lock = super().lock(*args, **options)
            if not at_once.can_be_used(lock._flows, lock._options):
                return lock
            return at_once.Lock(self._runtime, lock._options, at_once.Lease)

    def run_when_due(self, schedule: Schedule[..., Any], *args: Any, **options: Any) -> Host:
        """Run a function of `client.once` at each of its slots when the clock gets there, until `stop` or `close`.

        A real host has a thread for this, which calls `schedule.run()`. Errors are logged and do not end it. In a
        test with tasks, start a task with `schedule.run()` instead.
        """
        from dblock.testing.memory.schedules import Host

        if getattr(getattr(schedule, "_slots", None), "_runtime", None) is not self._runtime:
            raise InvalidArgument(
                f"run_when_due takes a function that once() of the same client has decorated; got {brief(schedule)}."
            )
        return Host(self.clock, schedule, args, options)

    def __enter__(self) -> MemoryClient:
        return self


class AsyncMemoryClient(_MemoryClient, AsyncClient):
    """An `AsyncClient` without a database, a thread or a sleep. Its tasks wait on a clock that the test moves."""

    def _make(self, database: MemoryDatabase, flows: LockFlows) -> AsyncMemoryRuntime:
        return AsyncMemoryRuntime(database, flows)

    if not TYPE_CHECKING:

        @functools.wraps(AsyncClient.lock)
        def lock(self, *args: Any, **options: Any) -> Any:
            lock = super().lock(*args, **options)
            if not at_once.can_be_used(lock._flows, lock._options):
                return lock
            return at_once.AsyncLock(self._runtime, lock._options, at_once.AsyncLease)

    async def __aenter__(self) -> AsyncMemoryClient:
        return self
